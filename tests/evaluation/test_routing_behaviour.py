import json

import pytest
import torch

from wide.data.batches import TokenBatch
from wide.evaluation.routing_stats import (
    MAX_BINS,
    MAX_SAMPLE_TOKENS,
    routing_records,
    routing_stats,
    token_texts,
)
from wide.models.attach import attach, attachment, detach
from wide.models.observe import capture_routing, force_routing
from wide.plan import Dense, LayerPlan, Plan
from wide.routing import LayerRouting

IDS = torch.randint(2, 4096, (3, 24), generator=torch.Generator().manual_seed(1))
VALID = torch.arange(24) < torch.tensor([24, 11, 5])[:, None]


def batch(rows, valid=None):
    valid = torch.ones_like(rows, dtype=torch.bool) if valid is None else valid
    return TokenBatch(input_ids=rows, labels=rows, valid=valid)


def test_behaviour_is_that_of_the_masks(attached_model, tokenizer):
    found = routing_stats(attached_model, [batch(IDS, VALID)])
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS, use_cache=False)
    assert found.tokens == int(VALID.sum())
    assert [(half.layer, half.half) for half in found.halves[:3]] == [(0, "attention"), (0, "ffn"), (1, "attention")]
    for half in found.halves:
        mask = getattr(routing[half.layer], half.half)
        assert half.execute_rate == pytest.approx(float(mask[VALID].double().mean()))
        assert half.by_group == pytest.approx(mask[VALID].double().mean(0).tolist())
    assert len(found.sample) == 24
    share = routing[2].ffn[0, 5].double().mean()
    assert found.sample_shares["ffn"][5][2] == pytest.approx(float(share))
    assert not attachment(attached_model).routers()[0]._forward_hooks


def test_the_sample_of_left_padded_text_is_its_real_tokens(attached_model, tokenizer):
    valid = VALID.flip(1)[1:]
    found = routing_stats(attached_model, [batch(IDS[1:], valid)])
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS[1:], use_cache=False)
    assert len(found.sample) == 11
    share = routing[0].attention[0, 13].double().mean()
    assert found.sample_shares["attention"][0][0] == pytest.approx(float(share))


def test_records_are_small_and_say_what_they_hold(attached_model, tokenizer):
    found = routing_stats(attached_model, [batch(IDS)])
    records = list(routing_records("stage 1", found, "text", tokenizer))
    metrics = {(r.metric, r.layer): r for r in records}
    assert len(metrics) == len(records)
    by_group = metrics["routing.ffn.by_group", 3].value
    assert by_group["groups"] == 4
    assert by_group["shares"] == pytest.approx(found.of("ffn")[3].by_group, abs=1e-4)
    sample = metrics["routing.sample", None].value
    assert len(sample["tokens"]) == len(sample["ffn"]) == 24
    assert len(sample["ffn"][0]) == 6
    assert sum(len(str(r.value)) for r in records) < 20_000


def test_many_groups_and_long_texts_are_cut_to_size(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    from wide.config import WideConfig

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=8 * 150,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = attach(LlamaForCausalLM(config).eval(), WideConfig(ffn_group_size=8, router_rank=4))
    rows = torch.randint(0, 4096, (1, 200))
    found = routing_stats(model, [batch(rows)])
    (half,) = found.of("ffn")
    assert len(half.by_group) == 150
    assert len(found.sample) == MAX_SAMPLE_TOKENS
    records = list(routing_records("s", found, "text", tokenizer))
    (rates,) = [r.value for r in records if r.metric == "routing.ffn.by_group"]
    assert rates["groups"] == 150
    assert len(rates["shares"]) == MAX_BINS


def test_halves_without_routers_are_left_out(attached_model, tokenizer):
    plan = attachment(attached_model).plan
    detach(attached_model)
    halves = [LayerPlan(attention=Dense(), ffn=layer.ffn) for layer in plan.layers[:1]]
    attach(attached_model, Plan((*halves, *(LayerPlan(attention=Dense(), ffn=Dense()) for _ in plan.layers[1:]))))
    found = routing_stats(attached_model, [batch(IDS)])
    assert [(half.layer, half.half) for half in found.halves] == [(0, "ffn")]
    assert set(found.sample_shares) == {"ffn"}
    assert found.sample_shares["ffn"][0][1:] == (None,) * 5
    assert not [r for r in routing_records("s", found, "t", tokenizer) if "attention" in r.metric]


def test_forced_masks_are_what_is_looked_at(attached_model, tokenizer):
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS, use_cache=False)
    ones = [LayerRouting(attention=torch.ones_like(r.attention), ffn=torch.zeros_like(r.ffn)) for r in routing]
    with force_routing(attached_model, ones):
        found = routing_stats(attached_model, [batch(IDS)])
    assert {half.execute_rate for half in found.of("attention")} == {1.0}
    assert {half.by_group for half in found.of("ffn")} == {(0.0,) * 4}
    assert all(json.dumps(r.value) != "null" for r in routing_records("s", found, "t", tokenizer) if r.unit == "json")


def test_texts_of_tokens_join_to_the_text(tokenizer):
    text = "Zürich, naïve: 漢字 and 🙂 end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_texts(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:-1])
