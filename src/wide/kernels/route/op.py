"""Routers as operators of torch."""

from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.registration import check_tensor, operator
from wide.kernels.rms_norm.op import check_norm
from wide.kernels.route.reference import norm_route_reference, route_reference
from wide.kernels.route.weights import RouteWeights

# Up to here each row has programs of its own, which share out its channels and norm it, too.
MAX_FEW_ROWS = 16
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

BACKENDS = Backends("route", __package__, route_reference)
NORM_BACKENDS = Backends("norm_route", __package__, norm_route_reference)


@operator(lambda x, difference: x.new_empty((x.shape[0], difference.shape[0]), dtype=torch.bool))
def route(
    x: torch.Tensor,
    weights: RouteWeights,
    *,
    overlaps: bool = False,
    padding: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    backend: str,
) -> torch.Tensor:
    """Return which groups each row executes, bool [M, N_G]: margin >= 0.

    Args:
        x: Hidden states, [M, D], last stride 1.
        weights: Of the router, made with `split_weights` for the dtype of `x`.
        overlaps: Whether another kernel runs at the same time; few programs then matter more than time.
        padding: Rows that execute nothing and do not count, bool [M].
        counts: Pairs that execute and rows, int32 [2], to which those of this call are added. As the weights' counter,
            it is not declared as written to, since no graph reads it.

    Source: paper, section 3.1 (routing components).
    """
    _check(x, weights)
    check_tensor("route", "padding", padding, torch.bool, x.shape[:1])
    check_tensor("route", "counts", counts, torch.int32, (2,))
    options: dict[str, Any] = {"overlaps": overlaps, "padding": padding, "counts": counts}
    return BACKENDS.run(backend, x.device, AnyShape(x.dtype), x, weights, **options)


def norm_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights: RouteWeights,
    *,
    addend: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    reads_residual: bool = False,
    backend: str,
) -> Three:
    """Return (x + addend, RMSNorm of it, mask) for few rows, in one kernel.

    Args:
        x: Residual stream, [M, D] with M in 1..16, last stride 1; arguments of the norm are as in `rms_norm`.
        reads_residual: Whether the router reads the sum instead of the normed rows.
    """
    total, normed, mask = _norm_route(x, weight, addend, weights, eps, unit_offset, reads_residual, backend)
    return (x if addend is None else total), normed, mask


def _check(x: torch.Tensor, weights: RouteWeights) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ShapeError(f"route wants x [M, D] with last stride 1, got {tuple(x.shape)} with strides {x.stride()}")
    rank = weights.difference.shape[1]
    parts = 1 if x.dtype == torch.float32 else 2
    if weights.down.shape != (parts * rank, x.shape[1]) or weights.down.dtype != x.dtype:
        raise ShapeError(
            f"route wants weights for {x.dtype} of {x.shape[1]} channels, got {weights.down.dtype} "
            f"{tuple(weights.down.shape)}; make them with split_weights(..., dtype={x.dtype})"
        )
    if not all(t is None or t.is_contiguous() for t in weights):
        raise ShapeError("route wants contiguous weights, as split_weights makes them")


def _norm_route_outputs(x: torch.Tensor, addend: torch.Tensor | None, difference: torch.Tensor) -> Three:
    total = x.new_empty(0 if addend is None else x.shape)
    return total, x.new_empty(x.shape), x.new_empty((x.shape[0], difference.shape[0]), dtype=torch.bool)


@operator(_norm_route_outputs)
def _norm_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor | None,
    weights: RouteWeights,
    eps: float,
    unit_offset: bool,
    reads_residual: bool,
    backend: str,
) -> Three:
    _check(x, weights)
    if not 1 <= x.shape[0] <= MAX_FEW_ROWS:
        raise ShapeError(f"norm_route takes 1 to {MAX_FEW_ROWS} rows, got {x.shape[0]}; use rms_norm, then route")
    check_norm("norm_route", x, weight, addend)
    options: dict[str, Any] = {"addend": addend, "eps": eps, "unit_offset": unit_offset}
    options["reads_residual"] = reads_residual
    return NORM_BACKENDS.run(backend, x.device, AnyShape(x.dtype), x, weight, weights, **options)
