import json

import pytest
import torch

from wide.data.batches import TokenBatch
from wide.evaluation.routing_stats import (
    MAX_BINS,
    MAX_LAG,
    MAX_MATRIX_GROUPS,
    MAX_SAMPLE_TOKENS,
    HalfCounter,
    mean_by_distance,
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


def counted(mask, valid=None):
    counter = HalfCounter(*mask.shape[1:], mask.device)
    counter.add(mask, torch.ones(mask.shape[:2], dtype=torch.bool) if valid is None else valid)
    return counter


def test_phi_is_the_correlation_of_the_decisions():
    mask = torch.rand(3, 40, 5) < 0.4
    flat = mask.flatten(0, 1).double()
    assert torch.allclose(counted(mask).between_groups().phi(), torch.corrcoef(flat.t()), atol=1e-12)


def test_counts_of_several_forwards_add_up_and_leave_padding_out():
    mask = torch.rand(2, 30, 4) < 0.5
    valid = torch.arange(30) < torch.tensor([30, 7])[:, None]
    whole = counted(mask, valid)
    parts = HalfCounter(30, 4, mask.device)
    for row in range(2):
        parts.add(mask[row : row + 1], valid[row : row + 1])
    assert torch.equal(whole.rates(), parts.rates())
    assert torch.equal(whole.between_tokens().both, parts.between_tokens().both)
    kept = mask[valid].double()
    assert torch.allclose(whole.rates(), kept.mean(0))
    assert torch.allclose(whole.between_groups().phi(), torch.corrcoef(kept.t()), atol=1e-12)


def test_a_group_that_never_changes_has_no_correlation():
    mask = torch.rand(1, 30, 3) < 0.5
    mask[..., 1] = True
    phi = counted(mask).between_groups().phi()
    assert phi[1].isnan().all()
    assert phi[:, 1].isnan().all()
    assert not phi[0, 2].isnan()
    assert mean_by_distance(phi)[0] is None
    assert mean_by_distance(phi)[1] == pytest.approx(float(phi[0, 2]))


def test_stability_is_the_share_of_equal_neighbours():
    mask = torch.rand(2, 25, 6) < 0.3
    pairs = counted(mask).between_tokens()
    assert float(pairs.same()[0].mean()) == pytest.approx(float((mask[:, 1:] == mask[:, :-1]).double().mean()))
    assert pairs.phi().shape == (MAX_LAG, 6)
    expected = torch.corrcoef(torch.stack([mask[:, :-3, 2].flatten(), mask[:, 3:, 2].flatten()]).double())[0, 1]
    assert float(pairs.phi()[2, 2]) == pytest.approx(float(expected))
    constant = torch.ones(1, 9, 2, dtype=torch.bool)
    found = counted(constant).between_tokens()
    assert found.total.shape[0] == 8
    assert found.same().eq(1).all()
    assert found.same_by_chance().eq(1).all()
    assert found.phi().isnan().all()


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
        assert half.matrix_groups == tuple(range(len(half.by_group)))
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


def test_rounding_changes_only_decisions_near_the_threshold(attached_model, tokenizer):
    found = routing_stats(attached_model, [batch(IDS)])
    assert set(found.flips) == {"attention", "ffn"}
    assert all(0 <= share < 0.1 for share in found.flips.values())
    for router in attachment(attached_model).routers():
        router.threshold = -1e9
    found = routing_stats(attached_model, [batch(IDS)])
    assert found.flips == {"attention": 0.0, "ffn": 0.0}
    flips = routing_stats(attached_model.bfloat16(), [batch(IDS)]).flips
    assert flips == {}


def test_padding_does_not_change_what_rounding_flips(attached_model, tokenizer):
    shares = [routing_stats(attached_model, [batch(IDS[:1], valid)]).flips for valid in (None, VALID[1:2])]
    only_real = routing_stats(attached_model, [batch(IDS[:1, :11])]).flips
    assert shares[1] == only_real


def test_records_are_small_and_say_what_they_hold(attached_model, tokenizer):
    found = routing_stats(attached_model, [batch(IDS)])
    records = list(routing_records("stage 1", found, "text", tokenizer))
    metrics = {(r.metric, r.layer): r for r in records}
    assert len(metrics) == len(records)
    by_group = metrics["routing.ffn.by_group", 3].value
    assert by_group["groups"] == 4
    assert by_group["shares"] == pytest.approx(found.of("ffn")[3].by_group, abs=1e-4)
    same = [metrics["routing.attention.same_as_previous", layer].value for layer in range(6)]
    assert metrics["routing.attention.same_as_previous", None].value == pytest.approx(sum(same) / 6)
    matrices = [r for r in records if r.metric == "routing.ffn.group_matrix"]
    rates = {half.layer: half.execute_rate for half in found.of("ffn")}
    assert [r.layer for r in matrices] == [max(rates, key=rates.get), min(rates, key=rates.get)]
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
    assert len(half.matrix_groups) == len(half.matrix) == MAX_MATRIX_GROUPS
    assert half.matrix_groups[0] == 0
    assert half.matrix_groups[-1] == 149
    assert len(found.sample) == MAX_SAMPLE_TOKENS
    records = list(routing_records("s", found, "text", tokenizer))
    (rates,) = [r.value for r in records if r.metric == "routing.ffn.by_group"]
    assert rates["groups"] == 150
    assert len(rates["shares"]) == MAX_BINS
    assert sum(r.metric == "routing.ffn.group_matrix" for r in records) == 1


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


def test_a_single_token_has_no_neighbour(attached_model, tokenizer):
    found = routing_stats(attached_model, [batch(IDS[:1, :1])])
    assert found.halves[0].same_as_previous is None
    assert found.halves[0].token_correlation == ()
    assert [r.metric for r in routing_records("s", found, "t", tokenizer)].count(
        "routing.attention.same_as_previous"
    ) == 0


def test_forced_masks_are_what_is_looked_at(attached_model, tokenizer):
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(IDS, use_cache=False)
    ones = [LayerRouting(attention=torch.ones_like(r.attention), ffn=torch.zeros_like(r.ffn)) for r in routing]
    with force_routing(attached_model, ones):
        found = routing_stats(attached_model, [batch(IDS)])
    assert {half.execute_rate for half in found.of("attention")} == {1.0}
    assert {half.same_as_previous for half in found.of("ffn")} == {1.0}
    assert all(json.dumps(r.value) != "null" for r in routing_records("s", found, "t", tokenizer) if r.unit == "json")


def test_texts_of_tokens_join_to_the_text(tokenizer):
    text = "Zürich, naïve: 漢字 and 🙂 end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_texts(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:-1])
