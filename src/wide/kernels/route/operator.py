"""Routers as operators of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_values, relative_error
from wide.kernels.device import device_facts, interprets_triton, triton_obstacle
from wide.kernels.registration import implement
from wide.kernels.route.reference import margins, norm_route_reference, route_reference
from wide.kernels.route.tiles import SMALLEST_BLOCK, default_tile
from wide.kernels.route.weights import NUM_COUNTERS, RouteWeights, split_weights

# Up to here each row has programs of its own, which share out its channels and norm it, too.
MAX_FEW_ROWS = 16
# Margins closer to the threshold than this may fall on either side.
_NEAR = 1e-3
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "route(Tensor x, Tensor down, Tensor difference, Tensor? offset, Tensor counter, float threshold, str backend)"
    " -> Tensor"
)
_LIBRARY.define(
    "norm_route(Tensor x, Tensor weight, Tensor? addend, Tensor down, Tensor difference, Tensor? offset,"
    " Tensor counter, float threshold, float eps, bool unit_offset, bool reads_residual, str backend)"
    " -> (Tensor, Tensor, Tensor)"
)


def route(x: torch.Tensor, weights: RouteWeights, *, threshold: float = 0.0, backend: str) -> torch.Tensor:
    """Return which groups each row executes, bool [M, N_G]: margin >= threshold.

    Args:
        x: Hidden states, [M, D], last stride 1.
        weights: Of the router, made with `split_weights` for the dtype of `x`.
        threshold: In logits.
        backend: 'torch' or 'triton'.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: paper, section 3.1 (routing components).
    """
    return torch.ops.wide.route(x, *weights, threshold, backend)  # type: ignore[no-any-return]


def norm_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights: RouteWeights,
    *,
    addend: torch.Tensor | None = None,
    threshold: float = 0.0,
    eps: float = 1e-6,
    unit_offset: bool = False,
    reads_residual: bool = False,
    backend: str,
) -> Three:
    """Return (x + addend, RMSNorm of it, mask) for few rows, in one kernel.

    Args:
        x: Residual stream, [M, D] with M in 1..16, last stride 1.
        weight: Of the norm, [D].
        weights: Of the router.
        addend: Output of the sub-layer before, as `x`.
        threshold: In logits.
        eps: Of the norm.
        unit_offset: Whether the norm's factor is 1 + weight (Gemma).
        reads_residual: Whether the router reads the sum instead of the normed rows.
        backend: 'torch' or 'triton'.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    total, normed, mask = torch.ops.wide.norm_route(
        x, weight, addend, *weights, threshold, eps, unit_offset, reads_residual, backend
    )
    return (x if addend is None else total), normed, mask


def _check(x: torch.Tensor, weights: RouteWeights, backend: str) -> None:
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
    if backend == "triton":
        obstacle = triton_obstacle(x.device, x.dtype)
        if obstacle is None and x.dtype == torch.float32 and not interprets_triton():
            obstacle = "the kernels take float16 and bfloat16, got torch.float32"
        if obstacle is not None:
            raise UnsupportedBackendError(f"route: {obstacle}; choose backend='torch'")
    elif backend != "torch":
        raise UnsupportedBackendError(f"route has the backends 'torch' and 'triton', got {backend!r}")


def _run_route(
    x: torch.Tensor,
    down: torch.Tensor,
    difference: torch.Tensor,
    offset: torch.Tensor | None,
    *,
    counter: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    from wide.kernels.route import _triton

    tile = default_tile(device_facts(x.device), x.shape[0])
    if MAX_FEW_ROWS < x.shape[0] <= NUM_COUNTERS * SMALLEST_BLOCK and tile.block_m == SMALLEST_BLOCK:
        return _triton.route_split(x, down, difference, offset, counter, threshold=threshold)
    if x.shape[0] > MAX_FEW_ROWS:
        return _triton.route(x, down, difference, offset, threshold=threshold, tile=tile)
    return _triton.norm_route_few(
        x,
        None,
        down,
        difference,
        offset,
        counter,
        addend=None,
        threshold=threshold,
        eps=0.0,
        unit_offset=False,
        reads_residual=True,
    )[2]


@implement(_LIBRARY, "route")
def _route_impl(
    x: torch.Tensor,
    down: torch.Tensor,
    difference: torch.Tensor,
    offset: torch.Tensor | None,
    counter: torch.Tensor,
    threshold: float,
    backend: str,
) -> torch.Tensor:
    _check(x, RouteWeights(down, difference, offset, counter), backend)
    if backend == "torch":
        return route_reference(x, down, difference, offset, threshold=threshold)
    return _run_route(x, down, difference, offset, counter=counter, threshold=threshold)


@torch.library.register_fake("wide::route", lib=_LIBRARY)
def _route_fake(x: torch.Tensor, down: torch.Tensor, difference: torch.Tensor, *rest: Any) -> torch.Tensor:
    del down, rest
    return x.new_empty((x.shape[0], difference.shape[0]), dtype=torch.bool)


@implement(_LIBRARY, "norm_route")
def _norm_route_impl(
    x: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor | None,
    down: torch.Tensor,
    difference: torch.Tensor,
    offset: torch.Tensor | None,
    counter: torch.Tensor,
    threshold: float,
    eps: float,
    unit_offset: bool,
    reads_residual: bool,
    backend: str,
) -> Three:
    _check(x, RouteWeights(down, difference, offset, counter), backend)
    if not 1 <= x.shape[0] <= MAX_FEW_ROWS:
        raise ShapeError(f"norm_route takes 1 to {MAX_FEW_ROWS} rows, got {x.shape[0]}; use rms_norm, then route")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ShapeError(f"norm_route wants a norm weight {x.dtype} [{x.shape[1]}], got {tuple(weight.shape)}")
    if addend is not None and (addend.shape != x.shape or addend.dtype != x.dtype or addend.stride(1) != 1):
        raise ShapeError(f"norm_route: addend must be {x.dtype} {tuple(x.shape)} with last stride 1")
    options: dict[str, Any] = {
        "addend": addend,
        "threshold": threshold,
        "eps": eps,
        "unit_offset": unit_offset,
        "reads_residual": reads_residual,
    }
    if backend == "torch":
        total, normed, mask = norm_route_reference(x, weight, down, difference, offset, **options)
        # An operator's output must not alias its input.
        return (x.new_empty(0) if addend is None else total), normed, mask
    from wide.kernels.route import _triton

    return _triton.norm_route_few(x, weight, down, difference, offset, counter, **options)


@torch.library.register_fake("wide::norm_route", lib=_LIBRARY)
def _norm_route_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor | None,
    down: torch.Tensor,
    difference: torch.Tensor,
    *rest: Any,
) -> Three:
    del weight, down, rest
    total = x.new_empty(0) if addend is None else x.new_empty(x.shape)
    return total, x.new_empty(x.shape), x.new_empty((x.shape[0], difference.shape[0]), dtype=torch.bool)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    if case.dtype == torch.float32 and not interprets_triton():
        return "the kernels take float16 and bfloat16"
    return triton_obstacle(device, case.dtype)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, width, rank, groups = (case.sizes[name] for name in ("num_rows", "width", "rank", "num_groups"))
    whole = Case(sizes=case.sizes, dtype=torch.float32, seed=case.seed)
    bias = random_values(whole, (2 * groups,), device, salt=4) if case.options.get("has_bias") else None
    weights = split_weights(
        random_values(whole, (rank, width), device, salt=2) * width**-0.5,
        random_values(whole, (2 * groups, rank), device, salt=3),
        bias,
        dtype=case.dtype,
    )
    return {
        "x": random_values(case, (rows, width), device, salt=1),
        "weights": weights,
        "threshold": case.options.get("threshold", 0.0),
    }


def _build_norm(case: Case, device: torch.device) -> dict[str, Any]:
    arguments = _build(case, device)
    shape = arguments["x"].shape
    return arguments | {
        "weight": random_values(case, shape[1:], device, salt=5),
        "addend": random_values(case, shape, device, salt=6) if case.options.get("has_addend") else None,
        "eps": 1e-5,
        "unit_offset": bool(case.options.get("unit_offset")),
        "reads_residual": bool(case.options.get("reads_residual")),
    }


def _flips(x: torch.Tensor, arguments: Mapping[str, Any], got: torch.Tensor) -> float:
    """Return the share of decisions that differ although their margin is not near the threshold."""
    weights: RouteWeights = arguments["weights"]
    margin = margins(x, weights.down, weights.difference, weights.offset) - arguments["threshold"]
    wrong = (got != (margin >= 0)) & (margin.abs() > _NEAR * margin.abs().mean())
    return wrong.float().mean().item()


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del wanted
    return _flips(arguments["x"], arguments, got)


def _compare_norm(arguments: Mapping[str, Any], got: Three, wanted: Three) -> float:
    # The decision is judged on the rows that the backend itself made: their last bit may differ.
    flips = _flips(got[0] if arguments["reads_residual"] else got[1], arguments, got[2])
    return max(flips, *(relative_error(g, w) for g, w in zip(got[:2], wanted[:2], strict=True)))


def _work(case: Case) -> Work:
    rows, width, rank, groups = (case.sizes[name] for name in ("num_rows", "width", "rank", "num_groups"))
    return Work(
        flop=2 * rows * rank * (width + groups),
        bytes_read=rows * width * case.dtype.itemsize + 4 * rank * (width + groups),
        bytes_written=rows * groups,
    )


def _case(sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    names = ("num_rows", "width", "rank", "num_groups")
    return Case(sizes=dict(zip(names, sizes, strict=True)), dtype=dtype, options=options)


def _backend(name: str, run: Any) -> Any:
    return lambda **arguments: run(**arguments, backend=name)


_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}

ROUTE = Operator(
    name="route",
    reference=_backend("torch", route),
    backends={
        "torch": Backend(run=_backend("torch", route), supports=anywhere),
        "triton": Backend(run=_backend("triton", route), supports=_triton_supports),
    },
    cases=(
        _case((1, 64, 4, 8)),
        _case((3, 200, 16, 7), has_bias=True, threshold=0.3),
        _case((17, 256, 32, 112)),
        _case((70, 136, 5, 1), has_bias=True),
        _case((33, 128, 16, 20), torch.float32, threshold=-0.2),
    ),
    build=_build,
    compare=_compare,
    tolerance=dict.fromkeys(_TOLERANCE, 0.0),
    work=_work,
)
NORM_ROUTE = Operator(
    name="norm_route",
    reference=_backend("torch", norm_route),
    backends={
        "torch": Backend(run=_backend("torch", norm_route), supports=anywhere),
        "triton": Backend(run=_backend("triton", norm_route), supports=_triton_supports),
    },
    cases=(
        _case((1, 64, 4, 8)),
        _case((4, 300, 16, 140), has_addend=True, has_bias=True),
        _case((2, 256, 32, 9), has_addend=True, unit_offset=True, reads_residual=True),
        _case((3, 128, 16, 20), torch.float32, has_addend=True, threshold=-0.2),
        _case((16, 200, 8, 12), has_addend=True),
        _case((5, 128, 64, 140), has_bias=True),
    ),
    build=_build_norm,
    compare=_compare_norm,
    tolerance=_TOLERANCE,
    work=_work,
)
