import random
from dataclasses import replace

import pytest
import torch
from depth_toys import kept_weights, logits
from depth_toys import random_text as text
from families import make, tokens
from recount import layer_weights
from torch.nn import functional as F

from wide.errors import ConfigError, UnsupportedModelError
from wide.methods import tyr
from wide.methods.calibration import windows
from wide.methods.catalogue import TyrConfig
from wide.methods.layer_runner import EditedWeights, LayerRunner
from wide.methods.method import Target, channels_share, width_share
from wide.methods.second_order import GramAccumulator, UnitPruner
from wide.methods.tyr import Levels, Projection, Supernet, TopKDivergence, evolve, mutant
from wide.models.attach import attach, detach
from wide.models.cost import static_sparsity
from wide.models.discovery import discover
from wide.plan import Dense, Kept, Skipped

SETTINGS = TyrConfig(
    iterations=2,
    first_step=0.25,
    min_channel_step=4,
    num_windows=12,
    window_length=16,
    batch_size=5,
    ffn_rounds=4,
    generations=3,
    offspring=6,
    stage_tokens=(8, 32, 64),
    survivors=(3, 2),
    search_window_length=16,
    search_batch_size=3,
    top_k=40,
)
CHANGES = {"num_hidden_layers": 3, "initializer_range": 0.2}


def with_settings(**changes):
    return replace(SETTINGS, **changes)


def removed_of(plan, half):
    def count(part):
        if isinstance(part, Dense):
            return 0
        return None if isinstance(part, Skipped) else part.grouping.num_groups - part.kept

    return [count(getattr(layer, half)) for layer in plan.layers]


def test_both_totals_are_exact_and_the_model_is_left_as_it_was():
    model = make("llama", **CHANGES)
    with kept_weights(model):
        decision = tyr.decide(model, text(), Target(sparsity=0.5), SETTINGS)
    heads = [4 if count is None else count for count in removed_of(decision.plan, "attention")]
    channels = [64 if count is None else count for count in removed_of(decision.plan, "ffn")]
    assert sum(heads) == 6
    assert sum(channels) == 96
    last = decision.notes["iterations"][-1]
    assert last["removed"] == [count for pair in zip(heads, channels, strict=True) for count in pair]
    for iteration in decision.notes["iterations"]:
        assert iteration["divergence"] == sorted(iteration["divergence"], reverse=True)
    attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
    assert torch.isfinite(logits(model, tokens())).all()
    detach(model)


def test_the_same_seed_gives_the_same_decision():
    model = make("llama", **CHANGES).bfloat16()
    first = tyr.decide(model, text(), Target(sparsity=0.25), SETTINGS)
    second = tyr.decide(model, text(), Target(sparsity=0.25), SETTINGS)
    assert first.plan == second.plan
    assert first.notes == second.notes
    for name, weight in first.weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, second.weights[name])


def test_linear_flops_reach_the_share_of_all_products(monkeypatch):
    model = make("llama", **CHANGES)
    specs = discover(model)
    target = Target(sparsity=0.5, match="linear_flops")
    share = width_share(specs, target)
    weights = layer_weights(specs[0])
    assert (weights.query_output, weights.key_value, weights.ffn) == (2 * 32 * 32, 2 * 16 * 32, 3 * 64 * 32)
    assert share * (weights.query_output + weights.ffn) == pytest.approx(0.5 * weights.total)
    shares = []
    monkeypatch.setattr(tyr, "channels_share", lambda *told: shares.append(channels_share(*told)) or shares[-1])
    decision = tyr.decide(model, text(), target, SETTINGS)
    first, last = (iteration["removed"] for iteration in decision.notes["iterations"])
    assert sum(first[1::2]) == round(share * 192)
    # In the second iteration, keys and values that no head read after the first are paid for in channels.
    assert sum(last[1::2]) == round(shares[0] * 192) < sum(first[1::2])
    # What is off is what the heads of the second changed of that.
    attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
    missed = (sum(last[1::2]) / 192 - shares[1]) * weights.ffn / weights.total
    assert static_sparsity(model).linear_flops_layers == pytest.approx(0.5 + missed)
    detach(model)
    with pytest.raises(ConfigError, match=r"stay below 0\.8889"):
        width_share(specs, Target(sparsity=0.9, match="linear_flops"))


def test_masked_weights_equal_a_physically_sliced_attention_with_gathered_keys():
    # Heads 0, 2 and 3 of four over two KV heads: one KV head serves one query head, the other two.
    model = make("llama", initializer_range=0.2)
    spec = discover(model)[0]
    attention = spec.attention.module
    hidden = torch.randn(2, 9, 32)
    gram = GramAccumulator(32, device=torch.device("cpu"))
    handle = attention.o_proj.register_forward_pre_hook(lambda _m, args: gram.add(args[0]))
    position = model.model.rotary_emb(hidden, position_ids=torch.arange(9)[None])
    attention(hidden, position, None)
    handle.remove()
    pruner = UnitPruner(attention.o_proj.weight, gram.matrix, unit_size=8, damping=0.01)
    weight, kept = pruner.prune(1, rounds=1)
    heads = kept.nonzero().squeeze(1)
    with EditedWeights(model) as weights, torch.no_grad():
        weights.set(attention.o_proj, weight)
        masked = attention(hidden, position, None)[0]

    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def projected(linear, count):
        return (hidden @ linear.weight.T).unflatten(-1, (count, 8)).transpose(1, 2)

    with torch.no_grad():
        query, key = apply_rotary_pos_emb(projected(attention.q_proj, 4), projected(attention.k_proj, 2), *position)
        value, of_query = projected(attention.v_proj, 2), heads // 2
        mixed = F.scaled_dot_product_attention(query[:, heads], key[:, of_query], value[:, of_query], is_causal=True)
        columns = kept.repeat_interleave(8)
        sliced = mixed.transpose(1, 2).flatten(-2) @ weight[:, columns].T
    torch.testing.assert_close(sliced, masked, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_gates_and_weights_agree_and_slicing_changes_nothing(sparsity):
    model = make("llama", **CHANGES)
    ids = tokens()
    decision = tyr.decide(model, text(), Target(sparsity=sparsity), SETTINGS)
    attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
    gated = logits(model, ids)
    detach(model)
    # Zero columns alone, as an ordinary checkpoint would hold them.
    state = model.state_dict() | dict(decision.weights)
    for index, layer in enumerate(decision.plan.layers):
        if isinstance(layer.attention, Skipped):
            state[f"model.layers.{index}.self_attn.o_proj.weight"].zero_()
        if isinstance(layer.ffn, Skipped):
            state[f"model.layers.{index}.mlp.down_proj.weight"].zero_()
    model.load_state_dict(state)
    torch.testing.assert_close(logits(model, ids), gated, rtol=0, atol=1e-4)
    for name, weight in decision.weights.items():
        half = "attention" if "o_proj" in name else "ffn"
        scale = decision.tensors[f"layers.{name.split('.')[2]}.{half}.scale"]
        size = weight.shape[1] // len(scale)
        assert torch.equal(weight.any(0).view(-1, size).any(1), scale.bool())


def supernet(model, settings, expected=(2, 32) * 3):
    specs = discover(model)
    ids = windows(text(), count=12, length=16, seed=0)
    net = Supernet(specs, EditedWeights(model), settings)
    net.set_levels(expected, 0)
    runner = LayerRunner(model, specs, ids, batch_size=5)
    passed = net.fill(runner, "layers")
    return net.projections, net.levels, net.copies, runner, passed


def test_copies_exist_at_every_level_with_exact_counts_and_dense_and_empty_ends():
    model = make("llama", **CHANGES)
    targets, levels, copies, _, passed = supernet(model, with_settings(levels_per_side=2))
    assert passed == 2 * 12 * 16
    for index, (target, of) in enumerate(zip(targets, levels, strict=True)):
        assert list(of.all()) == [-2, -1, 0, 1, 2]
        for level in of.all():
            kept = copies[index, level][1]
            assert int((~kept).sum()) == of.removed(level) == target.num_units // 4 * (level + 2)
        assert torch.equal(copies[index, -2][0], target.linear.weight)
        assert not copies[index, 2][0].any()


def test_later_layers_are_fitted_to_inputs_with_the_error_of_earlier_ones():
    model = make("llama", **CHANGES)
    targets, levels, copies, _, _ = supernet(model, SETTINGS)
    specs = discover(model)
    ids = windows(text(), count=12, length=16, seed=0)
    with EditedWeights(model) as weights:
        weights.set(targets[0].linear, copies[0, 0][0])
        weights.set(targets[1].linear, copies[1, 0][0])
        runner = LayerRunner(model, specs, ids, batch_size=5)
        runner.advance(0)
    gram = GramAccumulator(64, device=torch.device("cpu"))
    runner.observe(1, {targets[3].linear: gram.add})
    pruner = UnitPruner(targets[3].linear.weight, gram.matrix, unit_size=1, damping=SETTINGS.damping)
    for level in levels[3].all():
        weight, kept = pruner.prune(levels[3].removed(level), rounds=4)
        assert torch.equal(copies[3, level][1], kept)
        torch.testing.assert_close(copies[3, level][0], weight)


def test_the_released_code_fits_every_layer_behind_unpruned_ones():
    model = make("llama", **CHANGES)
    targets, levels, copies, runner, passed = supernet(model, with_settings(propagation="dense"))
    assert passed == 2 * 12 * 16
    specs, ids = discover(model), windows(text(), count=12, length=16, seed=0)
    dense = LayerRunner(model, specs, ids, batch_size=5)
    gram = GramAccumulator(64, device=torch.device("cpu"))
    for index in range(3):
        if index == 2:
            dense.observe(2, {targets[5].linear: gram.add})
        dense.advance(index)
    pruner = UnitPruner(targets[5].linear.weight, gram.matrix, unit_size=1, damping=SETTINGS.damping)
    weight, _ = pruner.prune(levels[5].removed(0), rounds=4)
    torch.testing.assert_close(copies[5, 0][0], weight)
    assert all(torch.equal(*pair) for pair in zip(runner.inputs, dense.inputs, strict=True))


@pytest.mark.parametrize(
    ("propagation", "told"), [("expected", "overwrites"), ("mean", "(paper)"), ("dense", "as the released")]
)
def test_each_propagation_says_whose_it_is(propagation, told):
    settings = with_settings(propagation=propagation, iterations=1, generations=1)
    decision = tyr.decide(make("llama", **CHANGES), text(), Target(sparsity=0.5), settings)
    assert any(told in sentence for sentence in decision.deviations)


def test_mean_propagation_weighs_copies_by_what_they_keep():
    model = make("llama", **CHANGES)
    # Attention has levels -1, 0, 1 and the FFN -2 ... 2: where one has no copy, its nearest serves.
    settings = with_settings(propagation="mean", levels_per_side=2, first_step=0.25, min_head_step=2)
    targets, levels, copies, runner, passed = supernet(model, settings)
    assert passed == (1 + 5) * 12 * 16
    specs = discover(model)
    ids = windows(text(), count=12, length=16, seed=0)
    inputs = LayerRunner(model, specs, ids, batch_size=5).inputs
    for index in range(3):
        sums, total = 0.0, 0.0
        for level in range(-2, 3):
            attention, ffn = min(max(level, -1), 1), level
            keep = (1 - levels[0].removed(attention) / 4 + 1 - levels[1].removed(ffn) / 64) / 2
            with EditedWeights(model) as weights:
                weights.set(targets[2 * index].linear, copies[2 * index, attention][0])
                weights.set(targets[2 * index + 1].linear, copies[2 * index + 1, ffn][0])
                replay = LayerRunner(model, specs, ids, batch_size=5)
                replay.inputs = inputs
                sums = sums + keep * torch.cat([replay.call(index, batch) for batch in range(3)])
            total += keep
        inputs = list((sums / total).split(5))
    torch.testing.assert_close(torch.cat(runner.inputs), torch.cat(inputs), rtol=1e-4, atol=1e-4)


def test_levels_stay_inside_what_there_is_and_halve_with_the_iterations():
    model = make("llama")
    eight = Projection(layer=0, kind="attention", linear=torch.nn.Linear(8, 1), unit_size=1)
    of = Levels.around(eight, 3, step=2, per_side=4)
    assert [of.removed(level) for level in of.all()] == [1, 3, 5, 7]
    net = Supernet(discover(model), EditedWeights(model), TyrConfig(min_channel_step=3))
    steps = []
    for iteration in (0, 1, 5):
        net.set_levels([2, 32, 2, 32], iteration)
        steps.append([of.step for of in net.levels])
    assert steps == [[1, 8, 1, 8], [1, 4, 1, 4], [1, 3, 1, 3]]


@pytest.mark.parametrize("share", [0.1, 0.3, 1 / 3, 0.5, 0.9])
def test_budgets_are_exact_in_total_and_even(share):
    model = make("llama", num_hidden_layers=5, intermediate_size=72)
    budget = Supernet(discover(model), EditedWeights(model), TyrConfig()).initial_budget(share)
    for half, units in ((0, 4), (1, 72)):
        assert sum(budget[half::2]) == int(share * units * 5 + 0.5)
        assert max(budget[half::2]) - min(budget[half::2]) <= 1


MODULES = [Levels(kind="a", lowest=-2, highest=1)] * 4 + [Levels(kind="b", lowest=0, highest=4)] * 3


def test_mutants_keep_the_budget_of_each_kind_and_their_ranges():
    generator = random.Random(0)
    candidate = (0,) * 7
    seen = set()
    for _ in range(500):
        candidate = mutant(candidate, MODULES, 4, generator)
        assert sum(candidate[:4]) == sum(candidate[4:]) == 0
        assert all(m.lowest <= level <= m.highest for m, level in zip(MODULES, candidate, strict=True))
        seen.add(candidate)
    assert len(seen) > 20


def test_where_nothing_can_be_swapped_the_parent_stays():
    lonely = [Levels(kind="a", lowest=-1, highest=1), Levels(kind="b", lowest=-1, highest=1)]
    assert mutant((0, 0), lonely, 4, random.Random(0)) == (0, 0)
    settings = with_settings(generations=2, offspring=3, max_swaps=2)
    found = evolve(lonely, lambda *_: 1.0, settings, seed=0, title="search")
    assert found[0] == (0, 0)


def test_the_search_finds_a_known_optimum_and_never_gets_worse():
    wanted = (-2, 1, 1, 0, 0, 0, 0)
    stages = []

    def fitness(candidate, stage, generation):
        stages.append((generation, stage))
        distance = sum(abs(a - b) for a, b in zip(candidate, wanted, strict=True))
        # The first stage is noisy, and some candidates break the model.
        return float("nan") if candidate[3] == 1 else distance + (0.1 * (generation % 2) if stage == 0 else 0.0)

    settings = with_settings(generations=25, offspring=16, max_swaps=3, survivors=(8, 4))
    found = evolve(MODULES, fitness, settings, seed=1, title="search")
    best, history = found
    assert best == wanted
    assert history == sorted(history, reverse=True)
    assert stages.count((0, 2)) <= 5
    assert stages.count((0, 1)) <= 8


def test_the_divergence_is_that_of_the_largest_dense_logits():
    model, other = make("llama"), make("llama")
    with torch.no_grad():
        other.lm_head.weight.add_(torch.randn_like(other.lm_head.weight) * 0.05)
    ids = tokens(5, 9)
    for k in (3, 97, 8192):
        divergence = TopKDivergence(model, ids, top_k=k, batch_size=2)
        dense, pruned = logits(model, ids)[:, :-1], logits(other, ids)[:, :-1]
        top = dense.topk(min(k, 97)).indices
        wanted, ours = (x.gather(-1, top).double().log_softmax(-1) for x in (dense, pruned))
        expected = (wanted.exp() * (wanted - ours)).sum(-1)
        assert divergence.of(model) == pytest.approx(0.0, abs=1e-6)
        assert divergence.of(other) == pytest.approx(float(expected.mean()), rel=1e-4)
        assert divergence.of(other, [4, 1], 5) == pytest.approx(float(expected[[4, 1], :4].mean()), rel=1e-4)
        assert divergence.tokens == 3 * 45 + 10


def test_a_search_does_not_end_behind_the_uniform_plan():
    model = make("llama", **CHANGES)
    searched = tyr.decide(model, text(), Target(sparsity=0.5), with_settings(iterations=1, generations=6))
    uniform = tyr.decide(model, text(), Target(sparsity=0.5), with_settings(iterations=1, generations=1, offspring=0))
    history = searched.notes["iterations"][0]["divergence"]
    assert history[-1] <= uniform.notes["iterations"][0]["divergence"][-1]
    assert uniform.plan.layers[0].ffn == Kept(grouping=uniform.plan.layers[0].ffn.grouping, kept=32)


@pytest.mark.parametrize("family", ["phi3", "qwen3", "gemma2", "olmo2", "arcee"])
def test_other_families_are_pruned_too(family):
    model = make(family)
    settings = with_settings(iterations=1, generations=1)
    decision = tyr.decide(model, text(), Target(sparsity=0.5), settings)
    attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
    assert torch.isfinite(logits(model, tokens())).all()


def test_settings_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="survivors"):
        TyrConfig(survivors=(4,))
    with pytest.raises(ConfigError, match="expected"):
        TyrConfig(propagation="magnitude")
    with pytest.raises(ConfigError, match="stage_tokens"):
        tyr.decide(make("llama"), text(), Target(sparsity=0.5), with_settings(stage_tokens=(4, 8, 8)))
    too_long = with_settings(search_window_length=999, stage_tokens=(999, 999, 999))
    with pytest.raises(ConfigError, match=r"^search_window_length 999 is longer .* or set search_window_length to"):
        tyr.decide(make("llama"), text(), Target(sparsity=0.5), too_long)


def test_what_cannot_be_rewritten_is_refused():
    model = make("llama")
    layer = model.model.layers[1].mlp

    class Quantised(torch.nn.Module):
        in_features, out_features = 64, 32

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    layer.down_proj = Quantised(layer.down_proj)
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*Quantised"):
        tyr.decide(model, text(), Target(sparsity=0.5), SETTINGS)
