"""Routers that begin by predicting which groups matter, instead of at random.

What skipping group g of a sublayer changes is the loss, by about |gradient at its output| times the size of
what the group adds to it, ||W_g h_g||, for the share of the work that the group is. The logarithm of that is predicted
from what the router reads by ridge regression of reduced rank, in closed form; margins are the distance of the
prediction from the threshold at which the model skips its target, in units of the prediction's error, so that the
sampling of training errs where the prediction is unsure.
Training loses a group that is worth far more than its share of the work now and then, since the gradient of tokens that
execute it may show little of that, and rarely finds it again. So such a group always executes.

Source: ours. Reduced-rank regression: Izenman (1975); a first-order estimate of what a group is worth: Molchanov et al.
(2017).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wide.config import ObjectiveConfig
from wide.data.batches import TokenBatch
from wide.data.progress import progress
from wide.errors import UnsupportedModelError
from wide.models.attach import attachment
from wide.models.cost import Measure, half_weights
from wide.models.observe import bypass, judging, model_device
from wide.models.packing import unpacked
from wide.models.router import ALWAYS, Router
from wide.models.sharding import as_first_has_it, whole
from wide.models.thresholds import calibrate_thresholds, forget_thresholds, set_sparsity
from wide.training.activations import BYTES_PER_ACTIVATION, in_passes, read_inputs
from wide.training.modes import layers_run
from wide.training.objective import target_labels
from wide.training.token_loss import num_targets, token_losses

# Of the mean variance of what a router reads.
_RIDGE = 0.1
# Importance further from the threshold decides nothing more; natural logarithm.
_FAR = 1.0
# The largest mean margin of a group: sampling still tries the other choice at 2 % of the tokens, so that it is learnt.
_CERTAIN = 4.0
# From a probit's argument to a logit.
_LOGISTIC = 1.7
_SMALLEST = 1e-30
_TOKENS_WITH_GRADIENT = 4_096
_TOKENS_WITH_LOSS, _AT_ONCE = 2_048, 1_024
# Crucial is a group whose absence costs so many nats times its share of the work, and no fewer nats than these.
_CRUCIAL, _LEAST = 40.0, 0.02
_VALUES_SORTED = 1 << 22
# Float32 inputs of one sublayer that are multiplied at a time: 256 MiB, and as much again for the products.
_VALUES_AT_ONCE, _BYTES_PER_FLOAT = 1 << 26, 4


def fit_routers(
    model: nn.Module, batches: Sequence[TokenBatch], objective: ObjectiveConfig, *, gradient_checkpointing: bool = False
) -> list[tuple[int, str, int, float]]:
    """Set the routers of an attached model so that, at inference, they skip the target, the least important first.

    Routers must be bottlenecks with a bias; thresholds are 0 and uncalibrated after. A target of 'uniform' is taken for
    the mean. Layers may be recomputed where gradients are taken, one sequence at a time. Return layer, sublayer and
    index of the groups that always execute from now on, and what the loss rises by without them, in nats a token.
    """
    state = attachment(model)
    routers = dict(enumerate(state.routers()))
    sublayers = {key: dict(state.specs[r.layer_index].sublayers())[r.half_layer] for key, r in routers.items()}
    outputs: dict[int, Any] = {key: part.linears()[-1] for key, part in sublayers.items()}
    if not all(output.weight.is_floating_point() for output in outputs.values()):
        raise UnsupportedModelError("router_start='fitted' reads weights, which are quantised here; take 'random'")
    measure: Measure = "linear_flops" if objective.target == "linear_flops" else "mean"
    weights = half_weights(model, measure)
    gradients = _gradient_sizes(model, outputs, batches, recompute=gradient_checkpointing)
    importance = _importance(model, routers, outputs, batches, gradients)
    share = {key: weights[key] / router.num_groups for key, router in routers.items()}
    for key in routers:
        # Compared is what skipping costs for the work that it saves; what saves nothing is never skipped. Importance
        # is the logarithm of a size, not of its square, and it is energy, the square, that is charged to the work:
        # hence one half.
        importance[key] -= 0.5 * torch.tensor(share[key]).clamp_min(_SMALLEST).log()
    threshold = _threshold([importance[key] for key in routers], weights, objective.sparsity)
    held = len(importance[0]) * BYTES_PER_ACTIVATION
    for keys in in_passes({key: state.specs[r.layer_index].hidden_size * held for key, r in routers.items()}):
        # A router is asked while everything executes, whatever it would say itself.
        set_sparsity(model, 0.0)
        inputs = read_inputs(model, {key: routers[key] for key in keys}, batches, title="what routers read")
        for key in progress(keys, title="fitting routers", unit="router"):
            device = next(routers[key].parameters()).device
            surplus = (importance[key] - threshold).clamp(-_FAR, _FAR).to(device)
            _set(routers[key], *fitted_margins(inputs.pop(key).to(device), surplus))
    left = dict.fromkeys(("attention", "ffn"), 0.0)  # For groups that always execute: half of what each is to execute.
    for key, router in routers.items():
        left[router.half_layer] += (1 - objective.sparsity) / 2 * weights[key]
    always: list[tuple[int, str, int, float]] = []
    for cost, key, group in sorted(crucial_groups(model, outputs, share, batches), reverse=True):
        router, bias = routers[key], routers[key].bias
        if share[key] <= left[router.half_layer] and bias is not None:
            left[router.half_layer] -= share[key]
            router.up.detach().view(-1, 2, len(router.down))[group] = 0.0
            bias.detach().view(-1, 2)[group] = bias.new_tensor([10 * ALWAYS, -10 * ALWAYS])
            always.append((router.layer_index, router.half_layer, group, cost))
    _meet(model, batches, objective.sparsity, measure)
    return always


def fitted_margins(hidden: Tensor, surplus: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit margins to what groups are worth, by ridge regression.

    Args:
        hidden: What the router reads, `[n, D]`, any float dtype.
        surplus: By how much each group's worth exceeds the threshold, float32 `[n, G]`.

    Returns:
        Directions `[G, D]` in the hidden states, of unit variance and most telling first; mixing `[G, G]` of these into
        margins, so that leaving out the last columns is the best fit of that rank; bias `[G]`. All float32.
    """
    x, y = hidden.float(), surplus.float()
    mean, mean_surplus = x.mean(0), y.mean(0)
    x, y = x - mean, y - mean_surplus
    covariance = (x.T @ x).double() / len(x)
    ridge = _RIDGE * covariance.diagonal().mean().clamp_min(_SMALLEST)
    covariance.diagonal().add_(ridge)
    slope = torch.linalg.solve(covariance, (x.T @ y).double() / len(x))
    error = (y - (x @ slope.float())).square().mean(0).sqrt().clamp_min(1e-3 * _FAR).double()
    # In units of each group's error, both for the margins and for what a lower rank loses.
    slope = slope * (_LOGISTIC / error)
    variance, axes = torch.linalg.eigh(slope.T @ covariance @ slope)
    variance, axes = variance.flip(0), axes.flip(1)
    spread = variance.clamp_min(_SMALLEST).sqrt()
    directions = (slope @ axes / spread).T
    mixing = axes * spread
    certain = (mean_surplus * (_LOGISTIC / error)).clamp(-_CERTAIN, _CERTAIN)
    bias = certain - mixing @ (directions @ mean.double())
    return directions.float(), mixing.float(), bias.float()


def crucial_groups(
    model: nn.Module, outputs: dict[int, Any], share: dict[int, float], batches: Sequence[TokenBatch]
) -> list[tuple[float, int, int]]:
    """Return (cost, router, group) of the groups that cost far more than their work is worth at 40 nats for all of it.

    The cost is the rise of the loss, nats a token, where all tokens skip only this group. Cheap halves are not split.
    """
    found: list[tuple[float, int, int]] = []
    text, left = list[TokenBatch](), _TOKENS_WITH_LOSS
    for batch in batches:
        # Steps of a source may be of different lengths.
        length = batch.input_ids.shape[1]
        if left >= length or not text:
            few = batch.split(max(1, left // length))[0].to(model_device(model))
            text += few.split(max(1, _AT_ONCE // length))
            left -= few.input_ids.numel()
    tokens = sum(num_targets(target_labels(few)) for few in text)
    masks = [few.attention_mask() for few in text]

    def loss_without(key: int, groups: range) -> Tensor:
        size = outputs[key].in_features // attachment(model).routers()[key].num_groups

        def skip(_module: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor]:
            part = torch.arange(groups.start * size, groups.stop * size, device=x[0].device)
            return (x[0].index_fill(-1, part, 0.0),)

        with outputs[key].register_forward_pre_hook(skip):
            total = sum(_loss(model, few, mask).double() for few, mask in zip(text, masks, strict=True))
        return torch.as_tensor(total / max(tokens, 1))

    with judging(model), bypass(model):
        wanted = [(0, range(0)), *((key, range(r.num_groups)) for key, r in enumerate(attachment(model).routers()))]
        dense: float | None = None
        while wanted:
            # All of a size run before one is read, which waits for the device.
            losses = [loss_without(*each) for each in progress(wanted, title="what groups cost", unit="forward")]
            values: list[float] = as_first_has_it(model, torch.stack(losses)).tolist()
            tried, wanted = wanted, []
            dense = values[0] if dense is None else dense
            for (key, groups), loss in zip(tried, values, strict=True):
                cost, half = loss - dense, len(groups) // 2
                if len(groups) and cost >= max(_CRUCIAL * share[key], _LEAST):
                    wanted += [(key, groups[:half]), (key, groups[half:])] if half else []
                    found += [] if half else [(cost, key, groups[0])]
    return found


def _importance(
    model: nn.Module,
    routers: dict[int, Router],
    outputs: dict[int, nn.Module],
    batches: Sequence[TokenBatch],
    gradients: dict[int, float],
) -> dict[int, Tensor]:
    """Return the logarithm of what each group adds to the loss, per token, float32 `[tokens, N_G]` on the CPU."""
    found: dict[int, Tensor] = {}
    with bypass(model):
        for keys in in_passes({key: _held_bytes(out, routers[key].num_groups) for key, out in outputs.items()}):
            energies = {key: group_energy(outputs[key], routers[key].num_groups) for key in keys}

            def keep(key: int, rows: Tensor, energies: dict[int, Callable[[Tensor], Tensor]] = energies) -> Tensor:
                return 0.5 * energies[key](rows).clamp_min(_SMALLEST).log() + gradients[key]

            found |= read_inputs(model, {k: outputs[k] for k in keys}, batches, title="what groups add", keep=keep)
    return found


def group_energy(output: Any, num_groups: int) -> Callable[[Tensor], Tensor]:
    """Return the function from what an output projection reads, `[t, C]`, to ||W_g h_g||^2, float32 `[t, N_G]`."""
    weight = whole(output.weight.detach())

    def columns() -> Tensor:
        return weight.float().unflatten(1, (num_groups, -1)).transpose(0, 1)

    width = weight.shape[1]
    # h_g^T (W_g^T W_g) h_g is the shorter way only where a group is narrower than the output.
    gram = columns().transpose(1, 2) @ columns() if _gram_bytes(output, num_groups) else None

    def energy(rows: Tensor) -> Tensor:
        grouped = rows.float().unflatten(-1, (num_groups, -1)).transpose(0, 1)
        if gram is None:
            return (grouped @ columns().transpose(1, 2)).square().sum(-1).T
        return ((grouped @ gram) * grouped).sum(-1).T

    return lambda rows: torch.cat([energy(part) for part in rows.split(max(1, _VALUES_AT_ONCE // width))])


def _held_bytes(output: Any, num_groups: int) -> int:
    """Return what `group_energy` holds beside the model: W_g^T W_g of every group, and a weight that is sharded."""
    copied = isinstance(output.weight, DTensor)
    return _gram_bytes(output, num_groups) + output.weight.numel() * output.weight.element_size() * copied


def _gram_bytes(output: Any, num_groups: int) -> int:
    """Return the size of W_g^T W_g of every group, 0 where it is not made."""
    hidden, width = output.weight.shape
    channels = width // num_groups
    return width * channels * _BYTES_PER_FLOAT if channels <= hidden else 0


def _gradient_sizes(
    model: Any, outputs: dict[int, nn.Module], batches: Sequence[TokenBatch], *, recompute: bool
) -> dict[int, float]:
    """Return the logarithm of the median size of the loss's gradient at the output of each sublayer, per token."""
    found: dict[int, list[Tensor]] = {key: [] for key in outputs}
    running: dict[int, Tensor] = {}

    def note(key: int) -> Callable[..., None]:
        return lambda _module, _args, output: running.update({key: output})

    with (
        ExitStack() as hooks,
        judging(model),
        layers_run(model, recompute=recompute),
        bypass(model),
        torch.enable_grad(),
    ):
        # The base may be frozen: the embedding's output is what gradients flow to.
        start = model.get_input_embeddings()
        hooks.callback(start.register_forward_hook(lambda _m, _a, out: out.detach().requires_grad_()).remove)
        for key, output in outputs.items():
            hooks.callback(output.register_forward_hook(note(key)).remove)
        tokens = 0
        for batch in progress(batches, title="gradients of the sublayers", unit="batch"):
            # One sequence at a time: a model that fits only as a dense teacher must hold a backward here.
            for sequence in batch.split(1):
                moved = sequence.to(model_device(model))
                gradients = torch.autograd.grad(_loss(model, moved, moved.attention_mask()), list(running.values()))
                for key, gradient in zip(running, gradients, strict=True):
                    sizes = gradient.flatten(0, -2).float().norm(dim=-1)
                    found[key].append(sizes[moved.valid.flatten().to(sizes.device)].cpu())
                running.clear()
            tokens += int(batch.valid.sum())
            if tokens >= _TOKENS_WITH_GRADIENT:
                break
    return {key: float(torch.cat(sizes).median().clamp_min(_SMALLEST).log()) for key, sizes in found.items()}


@unpacked()
def _loss(model: Any, batch: TokenBatch, mask: Tensor | None) -> Tensor:
    """Return the sum of the losses of all tokens, nats; `mask` is of padding, as `attention_mask` gives it."""
    logits = model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits
    return token_losses(logits, target_labels(batch))[0]


def _threshold(importance: Sequence[Tensor], weights: Sequence[float], sparsity: float) -> float:
    """Return the importance below which the wanted weight of (token, group) pairs lies."""
    every = -(-sum(part.numel() for part in importance) // _VALUES_SORTED)
    parts = [part[::every] for part in importance]
    values = torch.cat([part.flatten() for part in parts])
    mass = [torch.full((part.numel(),), weight / part.numel()) for part, weight in zip(parts, weights, strict=True)]
    order = values.argsort()
    below = torch.cat(mass).double()[order].cumsum(0)
    return float(values[order[min(int((below < sparsity).sum()), len(values) - 1)]])


def _set(router: Router, directions: Tensor, mixing: Tensor, bias: Tensor) -> None:
    """Give a router these margins; beyond the fit's rank it keeps random directions that weigh nothing yet."""
    assert router.bias is not None
    used = min(len(router.down), len(directions))
    with torch.no_grad():
        router.up.zero_()
        router.down[:used] = directions[:used]
        # Half of a margin each, execute before skip.
        router.up[:, :used] = torch.stack([mixing[:, :used], -mixing[:, :used]], dim=1).flatten(0, 1) / 2
        router.bias.copy_(torch.stack([bias, -bias], dim=1).flatten() / 2)


def _meet(model: nn.Module, batches: Sequence[TokenBatch], sparsity: float, measure: Measure) -> None:
    """Move the biases so that argmax skips the target while the masks are in force."""
    forget_thresholds(model)
    if not sparsity:
        return
    # Neighbours on both sides, so that the target lies between calibrated ones.
    calibrate_thresholds(model, batches, measure=measure, sparsities=[sparsity / 2, sparsity, (1 + sparsity) / 2])
    threshold = set_sparsity(model, sparsity)
    for router in attachment(model).routers():
        assert router.bias is not None
        router.bias.detach().add_(router.bias.new_tensor([-threshold / 2, threshold / 2]).repeat(router.num_groups))
    forget_thresholds(model)
