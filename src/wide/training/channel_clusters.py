"""Clusters the FFN channels of a model by what they do on text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch
from wide.data.progress import progress
from wide.models.block_spec import BlockSpec, FeedForwardSpec
from wide.models.regroup import order_name
from wide.plan import Plan, Routed
from wide.training.activations import BYTES_PER_ACTIVATION, in_passes, read_inputs
from wide.training.channel_groups import channel_order, thinned
from wide.training.parallel import DataParallel


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
        specs: Parts of its decoder layers.
        plan: Whose groups are meant.
        batches: Text; a few thousand tokens are enough.
        skipped: Share of (token, group) pairs that will be skipped, in (0, 1).
        seed: Of the clustering.
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
    own = list(wanted)[parallel.rank :: parallel.world]
    for indices in in_passes({i: wanted[i][0].width * tokens * BYTES_PER_ACTIVATION for i in own}):
        modules = {index: wanted[index][0].down for index in indices}
        inputs = read_inputs(model, modules, batches, title="activations of the FFNs")
        for index in progress(indices, title="clustering channels", unit="layer"):
            ffn, num_groups = wanted[index]
            energy = _energy(thinned(inputs.pop(index)), ffn)
            orders[index] = channel_order(energy, num_groups=num_groups, skipped=skipped, seed=seed)
    for place, (index, (ffn, _)) in enumerate(wanted.items()):
        order = orders.get(index, torch.empty(ffn.width, dtype=torch.int64)).to(parallel.device)
        parallel.broadcast([order], source=place % parallel.world)
        orders[index] = order.cpu()
    return {order_name(index): orders[index] for index in wanted}


def _energy(activations: Tensor, ffn: FeedForwardSpec) -> Tensor:
    """Return the squared size of what each channel adds to the output, float32 `[tokens, F]`."""
    down: Any = ffn.down
    columns = down.weight.detach().float().norm(dim=0)
    return torch.square(activations.to(columns.device).float() * columns)
