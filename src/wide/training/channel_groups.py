"""Which FFN channels should form a group: those that matter for the same tokens.

Skipping group g for token t costs about the squared size of what its channels would have added to the output, the sum
over its channels c of a(t, c)^2 with a = |activation| * |column of the down projection|. Groups are chosen for the
least cost of skipping a given share of all (token, group) pairs, by turns: which pairs are cheapest to skip under the
present groups, and which balanced groups make skipping just these pairs cheapest. Neither step makes the cost larger.

The start is a balanced spherical k-means of the channels' profiles over tokens.

Source: ours; that channels of one FFN can be grouped by co-activation without changing it: MoEfication (Zhang et al.,
2022).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.data.batches import TokenBatch
from wide.data.progress import progress
from wide.models.block_spec import BlockSpec, FeedForwardSpec
from wide.models.regroup import order_name
from wide.models.sharding import whole
from wide.plan import Plan, Routed
from wide.training.activations import BYTES_PER_ACTIVATION, in_passes, read_inputs
from wide.training.parallel import DataParallel

_KMEANS_ROUNDS, _ROUNDS = 6, 10
# How far a price overshoots at first, of the mean difference between a channel's two cheapest groups, and by which
# factor more from one bid to the next.
_OVERSHOOT, _GROWTH = 0.1, 1.01
_BIDS_BETWEEN_LOOKS = 8
# Of one layer: 4 GiB in float32, of which the clustering needs a few copies.
_MOST_VALUES = 1 << 30


def cluster_channels(
    model: nn.Module,
    specs: Sequence[BlockSpec],
    plan: Plan,
    batches: Sequence[TokenBatch],
    *,
    skipped: float,
    seed: int,
    parallel: DataParallel,
) -> dict[str, Tensor]:
    """Return an order of the channels of every routed FFN that makes skipping whole groups cheap.

    Args:
        model: A model with nothing attached, or with what is attached switched off.
        batches: Text; a few thousand tokens are enough.
        skipped: Share of (token, group) pairs that will be skipped, in (0, 1).
        parallel: The processes of the run, each of which clusters its share of the layers; all end with all orders.

    Returns:
        int64 `[F]` on the CPU, by the names of `wide.models.regroup.order_name`.
    """
    wanted: dict[int, tuple[FeedForwardSpec, int]] = {}
    for spec, layer in zip(specs, plan.layers, strict=True):
        # One group holds all channels in any order.
        if spec.ffn is not None and isinstance(layer.ffn, Routed) and layer.ffn.grouping.num_groups > 1:
            wanted[spec.index] = spec.ffn, layer.ffn.grouping.num_groups
    tokens = sum(int(batch.valid.sum()) for batch in batches)
    orders: dict[int, Tensor] = {}
    # Passes of all processes together: each must run the model as often as the others.
    sizes = {i: wanted[i][0].width * tokens * BYTES_PER_ACTIVATION // parallel.world for i in wanted}
    for indices in in_passes(sizes):
        own = indices[parallel.rank :: parallel.world]
        inputs = read_inputs(model, {i: wanted[i][0].down for i in own}, batches, title="activations of the FFNs")
        # The norm of what each channel is multiplied by, `[F]`.
        weights: dict[int, Any] = {i: wanted[i][0].down.weight for i in indices}
        columns = {i: whole(weight.detach()).float().norm(dim=0) for i, weight in weights.items()}
        for index in progress(own, title="clustering channels", unit="layer"):
            # The squared size of what each channel adds to the output, `[tokens, F]`.
            energy = torch.square(thinned(inputs.pop(index)).to(columns[index].device).float() * columns[index])
            orders[index] = channel_order(energy, num_groups=wanted[index][1], skipped=skipped, seed=seed)
        for place, index in enumerate(indices):
            order = orders.get(index, torch.empty(wanted[index][0].width, dtype=torch.int64)).to(parallel.device)
            parallel.broadcast([order], source=place % parallel.world)
            orders[index] = order.cpu()
    return {order_name(index): orders[index] for index in wanted}


def thinned(values: Tensor) -> Tensor:
    """Return every n-th row of `[T, C]`, so that the clustering of one layer fits into memory; mostly all rows."""
    return values[:: max(1, -(-values.numel() // _MOST_VALUES))]


def channel_order(energy: Tensor, *, num_groups: int, skipped: float, seed: int) -> Tensor:
    """Return an order in which the channels of each group are adjacent: the old one at each place, int64 `[C]`, CPU.

    `energy` is a^2 of channel c at token t, `[T, C]`, not negative, any float dtype. `num_groups` must divide C.
    `skipped` is the share of (token, group) pairs to be skipped, in (0, 1). Inside a group channels keep their order.
    """
    energy = energy.float()
    capacity = energy.shape[1] // num_groups
    groups = _kmeans(energy, num_groups, capacity, seed)
    best, best_cost = groups, skip_cost(energy, groups, num_groups, skipped)
    for _ in range(_ROUNDS):
        mask = _cheapest(_mass(energy, groups, num_groups), skipped)
        groups = balanced_assignment(energy.T @ mask.to(energy.dtype), capacity)
        cost = skip_cost(energy, groups, num_groups, skipped)
        # The assignment is the best one up to its overshoot only.
        if cost >= best_cost:
            break
        best, best_cost = groups, cost
    return best.cpu().argsort(stable=True)


def skip_cost(energy: Tensor, groups: Tensor, num_groups: int, skipped: float) -> float:
    """Return the share of all energy that the cheapest `skipped` share of (token, group) pairs holds.

    `groups` is the group of each channel, int64 `[C]`.
    """
    mass = _mass(energy.float(), groups, num_groups)
    return float((mass * _cheapest(mass, skipped)).double().sum() / mass.double().sum().clamp_min(1e-300))


def balanced_assignment(cost: Tensor, capacity: int) -> Tensor:
    """Return for each of C items one of G places, int64 `[C]`, `capacity` items a place, at nearly the least cost.

    An auction of places: those that are asked for by too many raise their prices until only `capacity` items still
    prefer them, and a little more, so that it does not take forever; the longer it takes, the more. All of them bid at
    once, which a GPU does in few steps. `cost` is `[C, G]` with C = G * capacity; the places are on its device.

    Source: Bertsekas, the auction algorithm for transportation problems (1989).
    """
    cost = cost.double()
    num_items, num_places = cost.shape
    if num_places == 1:
        return torch.zeros(num_items, dtype=torch.int64, device=cost.device)
    overshoot = _overshoot(cost)
    price = cost.new_zeros(num_places)
    chosen = cost.argmin(1)
    one, at = torch.ones_like(chosen), torch.arange(num_items, device=cost.device)
    load = chosen.new_zeros(num_places).scatter_add_(0, chosen, one)
    while int(load.max()) > capacity:
        # Only the look above waits for the device: shapes are fixed, and a bid where no place is full changes nothing.
        for _ in range(_BIDS_BETWEEN_LOOKS):
            asked, own_place = cost + price, chosen[:, None]
            other, where = asked.scatter(1, own_place, torch.inf).min(1)
            loss = other - asked.gather(1, own_place).squeeze(1)
            # By place, those that lose least elsewhere first.
            order = loss.argsort(stable=True)
            order = order[chosen[order].argsort(stable=True)]
            place, loss = chosen[order], loss[order]
            stays = at - (load.cumsum(0) - load)[place] >= (load - capacity)[place]
            lost = loss.clamp_min(0.0).masked_fill(stays, 0.0)
            rise = torch.zeros_like(price).scatter_reduce(0, place, lost, "amax")
            price += (rise + overshoot).masked_fill(load <= capacity, 0.0)
            chosen[order] = place.where(stays, where[order])
            load = torch.zeros_like(load).scatter_add_(0, chosen, one)
            overshoot *= _GROWTH
    return chosen


def _overshoot(cost: Tensor) -> float:
    two = cost.topk(2, largest=False).values
    regret = float((two[:, 1] - two[:, 0]).mean())
    spread = float((cost.amax(1) - cost.amin(1)).mean())
    # Relative to the costs at the least, so that adding it changes a price.
    floor = 1e-12 * float(cost.abs().max()) + torch.finfo(torch.float64).tiny
    return max(_OVERSHOOT * regret, 1e-2 * _OVERSHOOT * spread, floor)


def _mass(energy: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return energy @ functional.one_hot(groups.to(energy.device), num_groups).to(energy.dtype)


def _cheapest(mass: Tensor, skipped: float) -> Tensor:
    count = min(max(round(skipped * mass.numel()), 1), mass.numel())
    # A sort and not kthvalue, which is refused on CUDA for more than 2^31 elements and slow below.
    return mass <= mass.flatten().sort().values[count - 1]


def _kmeans(energy: Tensor, num_groups: int, capacity: int, seed: int) -> Tensor:
    profiles = functional.normalize(energy.sqrt().T, dim=1)
    drawn = torch.randperm(len(profiles), generator=torch.Generator().manual_seed(seed))[:num_groups]
    centres = profiles[drawn.to(profiles.device)]
    groups = torch.zeros(len(profiles), dtype=torch.int64)
    for _ in range(_KMEANS_ROUNDS):
        groups = balanced_assignment(-(profiles @ centres.T), capacity)
        member = functional.one_hot(groups.to(profiles.device), num_groups).to(profiles.dtype)
        centres = functional.normalize(member.T @ profiles, dim=1)
    return groups
