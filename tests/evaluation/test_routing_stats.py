import json

import numpy as np
import pytest
import torch

from wide.data.batches import TokenBatch, TokenBlocks
from wide.data.token_stream import TokenStream
from wide.errors import DataError, EvaluationError, NotAttachedError
from wide.evaluation.routing_stats import routing_stats
from wide.models.observe import capture_routing, force_routing
from wide.routing import LayerRouting

IDS = torch.randint(2, 4096, (3, 16), generator=torch.Generator().manual_seed(1))


def batch(rows, valid=None):
    valid = torch.ones_like(rows, dtype=torch.bool) if valid is None else valid
    return TokenBatch(input_ids=rows, labels=rows, valid=valid)


def test_rates_are_those_of_the_masks_without_padding(attached_model):
    valid = torch.arange(16) < torch.tensor([16, 9, 4])[:, None]
    stats = routing_stats(attached_model, [batch(IDS, valid)])
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS, use_cache=False)
    assert stats.tokens == stats.sparsity.tokens == int(valid.sum())
    assert len(stats.halves) == 12
    for half in stats.halves:
        mask = getattr(routing[half.layer], half.half)
        kept = mask[valid].double()
        assert half.execute_rate == pytest.approx(float(kept.mean()))
        assert half.by_group == pytest.approx(kept.mean(0).tolist())
        assert half.by_position[0] == pytest.approx(float(mask[:, 0].double().mean()))
        assert half.by_position[15] == pytest.approx(float(mask[0, 15].double().mean()))
        counts = torch.bincount(kept.sum(1).long(), minlength=mask.shape[-1] + 1)
        assert half.by_count == pytest.approx((counts / counts.sum()).tolist())
    assert json.loads(json.dumps(stats.to_json()))["tokens"] == stats.tokens
    assert f"of {stats.tokens} tokens, {stats.sparsity.mean:.1%} of the groups skipped" in repr(stats)


def test_what_padding_on_the_left_holds_does_not_matter(attached_model):
    valid = torch.arange(16).expand(3, -1) >= 5
    first, second = (routing_stats(attached_model, [batch(IDS.masked_fill(~valid, fill), valid)]) for fill in (3, 99))
    assert first == second


def test_batches_add_up(attached_model):
    ids = IDS.flatten().numpy().astype(np.uint32)
    blocks = TokenBlocks(TokenStream(tokens=ids, starts=np.array([0]), largest_id=4095), 16)
    whole, parts = (routing_stats(attached_model, blocks, batch_size=size) for size in (3, 1))
    for one, other in zip(whole.halves, parts.halves, strict=True):
        assert one.by_group == pytest.approx(other.by_group, abs=0.03)
    assert routing_stats(attached_model, blocks, max_blocks=1).tokens == 16


def test_forced_masks_are_what_is_counted(attached_model):
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS, use_cache=False)
    skip_all = [LayerRouting(attention=torch.zeros_like(r.attention), ffn=torch.ones_like(r.ffn)) for r in routing]
    with force_routing(attached_model, skip_all):
        stats = routing_stats(attached_model, [batch(IDS)])
    assert (stats.sparsity.attention, stats.sparsity.ffn) == (1.0, 0.0)
    assert {half.execute_rate for half in stats.halves if half.half == "attention"} == {0.0}


def test_a_named_source_is_packed_to_the_length_the_model_takes(attached_model, tmp_path):
    (tmp_path / "a.txt").write_text("Rivers run to the sea. " * 300)
    stats = routing_stats(attached_model, tmp_path, sequence_length=4096, max_blocks=1)
    assert len(stats.halves[0].by_position) == 1024
    assert stats.tokens == 1024


def test_a_plain_model_and_no_text_are_refused(plain_model, attached_model):
    with pytest.raises(NotAttachedError):
        routing_stats(plain_model, [batch(IDS)])
    with pytest.raises(EvaluationError, match="no token"):
        routing_stats(attached_model, [])


def test_texts_are_taken_as_they_are_and_other_things_refused(attached_model, tiny_tokenizer):
    found = routing_stats(
        attached_model, ["one text of some length"] * 4, tokenizer=tiny_tokenizer, sequence_length=16, batch_size=2
    )
    assert found.tokens == 96
    with pytest.raises(DataError, match="Tensor"):
        routing_stats(attached_model, [torch.zeros(1, 4, dtype=torch.int64)])
