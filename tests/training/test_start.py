"""What stage 1 begins with: groups of channels that act together, and routers that skip what matters least."""

import copy
import dataclasses
import json
import math
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import RandomSource, dense_model, stage
from tiny import batch as random_batch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from wide.config import ObjectiveConfig, WideConfig
from wide.errors import ConfigError, TrainingError, UnsupportedModelError
from wide.models.adapter import load
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.observe import bypass, force_routing, observe
from wide.models.thresholds import calibrate_thresholds, measure_sparsity, set_sparsity
from wide.routing import LayerRouting
from wide.training import channel_groups, router_fit
from wide.training.activations import in_passes, read_inputs
from wide.training.channel_groups import balanced_assignment, channel_order, skip_cost, thinned
from wide.training.router_fit import crucial_groups, fit_routers, fitted_margins, group_energy
from wide.training.stages import prune
from wide.training.text_source import read_batches
from wide.training.token_loss import num_targets, token_losses

CLUSTERED = WideConfig(ffn_group_size=16, router_rank=4, ffn_grouping="clustered", start_tokens=256)
FITTED = WideConfig(ffn_group_size=16, router_rank=4, router_start="fitted", router_bias=True, start_tokens=512)
UNFITTED = dataclasses.replace(FITTED, router_start="random")


def batches():
    return read_batches(RandomSource(), batch_size=8, micro_batch_size=4, tokens=512)


@given(
    st.integers(1, 7), st.integers(1, 9), st.integers(0, 10_000), st.sampled_from(["normal", "ties", "huge", "same"])
)
@settings(max_examples=60)
def test_an_assignment_is_balanced_and_nearly_the_cheapest(places, capacity, seed, kind):
    optimize = pytest.importorskip("scipy.optimize")
    cost = torch.randn(places * capacity, places, generator=torch.Generator().manual_seed(seed))
    cost = {"normal": cost, "ties": cost.round(), "huge": cost * 1e20, "same": cost * 0 + 3}[kind].double()
    chosen = balanced_assignment(cost, capacity)
    assert torch.bincount(chosen, minlength=places).tolist() == [capacity] * places
    found = float(cost.gather(1, chosen[:, None]).sum())
    rows, columns = optimize.linear_sum_assignment(cost.repeat_interleave(capacity, 1).numpy())
    least = float(cost.repeat_interleave(capacity, 1)[rows, columns].sum())
    two = cost.topk(min(2, places), largest=False).values
    regret, spread = float((two[:, -1] - two[:, 0]).mean()), float((cost.amax(1) - cost.amin(1)).mean())
    slack = 0.3 * len(cost) * (regret + 0.01 * spread) + 1e-9 * float(cost.abs().max())
    assert least - slack * 1e-6 <= found <= least + slack


def assigned_a_bid_at_a_time(cost, capacity):
    """The same auction in plain words, with a look at every bid."""
    cost, overshoot = cost.double(), channel_groups._overshoot(cost.double())
    price, chosen = torch.zeros(cost.shape[1], dtype=torch.float64), cost.argmin(1)
    while (load := torch.bincount(chosen, minlength=len(price))).max() > capacity:
        before, asked = chosen.clone(), cost + price
        for place in (load > capacity).nonzero().flatten().tolist():
            items = (before == place).nonzero().flatten()
            elsewhere = asked[items].clone()
            elsewhere[:, place] = torch.inf
            other, where = elsewhere.min(1)
            loss = other - asked[items, place]
            first = loss.argsort(stable=True)[: load[place] - capacity]
            price[place] += loss[first].clamp_min(0.0).max() + overshoot
            chosen[items[first]] = where[first]
        overshoot *= 1.01
    return chosen


@pytest.mark.parametrize("kind", ["normal", "ties", "skewed"])
@pytest.mark.parametrize("seed", range(3))
def test_bids_are_those_of_a_plain_auction_and_seldom_looked_at(kind, seed):
    cost = torch.randn(240, 8, generator=torch.Generator().manual_seed(seed))
    cost = {"normal": cost, "ties": cost.round(), "skewed": cost + 3 * torch.arange(8)}[kind]
    looks = Counter()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            # By what makes the host wait for a GPU: numbers that are read, and shapes that depend on values.
            looks["bids"] += function is torch.ops.aten.scatter_reduce.two
            looks["read"] += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            is_index = function is torch.ops.aten.index.Tensor
            looks["read"] += is_index and any(i is not None and i.dtype == torch.bool for i in args[1])
            looks["read"] += function is torch.ops.aten.bincount.default
            return function(*args, **(kwargs or {}))

    with Watching():
        chosen = balanced_assignment(cost, 30)
    assert torch.equal(chosen, assigned_a_bid_at_a_time(cost, 30))
    assert looks["bids"] >= 8
    assert looks["read"] <= 4 + looks["bids"] // 8


def test_places_that_nearly_all_like_alike_do_not_bid_forever():
    cost = torch.zeros(600, 3)
    cost[:, 2] = 1.0
    cost[0, 2] = 1e9
    chosen = balanced_assignment(cost, 200)
    assert torch.bincount(chosen).tolist() == [200, 200, 200]
    assert chosen[0] != 2


def planted(tokens=400, *, groups=4, size=6, noise=0.05, seed=0):
    """Channels of hidden groups, of which one or two are strong at each token, in random order."""
    generator = torch.Generator().manual_seed(seed)
    active = torch.rand(tokens, groups, generator=generator) < 0.4
    strength = active.repeat_interleave(size, 1) + noise * torch.rand(tokens, groups * size, generator=generator)
    shuffle = torch.randperm(groups * size, generator=generator)
    return strength[:, shuffle] ** 2, shuffle // size


@pytest.mark.parametrize("seed", range(4))
def test_planted_groups_are_found(seed):
    energy, truth = planted(seed=seed)
    order = channel_order(energy, num_groups=4, skipped=0.6, seed=seed)
    assert sorted(order.tolist()) == list(range(24))
    for run in truth[order].split(6):
        assert len(set(run.tolist())) == 1


@pytest.mark.parametrize("energy", [torch.zeros(5, 8), torch.full((1, 8), 1e-30), torch.rand(3, 8).double() * 1e12])
def test_degenerate_activations_still_give_an_order(energy):
    order = channel_order(energy, num_groups=4, skipped=0.5, seed=0)
    assert sorted(order.tolist()) == list(range(8))
    assert 0.0 <= skip_cost(energy, torch.arange(8) // 2, 4, 0.5) <= 1.0


def test_clusters_never_cost_more_than_the_start_and_channels_stay_sorted_inside():
    energy, _ = planted(noise=1.0)
    order = channel_order(energy, num_groups=4, skipped=0.5, seed=1)
    assert all(run.tolist() == sorted(run.tolist()) for run in order.split(6))
    groups = torch.empty(24, dtype=torch.int64)
    groups[order] = torch.arange(24) // 6
    assert skip_cost(energy, groups, 4, 0.5) < skip_cost(energy, torch.arange(24) // 6, 4, 0.5)


def test_margins_follow_what_is_to_be_predicted_at_any_rank():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 12, generator=generator) + 3.0
    slope = torch.randn(12, 2, generator=generator) @ torch.randn(2, 5, generator=generator)
    surplus = (hidden - 3.0) @ slope * 0.2 + 0.1 + 0.05 * torch.randn(4000, 5, generator=generator)
    directions, mixing, bias = fitted_margins(hidden.bfloat16(), surplus)
    latent = hidden @ directions.T
    assert latent.var(0)[:2] == pytest.approx([1.0, 1.0], abs=0.15)
    for rank in (2, 5):
        margins = latent[:, :rank] @ mixing[:, :rank].T + bias
        agree = ((margins > 0) == (surplus > 0)).float().mean()
        assert agree > 0.9
    # What is always worth it has a margin that training can still change.
    _, _, bias = fitted_margins(hidden, surplus * 0 + 1.0)
    assert (bias <= 4.0).all()
    # Constant surplus, and more dimensions than tokens: still numbers.
    for x, y in ((hidden, surplus * 0 + 1.0), (hidden[:3], surplus[:3])):
        assert all(torch.isfinite(part).all() for part in fitted_margins(x, y))


@pytest.mark.parametrize("measure", ["mean", "linear_flops"])
@pytest.mark.usefixtures("every_point")
def test_fitted_routers_meet_the_target_and_skip_what_matters_least(measure):
    text, losses = batches(), {}
    for kind in ("fitted", "random"):
        model = dense_model()
        torch.manual_seed(1)
        attach(model, UNFITTED)
        if kind == "fitted":
            weights = {name: p.detach().clone() for name, p in model.named_parameters() if "wide_" not in name}
            fit_routers(model, text, ObjectiveConfig(sparsity=0.4, target=measure))
            assert measure_sparsity(model, text, 0.0, measure=measure) == pytest.approx(0.4, abs=0.02)
            assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
            assert all(p.grad is None for p in model.parameters())
            assert attachment(model).thresholds_by_sparsity == []
            assert {router.threshold for router in attachment(model).routers()} == {0.0}
        else:
            calibrate_thresholds(model, text, measure=measure, sparsities=(0.3, 0.4, 0.5))
            set_sparsity(model, 0.4)
        losses[kind] = distance_from_dense(model, text)
    assert losses["fitted"] < 0.8 * losses["random"]


def distance_from_dense(model, text):
    dense, total = dense_model(), 0.0
    with torch.no_grad():
        for batch in text:
            logits = [net(batch.input_ids).logits.log_softmax(-1) for net in (dense, model)]
            total += float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    return total


def test_ranks_above_the_groups_keep_directions_that_can_still_learn():
    model = attach(dense_model(), WideConfig(ffn_group_size=32, router_rank=8, router_bias=True))
    fit_routers(model, batches(), ObjectiveConfig(sparsity=0.5))
    router = attachment(model).routers()[1]
    assert router.num_groups == 2
    assert (router.up[:, 2:] == 0).all()
    assert (router.down[2:].norm(dim=1) > 0).all()


def test_stage_1_begins_with_clustered_groups_and_keeps_them_in_its_adapter(tmp_path):
    model, ids = dense_model(), batches()[0].input_ids
    base = {name: value.clone() for name, value in model.state_dict().items()}
    prune(model, RandomSource(), config=CLUSTERED, stage=stage(batch_size=64, steps=4), output=tmp_path)
    start = attachment(model).provenance["prune"]["start"]
    assert (start["ffn_grouping"], start["tokens"], start["resumed"]) == ("clustered", 256, False)
    again = load(dense_model(), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    orders = attachment(model).regrouped.orders()
    assert any(not torch.equal(order, torch.arange(64)) for order in orders.values())
    detach(model)
    assert all(torch.equal(value, base[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["one group", "experts"])
def test_a_model_without_groups_to_cluster_is_trained_and_resumed(kind, tmp_path):
    config = dataclasses.replace(CLUSTERED, ffn_group_size=64)

    def model():
        if kind == "one group":
            return dense_model()
        torch.manual_seed(0)
        sizes = {
            name: getattr(dense_model().config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()

    prune(model(), RandomSource(), config=config, stage=stage(steps=2), output=tmp_path)
    pruned = prune(model(), RandomSource(), config=config, stage=stage(steps=2), output=tmp_path, resume=True)
    assert attachment(pruned).provenance["prune"]["start"]["resumed"]
    assert is_attached(load(model(), tmp_path / "adapter"))


def test_a_resumed_run_is_the_whole_run_bit_for_bit(tmp_path):
    config = WideConfig(
        ffn_group_size=16,
        router_rank=4,
        ffn_grouping="clustered",
        router_start="fitted",
        router_bias=True,
        start_tokens=256,
    )
    whole = prune(
        dense_model(), RandomSource(), config=config, stage=stage(batch_size=64, steps=8), output=tmp_path / "whole"
    )
    part = tmp_path / "part"

    class Stopping(RandomSource):
        def batch_at(self, step, **sizes):
            if step == 6:
                raise InterruptedError
            return super().batch_at(step, **sizes)

    with pytest.raises(InterruptedError):
        prune(
            dense_model(),
            Stopping(),
            config=config,
            stage=stage(batch_size=64, steps=8, checkpoint_every=4),
            output=part,
        )
    order = part / "channel_order.safetensors"
    kept = order.read_bytes()
    order.unlink()
    options = {
        "config": config,
        "stage": stage(batch_size=64, steps=8, checkpoint_every=4),
        "output": part,
        "resume": True,
    }
    with pytest.raises(TrainingError, match="channel_order"):
        prune(dense_model(), Stopping(), **options)
    order.write_bytes(kept)

    class Stopping(RandomSource):  # the same name: part of what a run is recognised by
        pass

    resumed = prune(dense_model(), Stopping(), **options)
    began, went_on = (attachment(m).provenance["prune"]["start"] for m in (whole, resumed))
    assert went_on["resumed"]
    assert {k: v for k, v in went_on.items() if k not in ("seconds", "resumed")} == {
        k: v for k, v in began.items() if k not in ("seconds", "resumed")
    }
    assert went_on["seconds"] > 0
    for one, other in zip(attachment(whole).routers(), attachment(resumed).routers(), strict=True):
        assert torch.equal(one.up, other.up)
        assert torch.equal(one.down, other.down)


def test_passes_hold_every_key_once_and_never_more_than_this_process_may_have(monkeypatch):
    sizes = dict.fromkeys(range(10), 1 << 31)
    passes = in_passes(sizes)
    assert [key for run in passes for key in run] == list(range(10))
    assert [len(run) for run in passes] == [4, 4, 2]
    assert in_passes({0: 1 << 44}) == [[0]]
    assert in_passes({0: 0, 1: 0}) == [[0, 1]]
    assert in_passes({}) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [len(run) for run in in_passes(sizes)] == [1] * 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ffn_grouping": "sorted"}, "ffn_grouping"),
        ({"router_start": "warm"}, "router_start"),
        ({"router_start": "fitted"}, "router_bias"),
        ({"start_tokens": 0}, "start_tokens"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        WideConfig(**changes)


@pytest.mark.parametrize("smoothing", [0.05, 0.2])
def test_the_smooth_distance_joins_the_absolute_one(smoothing):
    from wide.training.objective import _distance

    far = torch.tensor([-0.5, 0.3], requires_grad=True)
    assert torch.allclose(_distance(far, smoothing), far.abs() - smoothing / 2)
    near = torch.tensor([smoothing / 4, 0.0, -smoothing / 2], requires_grad=True)
    (slope,) = torch.autograd.grad(_distance(near, smoothing).sum(), near)
    assert slope.tolist() == pytest.approx([0.25, 0.0, -0.5])
    assert torch.equal(_distance(near, 0.0), near.abs())
    assert math.isfinite(float(_distance(near.detach(), 1.0).sum()))


@pytest.mark.parametrize(("tokens", "shapes"), [(1, [1]), (16, [1]), (17, [2]), (100, [4, 3]), (129, [4, 4, 1])])
def test_the_start_reads_as_many_whole_sequences_as_it_was_allowed(tokens, shapes):
    pieces = read_batches(RandomSource(), batch_size=8, micro_batch_size=4, tokens=tokens)
    assert [len(piece.input_ids) for piece in pieces] == shapes
    whole = torch.cat([RandomSource().batch_at(step, batch_size=8).input_ids for step in range(2)])
    assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), whole[: sum(shapes)])


def test_the_budget_of_the_start_holds_however_large_the_batches_are():
    config = dataclasses.replace(CLUSTERED, start_tokens=100)
    model = prune(dense_model(), RandomSource(), config=config, stage=stage(batch_size=64, steps=1))
    assert attachment(model).provenance["prune"]["start"]["tokens"] == 7 * 16


def test_more_tokens_than_the_clustering_of_a_layer_can_hold_are_thinned_evenly(monkeypatch):
    values = torch.arange(30.0).view(10, 3)
    assert torch.equal(thinned(values), values)
    monkeypatch.setattr(channel_groups, "_MOST_VALUES", 12)
    assert torch.equal(thinned(values), values[::3])


@pytest.mark.parametrize("num_groups", [1, 2, 5])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_the_energy_of_groups_is_that_of_their_output_alone(num_groups, at_once, monkeypatch):
    monkeypatch.setattr(router_fit, "_VALUES_AT_ONCE", at_once)
    linear, rows = torch.nn.Linear(10, 4), torch.randn(23, 10, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(10).view(num_groups, -1)
    wanted = [(rows[:, group] @ linear.weight[:, group].T).square().sum(-1) for group in groups]
    torch.testing.assert_close(group_energy(linear, num_groups)(rows), torch.stack(wanted, -1))


@pytest.mark.parametrize("size", [16, 64])
def test_recomputing_layers_changes_nothing_about_the_fit_and_nothing_stays_on(size):
    found = []
    for recompute in (False, True):
        model = dense_model()
        torch.manual_seed(1)
        attach(model, dataclasses.replace(UNFITTED, ffn_group_size=size))
        ran = []
        layer = model.model.layers[1]
        layer.mlp.register_forward_hook(lambda *_, layer=layer, ran=ran: ran.append("forward" in layer.__dict__))
        fit_routers(model, batches(), ObjectiveConfig(sparsity=0.4), gradient_checkpointing=recompute)
        assert any(ran) == recompute
        assert not any(module.training for module in model.modules())
        assert "forward" not in layer.__dict__
        found.append([router.up.detach().clone() for router in attachment(model).routers()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_quantised_weights_are_not_fitted_to():
    model = attach(dense_model(), UNFITTED)
    weight = model.model.layers[1].mlp.down_proj.weight
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="quantised here; take 'random'"):
        fit_routers(model, batches(), ObjectiveConfig(sparsity=0.5))


def test_nothing_to_skip_leaves_routers_that_decide_by_argmax():
    model = attach(dense_model(), UNFITTED)
    fit_routers(model, batches(), ObjectiveConfig(sparsity=0.0))
    assert {router.threshold for router in attachment(model).routers()} == {0.0}


def test_weight_decay_does_not_bring_groups_that_always_execute_within_reach(with_crucial_groups):
    fitted, text, _ = with_crucial_groups
    model = copy.deepcopy(fitted)
    fit_routers(model, text, ObjectiveConfig(sparsity=0.5))
    with torch.no_grad():
        for router in attachment(model).routers():
            # The paper's schedule with a weight decay of 0.12.
            router.bias *= 0.3
    calibrate_thresholds(model, text)
    with pytest.raises(ConfigError, match="lies outside what this adapter is calibrated for"):
        set_sparsity(model, 0.85)


class Uneven(RandomSource):
    """Has longer sequences at every other step."""

    def batch_at(self, step, *, batch_size, **sizes):
        return random_batch(batch_size, 12 + 4 * (step % 2), seed=step)


def test_routers_are_fitted_to_steps_of_different_lengths(monkeypatch):
    """What groups cost is measured on the first tokens, whatever the lengths."""
    model = attach(dense_model(), UNFITTED)
    monkeypatch.setattr(router_fit, "_TOKENS_WITH_LOSS", 100)
    monkeypatch.setattr(router_fit, "_CRUCIAL", -1e9)
    monkeypatch.setattr(router_fit, "_LEAST", -1e9)
    text = read_batches(Uneven(), batch_size=4, micro_batch_size=2, tokens=256)
    outputs = [layer.get_submodule(n) for layer in model.model.layers for n in ("self_attn.o_proj", "mlp.down_proj")]
    share = {key: 0.25 / router.num_groups for key, router in enumerate(attachment(model).routers())}
    costs = {(key, group): cost for cost, key, group in crucial_groups(model, dict(enumerate(outputs)), share, text)}
    # Four sequences of 12 tokens, then three of 16.
    read = [*text[:3], text[3].split(1)[0]]
    totals = []
    for factor in (1.0, 0.0):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[:, 16:32] *= factor
            totals.append(sum(token_losses(masks_off(model, one), one.labels)[0] for one in read))
    assert costs[3, 1] == pytest.approx(float(totals[1] - totals[0]) / (4 * 11 + 3 * 15), rel=1e-3)
    assert is_attached(prune(dense_model(), Uneven(), config=FITTED, stage=stage(steps=1)))


def masks_off(model, one):
    with bypass(model):
        return model(one.input_ids).logits


@pytest.mark.parametrize("config", [CLUSTERED, FITTED], ids=["clustered", "fitted"])
def test_activations_that_are_not_finite_are_refused_and_leave_no_routers(config):
    model = dense_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 1e30
        model.model.layers[0].mlp.gate_proj.weight[5] = 1e30
    with pytest.raises(TrainingError, match="inf or nan"):
        prune(model, RandomSource(), config=config, stage=stage(steps=1))
    assert not is_attached(model)


def test_routers_are_fitted_by_training_only():
    model = dense_model()
    with pytest.raises(ConfigError, match=r"router_start='fitted'.*wide\.prune"):
        attach(model, FITTED)
    assert not is_attached(model)


class Counting(RandomSource):
    """Says whether any text was read."""

    reads = 0

    def batch_at(self, step, **sizes):
        self.reads += 1
        return super().batch_at(step, **sizes)


@pytest.mark.parametrize("step", [0, 5])
def test_a_run_that_is_interrupted_gives_the_model_back_without_routers(step, tmp_path):
    class Stopping(Counting):
        def batch_at(self, at, **sizes):
            # The start reads two batches of four sequences.
            if self.reads == step:
                raise KeyboardInterrupt
            return super().batch_at(at, **sizes)

    model = dense_model()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    run = {"config": dataclasses.replace(FITTED, ffn_grouping="clustered", start_tokens=128), "stage": stage(steps=8)}
    with pytest.raises(KeyboardInterrupt):
        prune(model, Stopping(), output=tmp_path, **run)
    assert not is_attached(model)
    assert model.state_dict().keys() == base.keys()
    assert all(torch.equal(value, base[name]) for name, value in model.state_dict().items())
    prune(model, RandomSource(), output=tmp_path / "again", **run)
    assert is_attached(model)


def test_a_run_with_another_start_is_not_continued(tmp_path):
    run = {"stage": stage(steps=2), "output": tmp_path}
    prune(dense_model(), RandomSource(), config=FITTED, **run)
    recorded = json.loads((tmp_path / "start.json").read_text())
    assert (recorded["router_start"], recorded["tokens"]) == ("fitted", 512)
    for other in (UNFITTED, dataclasses.replace(FITTED, start_tokens=256)):
        with pytest.raises(ConfigError, match="other settings"):
            prune(dense_model(), RandomSource(), config=other, resume=True, **run)
    (tmp_path / "start.json").unlink()
    with pytest.raises(TrainingError, match=r"start\.json.*router_start"):
        prune(dense_model(), RandomSource(), config=FITTED, resume=True, **run)


def test_a_fitted_run_whose_checkpoints_are_damaged_does_not_go_on_from_random_routers(tmp_path):
    run = {"config": FITTED, "stage": stage(steps=4), "output": tmp_path}
    whole = prune(dense_model(), RandomSource(), **run)
    damaged = tmp_path / "checkpoints" / "step-00000004" / "optimizer.safetensors"
    damaged.unlink()
    model = dense_model()
    with pytest.raises(TrainingError, match=r"checkpoints of steps \[4\].*begins anew"):
        prune(model, RandomSource(), resume=True, **run)
    assert not is_attached(model)
    shutil.rmtree(tmp_path / "checkpoints")
    again = prune(model, RandomSource(), resume=True, **run)
    assert not attachment(again).provenance["prune"]["start"]["resumed"]
    for one, other in zip(attachment(whole).routers(), attachment(again).routers(), strict=True):
        assert torch.equal(one.up, other.up)


def test_the_text_that_the_start_reads_is_counted():
    model, source = dense_model(), RandomSource()
    ran = {"forward": 0, "backward": 0}

    def count(_module, args, kwargs):
        ran["backward" if torch.is_grad_enabled() else "forward"] += kwargs["input_ids"].numel()

    config = dataclasses.replace(FITTED, ffn_grouping="clustered")
    handle = model.model.register_forward_pre_hook(count, with_kwargs=True)

    class Ending(RandomSource):
        def batch_at(self, step, **sizes):
            handle.remove() if sizes.get("rank") is not None else None
            return super().batch_at(step, **sizes)

    source = Ending()
    prune(model, source, config=config, stage=stage(batch_size=64, steps=1))
    start = attachment(model).provenance["prune"]["start"]
    assert (start["tokens_forward"], start["tokens_backward"]) == (ran["forward"], ran["backward"])
    assert start["tokens_backward"] == 512
    assert start["tokens_forward"] >= 3 * 512


@pytest.fixture(scope="module")
def with_crucial_groups():
    """A routed model that some groups of which matter to by far most, its text, and what the absence of each costs."""
    model = attach(dense_model(), UNFITTED)
    routers = attachment(model).routers()
    groups = [(key, g) for key, router in enumerate(routers) for g in range(router.num_groups)]
    with torch.no_grad():
        model.lm_head.weight *= 8
        model.model.layers[1].mlp.down_proj.weight[:, 32:48] *= 10

        def losses(batch, absent=None):
            masks = [LayerRouting() for _ in model.model.layers]
            for key, router in enumerate(routers):
                mask = torch.ones(*batch.input_ids.shape, router.num_groups, dtype=torch.bool)
                mask[..., [g for g in range(router.num_groups) if (key, g) == absent]] = False
                setattr(masks[router.layer_index], router.half_layer, mask)
            with force_routing(model, masks):
                logits = model(batch.input_ids).logits
            return logits.argmax(-1), token_losses(logits, batch.labels)[0]

        # The dense model predicts its own tokens well.
        text = [batch._replace(labels=losses(batch)[0].roll(1, 1)) for batch in batches()]
        targets = sum(num_targets(batch.labels) for batch in text)
        found = {group: float(sum(losses(batch, group)[1] for batch in text)) / targets for group in (None, *groups)}
    return model, text, {group: found[group] - found[None] for group in groups}


@pytest.mark.parametrize("price", [10.0, 40.0, 80.0])
def test_groups_that_cost_far_more_than_their_work_are_found(price, with_crucial_groups, monkeypatch):
    monkeypatch.setattr(router_fit, "_CRUCIAL", price)
    model, text, costs = with_crucial_groups
    routers = attachment(model).routers()
    outputs = [layer.get_submodule(n) for layer in model.model.layers for n in ("self_attn.o_proj", "mlp.down_proj")]
    share = {key: 0.25 / router.num_groups for key, router in enumerate(routers)}
    found = crucial_groups(model, dict(enumerate(outputs)), share, text)
    assert {(key, group): cost for cost, key, group in found} == pytest.approx(
        {group: cost for group, cost in costs.items() if cost >= price * share[group[0]]}, rel=1e-4
    )
    assert 0 < len(found) < len(costs)
    assert not any(output._forward_pre_hooks for output in outputs)


class Readings(TorchDispatchMode):
    """Counts values that the host asks for, and shapes that depend on values; places of chunks are always its own."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.int64
        self.count += function is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool
        return function(*args, **(kwargs or {}))


def test_costs_of_groups_of_one_size_are_read_together(with_crucial_groups, monkeypatch):
    monkeypatch.setattr(router_fit, "_CRUCIAL", 0.0)
    monkeypatch.setattr(router_fit, "_LEAST", -math.inf)
    model, text, costs = with_crucial_groups
    outputs = [layer.get_submodule(n) for layer in model.model.layers for n in ("self_attn.o_proj", "mlp.down_proj")]
    share, seen = dict.fromkeys(range(len(outputs)), 0.0), []
    with Readings() as readings, model.register_forward_hook(lambda *_: seen.append(readings.count)):
        found = crucial_groups(model, dict(enumerate(outputs)), share, text)
    assert len(found) == len(costs)
    # Masks of padding are made before, and nothing is read between forwards.
    assert len(set(seen)) == 1 < len(costs) < len(seen)


def test_what_modules_read_is_looked_at_once_a_batch():
    model, text = dense_model(), [random_batch(seed=seed, padding=seed) for seed in range(3)]
    modules = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    with Readings() as readings:
        found = read_inputs(model, modules, text, title="inputs", keep=lambda _, rows: rows.clone())
    assert {rows.shape[0] for rows in found.values()} == {sum(int(batch.valid.sum()) for batch in text)}
    # For padding, by transformers for its masks, and for what is not finite.
    assert readings.count <= 4 * len(text) < len(modules)


def test_crucial_groups_execute_always_and_training_does_not_change_that(with_crucial_groups):
    fitted, text, costs = with_crucial_groups
    model = copy.deepcopy(fitted)
    always = fit_routers(model, text, ObjectiveConfig(sparsity=0.5))
    routers = attachment(model).routers()

    def margins():
        return {
            (k, g): float(b[0] - b[1]) for k, r in enumerate(routers) for g, b in enumerate(r.bias.detach().view(-1, 2))
        }

    before = margins()
    held = {group for group, margin in before.items() if margin > 30}
    # An eighth of the work of either kind: of attention one group, of the FFNs two.
    kinds = [sorted((costs[k, g], k, g) for k, g in costs if k % 2 == kind) for kind in (0, 1)]
    assert held == {(key, group) for _, key, group in (*kinds[0][-1:], *kinds[1][-2:])}
    assert [tuple(group) for *group, _ in always] == [
        (k // 2, ("attention", "ffn")[k % 2], g) for k, g in sorted(held, key=costs.get, reverse=True)
    ]
    optimizer = torch.optim.AdamW([p for r in routers for p in r.parameters()], lr=5e-3)
    attachment(model).control.sampling.temperature = 5.0
    model.train()
    for batch in text * 20:
        with observe(model) as routing:
            token_losses(model(batch.input_ids).logits, batch.labels)[0].backward()
            assert all(getattr(routing[routers[k].layer_index], routers[k].half_layer)[..., g].all() for k, g in held)
        optimizer.step()
        optimizer.zero_grad()
    after = margins()
    assert min(after[group] for group in held) > 95
    assert max(abs(after[group] - before[group]) for group in after if group not in held) > 0.1


def test_a_sparsity_that_needs_groups_that_always_execute_is_refused(with_crucial_groups):
    fitted, text, _ = with_crucial_groups
    model = copy.deepcopy(fitted)
    fit_routers(model, text, ObjectiveConfig(sparsity=0.5))
    calibrate_thresholds(model, text)
    # A quarter of the work always executes.
    for wanted in (0.3, 0.6):
        set_sparsity(model, wanted)
        assert measure_sparsity(model, text, attachment(model).routers()[0].threshold) == pytest.approx(
            wanted, abs=0.04
        )
    for wanted in (0.8, 0.9):
        with pytest.raises(ConfigError, match="lies outside what this adapter is calibrated for"):
            set_sparsity(model, wanted)
