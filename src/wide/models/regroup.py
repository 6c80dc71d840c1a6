"""Intermediate channels of FFNs in another order, so that channels of one group belong together.

A group is a run of adjacent channels, and which channels are neighbours in a trained model means nothing. Permuting the
rows of gate and up and the columns of down alike leaves the FFN's function as it is (its sum is rounded in another
order) and lets any set of channels be a group, for every executor: masks, fused operators and the engine.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wide.errors import ShapeError, UnsupportedModelError
from wide.models.block_spec import BlockSpec, FeedForwardSpec
from wide.models.having import having
from wide.models.sharding import gathered, overwrite, whole
from wide.plan import Plan, Routed

_PROBE_ROWS, _SAME_TO = 4, 2e-2


def order_name(layer: int) -> str:
    """Return the name of the tensor with the order of the FFN channels of a layer."""
    return f"layers.{layer}.ffn.order"


class RegroupedChannels:
    """Puts the channels of some routed FFNs into another order, and back, bit for bit; parameters stay the same.

    Under `bypass` the channels stay where they are: the function is the dense one. `orders` say by the names of
    `order_name`, int64 `[F]`, which old channel lies at each new place. Raises ShapeError if a name is unknown, an
    order is no permutation of the layer's channels, or its FFN is not routed; UnsupportedModelError if a layer is
    quantised or offloaded, or its FFN is another function afterwards.
    """

    def __init__(self, specs: Sequence[BlockSpec], plan: Plan, orders: Mapping[str, Tensor]) -> None:
        # Those whose channels have moved.
        self._layers: list[tuple[FeedForwardSpec, str]] = []
        self._orders: dict[str, Tensor] = {}
        wanted: list[tuple[nn.Module, FeedForwardSpec, str]] = []
        known = {order_name(spec.index): (spec, layer) for spec, layer in zip(specs, plan.layers, strict=True)}
        for name, order in orders.items():
            if name not in known:
                raise ShapeError(f"orders name {name!r}; the names of this model are {order_name(0)!r} and so on")
            spec, planned = known[name]
            if spec.ffn is None or not isinstance(planned.ffn, Routed):
                raise ShapeError(f"{name}: this plan does not route that FFN, so its channels have no groups")
            _require_plain(spec.index, spec.ffn)
            self._orders[name] = _permutation(name, order, spec.ffn.width)
            wanted.append((spec.layer, spec.ffn, name))
        try:
            for layer, ffn, name in wanted:
                before = _probe(layer, ffn)
                _move(ffn, self._orders[name])
                self._layers.append((ffn, name))
                _require_same(name, ffn, before, _probe(layer, ffn))
        except UnsupportedModelError:
            self.restore()
            raise

    def orders(self) -> dict[str, Tensor]:
        """Return copies of the orders, int64 `[F]` by name, on the CPU."""
        return {name: order.clone() for name, order in self._orders.items()}

    def restore(self) -> None:
        """Put every channel back for good."""
        # Backwards: layers that share their weights have moved them twice.
        for ffn, name in reversed(self._layers):
            _move(ffn, self._orders[name].argsort())
        self._layers = []


def _permutation(name: str, order: Tensor, width: int) -> Tensor:
    if order.dtype != torch.int64 or tuple(order.shape) != (width,):
        raise ShapeError(f"{name} is {order.dtype} of shape {tuple(order.shape)}; int64 of shape ({width},) is needed")
    found = order.detach().to("cpu", copy=True)
    if not torch.equal(found.sort().values, torch.arange(width)):
        raise ShapeError(f"{name} is no permutation: each of the {width} channels must be named once")
    return found


def _require_plain(index: int, ffn: FeedForwardSpec) -> None:
    for linear in ffn.linears():
        weight = getattr(linear, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            raise UnsupportedModelError(
                f"layer {index}: the weights of its FFN are not in memory (offloaded, or on the meta device), so its "
                "channels cannot change places; load the model without offloading, or use ffn_grouping='adjacent'"
            )
        is_known = type(weight) is nn.Parameter or isinstance(weight, DTensor)
        if not (isinstance(linear, nn.Linear) and is_known and linear.weight.is_floating_point()):
            raise UnsupportedModelError(
                f"layer {index}: the channels of a {type(linear).__name__} with a {type(weight).__name__} weight "
                "cannot change places (quantised); load the model unquantised, or use ffn_grouping='adjacent'"
            )


def _move(ffn: FeedForwardSpec, order: Tensor) -> None:
    *reading, down = ffn.linears()
    rows = torch.cat([order, ffn.width + order]) if ffn.fused_gate else order
    moves = [(parameter, 0, rows) for linear in reading for parameter in linear.parameters()]
    weight: Any = down.weight
    for parameter, dim, places in [*moves, (weight, 1, order)]:
        overwrite(parameter, whole(parameter.detach()).index_select(dim, places.to(parameter.device)))


def _probe(layer: nn.Module, ffn: FeedForwardSpec) -> Tensor:
    """Return the FFN's output for a few random rows, whatever is attached to it."""
    up: Any = ffn.up
    drawn = torch.randn(1, _PROBE_ROWS, up.weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
    with ExitStack() as stack, torch.no_grad(), gathered(layer):
        for module in ffn.module.modules():
            stack.enter_context(having(module, training=False))
        out: Tensor = ffn.module(drawn.to(device=up.weight.device, dtype=up.weight.dtype))
    return out.float()


def _require_same(name: str, ffn: FeedForwardSpec, before: Tensor, after: Tensor) -> None:
    error = (after - before).norm() / before.norm().clamp_min(1e-12)
    if not error <= _SAME_TO:
        raise UnsupportedModelError(
            f"{name}: {type(ffn.module).__name__} is another function with its channels in another order (off by "
            f"{float(error):.1%}), so something in it knows channels by their place; use ffn_grouping='adjacent'"
        )
