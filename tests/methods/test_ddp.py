"""DDP: the score, the dense limit, the folded model, a toy that meets its target, and the gradient of what is off."""

import pytest
import torch
from depth_toys import cyclic_text
from families import make
from recount import layer_weights
from tiny import CONFIG, dense_model

from wide.data.batches import IGNORED
from wide.errors import ConfigError, NotAttachedError, TrainingError
from wide.methods.catalogue import DDPConfig
from wide.methods.ddp import Multipliers, annealed_midpoint, decide, export, relu_gate, retention, soft_sparsity
from wide.methods.method import Target
from wide.models.attach import attach, is_attached
from wide.models.cost import static_sparsity
from wide.models.discovery import discover
from wide.models.gates import StaticGate
from wide.training import modes
from wide.training.token_loss import token_losses

SHORT = {"batch_size": 4, "micro_batch_size": 2, "sequence_length": None}


def blocks(count=32, length=16, **options):
    return cyclic_text(count, length, **options)


def quick(**changes):
    return DDPConfig(**({"steps": 4} | SHORT | changes))


def logits(model, ids=None):
    ids = blocks().batch([0, 1]).input_ids if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture(scope="module")
def toy():
    """A model, and what 50 % of it is decided to be."""
    model = dense_model(num_hidden_layers=4)
    rates = {"learning_rate": 4e-2, "linear_rate": 0.1, "quadratic_rate": 2.0, "binary_rate": 0.1}
    settings = DDPConfig(steps=160, **(SHORT | {"micro_batch_size": 4}), **rates)
    return model, decide(model, blocks(), Target(sparsity=0.5), settings)


@pytest.mark.parametrize("midpoint", [0.5, 0.1, 0.05])
def test_score_is_zero_one_half_and_one(midpoint):
    score = retention(torch.tensor([0.0, midpoint, 2 * midpoint, 7.9]), midpoint)
    torch.testing.assert_close(score, torch.tensor([0.0, 0.5, 1.0, 1.0]))
    assert float(score[0]) == 0.0
    assert float(score[2]) == float(score[3]) == 1.0


def test_midpoint_falls_with_the_square_root_of_time():
    assert annealed_midpoint(0, steps=100, final=0.1) == 0.5
    assert annealed_midpoint(25, steps=100, final=0.1) == pytest.approx(0.3)
    assert annealed_midpoint(100, steps=100, final=0.1) == pytest.approx(0.1)


def test_gradient_reaches_gates_that_are_off():
    raw = torch.tensor([-0.1, -1e-3, 0.05, 2.0], requires_grad=True)
    assert relu_gate(raw).tolist() == raw.detach().relu().tolist()
    multipliers = Multipliers()
    with torch.no_grad():
        multipliers.linear.fill_(3.0)
    multipliers.penalty(retention(relu_gate(raw), 0.1), 0.5).backward()
    assert (raw.grad[:3] < 0).all()
    assert torch.isfinite(raw.grad).all()


def test_multipliers_rise_where_too_much_is_pruned_and_fall_where_too_little_is():
    for kept, sign in ((0.2, 1), (0.8, -1)):
        multipliers = Multipliers()
        multipliers.penalty(torch.tensor([kept, kept]), 0.5).backward()
        assert float(multipliers.linear.grad) == pytest.approx(sign * 0.3)
        assert float(multipliers.quadratic.grad) == pytest.approx(0.09)
        assert float(multipliers.binary.grad) == pytest.approx(0.16)


def test_gates_of_one_are_the_dense_model():
    model = dense_model()
    before = logits(model)
    settings = quick(steps=1, initial_spread=0.0, learning_rate=1e-30)
    decision = decide(model, blocks(), Target(sparsity=0.0), settings)
    attach(model, decision.plan, tensors=decision.tensors)
    after = logits(model)
    assert torch.equal(after, before)
    labels = blocks().batch([0, 1]).input_ids
    _, _, divergence = token_losses(after, labels, teacher=before, distillation=1.0)
    assert float(divergence) == 0.0
    assert float(soft_sparsity(retention(torch.cat(list(decision.tensors.values())), 0.1))) == 0.0


def test_toy_reaches_half_with_gates_that_have_decided(toy):
    _, decision = toy
    for kind in ("attention", "ffn"):
        facts = decision.notes[kind]
        assert abs(facts["soft_sparsity"] - 0.5) < 0.01
        assert facts["decided"] > 0.98
        assert facts["pruned"] == max(0.5, facts["relu_zeros"])
        assert facts["pruned"] == pytest.approx(0.5, abs=0.01)
    assert all(tensor.dtype == torch.float32 and bool((tensor >= 0).all()) for tensor in decision.tensors.values())
    assert decision.effort.tokens_forward == decision.effort.tokens_backward == 160 * 4 * 16


def test_folding_the_scales_into_the_weights_is_the_same_model(toy):
    model, decision = toy
    attach(model, decision.plan, tensors=decision.tensors)
    gated = logits(model)
    folded = dense_model(num_hidden_layers=4)
    with torch.no_grad():
        for spec in discover(folded):
            heads = decision.tensors[f"layers.{spec.index}.attention.scale"]
            spec.attention.output.weight.mul_(heads.repeat_interleave(spec.attention.head_dim))
            spec.ffn.up.weight.mul_(decision.tensors[f"layers.{spec.index}.ffn.scale"].unsqueeze(1))
    torch.testing.assert_close(logits(folded), gated, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(gated, logits(dense_model(num_hidden_layers=4)), atol=1e-2)


def test_model_is_left_as_it_was_and_the_seed_decides():
    model = dense_model().train()
    model.lm_head.weight.requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    one = decide(model, blocks(), Target(sparsity=0.25), quick())
    torch.manual_seed(2)
    two = decide(model, blocks(), Target(sparsity=0.25), quick())
    assert not is_attached(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert one.plan == two.plan
    assert all(torch.equal(value, two.tensors[name]) for name, value in one.tensors.items())
    other = decide(model, blocks(), Target(sparsity=0.25), quick(seed=3))
    assert any(not torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())


def test_micro_batches_recomputation_and_compilation_change_nothing_but_rounding():
    whole, *others = (
        decide(dense_model(), blocks(), Target(sparsity=0.25), quick(**changes)).tensors
        for changes in (
            {"micro_batch_size": 4},
            {"micro_batch_size": 1},
            {"gradient_checkpointing": True},
            {"compile": True},
            {"compile": True, "gradient_checkpointing": True},
        )
    )
    for other in others:
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, atol=1e-3, rtol=0)


def test_gates_learn_before_layers_are_compiled(monkeypatch):
    seen, run = [], modes.layers_run

    def noted(model, **how):
        # Where gradients lie in the memory of CUDA graphs, those of parameters that learn by now are copied.
        seen.append([module.scale.requires_grad for module in model.modules() if isinstance(module, StaticGate)])
        return run(model, **how)

    monkeypatch.setattr(modes, "layers_run", noted)
    decide(dense_model(), blocks(), Target(sparsity=0.25), quick(steps=1))
    assert len(seen) == 1
    assert all(seen[0])
    assert len(seen[0]) == 4


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "phi3", "olmo2", "cohere2"])
def test_families(family):
    model = make(family)
    decision = decide(model, blocks(), Target(sparsity=0.5), quick(steps=2))
    before = logits(model)
    attach(model, decision.plan, tensors=decision.tensors)
    after = logits(model)
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)
    assert sum(int((scale == 0).sum()) for name, scale in decision.tensors.items() if "attention" in name) == 4


@pytest.mark.parametrize("sizes", [{}, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}])
@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_linear_flops_count_keys_and_values_that_no_head_reads(sizes, sparsity):
    model = dense_model(num_hidden_layers=3, **sizes)
    decision = decide(model, blocks(), Target(sparsity=sparsity, match="linear_flops"), quick(steps=1))
    attach(model, decision.plan, tensors=decision.tensors)
    found = static_sparsity(model)
    work = layer_weights(discover(model)[0])
    # What heads and their keys and values leave is made up for in channels, to the nearest one.
    assert found.linear_flops_layers == pytest.approx(sparsity, abs=work.ffn / 64 / (3 * work.total))
    assert sparsity == 0.5 or found.kv_cache_kept < 1


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_keys_and_values_that_a_norm_over_all_heads_needs_are_not_counted_as_saved(kv_heads):
    model = make("olmo2", num_hidden_layers=3, num_key_value_heads=kv_heads)
    decision = decide(model, blocks(), Target(sparsity=0.4, match="linear_flops"), quick(steps=1))
    attach(model, decision.plan, tensors=decision.tensors)
    found, work = static_sparsity(model), layer_weights(discover(model)[0])
    assert found.linear_flops_layers == pytest.approx(0.4, abs=work.ffn / 64 / (3 * work.total))
    assert found.kv_cache_kept == 1


def test_nominal_heads_are_whole_in_each_layer():
    model = dense_model(num_hidden_layers=3)
    decision = decide(model, blocks(), Target(sparsity=0.3), quick(steps=1))
    # int(0.3 * 4) = 1 of the 4 heads a layer; round(0.3 * 192) of the channels.
    assert sum(layer.attention.kept for layer in decision.plan.layers) == 12 - 3
    assert sum(layer.ffn.kept for layer in decision.plan.layers) == 192 - 58
    assert any("forced the rest" in sentence for sentence in decision.deviations)


@pytest.mark.parametrize("pruned", [0, 1, 5, 6, 7])
def test_export_prunes_the_smallest_over_all_layers(pruned):
    raw = [torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0.3, 1.4]), torch.tensor([0.7, 0.2])]
    found = export(raw, pruned=pruned)
    zeros = sum(int((scale == 0).sum()) for scale in found.scales)
    assert all(scale.any() for scale in found.scales)
    assert zeros == min(pruned, 4) if pruned > 4 else zeros == pruned
    assert bool(found.forced) == (pruned > 4)
    for layer in found.forced:
        assert float(found.scales[layer].max()) == float(raw[layer].max())


def test_export_keeps_a_unit_that_changes_nothing_where_all_gates_are_off():
    found = export([torch.tensor([-0.1, -0.05, -0.1]), torch.tensor([1.0, 2.0, -0.1])], pruned=4)
    assert found.forced == (0,)
    assert found.scales[0].count_nonzero() == 1
    assert 0 < float(found.scales[0][1]) < 1e-4
    assert float(found.scales[0][1].half()) > 0
    assert found.scales[1].tolist() == [1.0, 2.0, 0.0]
    assert found.relu_zeros == pytest.approx(4 / 6)


def test_long_blocks_are_cut_and_every_piece_is_visited():
    seen = []
    model = dense_model()
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    text = blocks(4, 16, starts=(0, 20))
    decide(model, text, Target(sparsity=0.5), quick(sequence_length=8, steps=2, distillation=0.0))
    found = {tuple(row.tolist()) for ids in seen for row in ids}
    assert found == {tuple(row.tolist()) for row in text.batch(range(4)).input_ids.reshape(-1, 8)}
    assert (text.batch([1]).labels == IGNORED).any()


def test_errors_name_the_way_out():
    model = dense_model()
    with pytest.raises(ConfigError, match="16 tokens of a block"):
        decide(model, blocks(), Target(sparsity=0.5), quick(sequence_length=17))
    with pytest.raises(ConfigError, match="stay below"):
        decide(model, blocks(), Target(sparsity=0.95, match="linear_flops"), quick())
    with pytest.raises(ConfigError, match="does not divide"):
        DDPConfig(batch_size=4, micro_batch_size=3)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="step 0"):
        decide(model, blocks(), Target(sparsity=0.5), quick())
    assert not is_attached(model)
    attach(model, CONFIG)
    with pytest.raises(NotAttachedError):
        decide(model, blocks(), Target(sparsity=0.5), quick())


def test_more_pruning_is_farther_from_the_dense_model():
    rates = {"learning_rate": 4e-2, "linear_rate": 0.1, "quadratic_rate": 2.0, "binary_rate": 0.1}
    text, found = blocks(), []
    ids = text.batch(range(8)).input_ids
    for sparsity in (0.25, 0.5, 0.75):
        model = dense_model()
        dense = logits(model, ids)
        decision = decide(model, text, Target(sparsity=sparsity), quick(steps=60, micro_batch_size=4, **rates))
        attach(model, decision.plan, tensors=decision.tensors)
        found.append(float(token_losses(logits(model, ids), ids, teacher=dense, distillation=1.0)[2]))
    assert 0 < found[0] < found[1] < found[2]
