"""GEMM-MN as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.clear_skipped import cleared
from wide.kernels.contract import (
    Backend,
    Case,
    Operator,
    Work,
    anywhere,
    random_mask,
    random_values,
    relative_error,
)
from wide.kernels.device import interprets_triton, triton_obstacle
from wide.kernels.gemm_mn import hopper
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate, gemm_mn_reference
from wide.kernels.gemm_mn.tiles import POINTERS, TMA_STACKED, ClusterMnTile, HopperMnTile, MnTile, default_tile
from wide.kernels.registration import implement
from wide.kernels.reordering import Reordering

# More rows do not fit into shared memory.
_MAX_BLOCK_M = 128


_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "gemm_mn(Tensor x, Tensor weight, Tensor? up_weight, Tensor? bias, Tensor? up_bias, Tensor index, Tensor counts,"
    " Tensor offsets, Tensor tiles, Tensor num_tiles, Tensor? mask, int block_m, str activation, bool packed,"
    " str backend, int[] tile) -> Tensor"
)


@implement(_LIBRARY, "gemm_mn")
def _impl(
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    index: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    mask: torch.Tensor | None,
    block_m: int,
    activation: str,
    packed: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    order = Reordering(index, counts, offsets, tiles, num_tiles, counts.new_empty(0), block_m)
    options: dict[str, Any] = {
        "up_weight": up_weight,
        "bias": bias,
        "up_bias": up_bias,
        "activation": activation,
        "packed": packed,
        "mask": mask,
    }
    if backend not in GEMM_MN.backends:
        raise UnsupportedBackendError(f"gemm_mn has the backends {sorted(GEMM_MN.backends)}, got {backend!r}")
    if backend in ("triton", "gluon", "cuda"):
        options["tile"] = tuple(tile) or None
    return GEMM_MN.backends[backend].run(x, weight, order, **options)  # type: ignore[no-any-return]


@torch.library.register_fake("wide::gemm_mn", lib=_LIBRARY)
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    index: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    mask: torch.Tensor | None,
    block_m: int,
    activation: str,
    packed: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    del up_weight, bias, up_bias, index, offsets, tiles, num_tiles, mask, block_m, activation, backend, tile
    num_groups = counts.shape[0]
    width = weight.shape[0]
    return x.new_empty((x.shape[0] * num_groups, width // num_groups) if packed else (x.shape[0], width))


def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    packed: bool = False,
    mask: torch.Tensor | None = None,
    backend: str,
    tile: MnTile | HopperMnTile | ClusterMnTile | None = None,
) -> torch.Tensor:
    """Return act(x W^T), or act(x W^T) * (x W_up^T), computed on executing (row, group) pairs only.

    Skipped channels hold unspecified memory: select, never multiply them by a mask.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K]; its rows g * G .. (g + 1) * G belong to group g.
        order: Which rows execute which group (`reorder`).
        up_weight: [N, K] of gated FFNs.
        bias: [N].
        up_bias: [N] of gated FFNs.
        activation: 'none', 'silu', 'gelu_tanh' or 'relu2'.
        packed: Return [M * N_G, G] with the rows of group g from `order.offsets[g]` on, instead of [M, N].
        mask: bool [M, N_G]; if given, skipped channels of the [M, N] output are zero.
        backend: 'torch', 'triton', 'gluon' (sm_90, half precision, K and G multiples of 64), 'cuda' (the same in CUDA
            C++, groups of multiples of 128 channels if gated, of 256 if not) or 'dense' (computes everything).
        tile: Tile of the kernel; None takes a default for the device.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.gemm_mn(  # type: ignore[no-any-return]
        x,
        weight,
        up_weight,
        bias,
        up_bias,
        *order[:5],
        mask,
        order.block_m,
        activation,
        packed,
        backend,
        tile or (),
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    packed: bool,
    mask: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_mn wants x [M, K] and weight [N, K] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    num_groups = order.counts.numel()
    if weight.shape[0] % num_groups or order.index.shape != (num_groups, x.shape[0]):
        raise ShapeError(
            f"a reordering of {tuple(order.index.shape)} (groups, rows) does not fit x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if x.shape[0] * num_groups >= 2**31:
        raise ShapeError(f"{x.shape[0]} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError("gemm_mn wants x and weight with contiguous rows; call .contiguous() once, at load time")
    if up_weight is not None and (up_weight.shape, up_weight.stride()) != (weight.shape, weight.stride()):
        raise ShapeError("gate and up weights must have the same shape and strides")
    if (up_bias is not None and up_weight is None) or activation not in ACTIVATIONS:
        raise ShapeError(f"up_bias needs up_weight; activation is one of {ACTIVATIONS}, got {activation!r}")
    if any(b is not None and b.shape != weight.shape[:1] for b in (bias, up_bias)):
        raise ShapeError(f"biases must have {weight.shape[0]} entries")
    if mask is not None and (packed or mask.shape != (x.shape[0], num_groups) or mask.dtype != torch.bool):
        raise ShapeError("mask must be bool [M, N_G] and goes with the [M, N] output only (packed=False)")


def _run_torch(x: torch.Tensor, weight: torch.Tensor, order: Reordering, **options: Any) -> torch.Tensor:
    _check(x, weight, order, **options)
    return gemm_mn_reference(x, weight, order, **options)


def _run_triton(
    x: torch.Tensor, weight: torch.Tensor, order: Reordering, *, tile: Sequence[int] | None = None, **options: Any
) -> torch.Tensor:
    _check(x, weight, order, **options)
    obstacle = triton_obstacle(x.device, x.dtype)
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_mn: {obstacle}; choose backend='torch'")
    from wide.kernels.gemm_mn import _triton

    up_weight = options["up_weight"]
    size = weight.shape[0] // order.counts.numel()
    gated = up_weight is not None
    stacked = _stacked(weight, up_weight)
    chosen = (
        MnTile(*tile)
        if tile
        else default_tile(x.device, group_size=size, block_m=order.block_m, gated=gated, stacked=stacked, dtype=x.dtype)
    )
    if not 16 <= order.block_m <= _MAX_BLOCK_M or chosen.block_n < 16 or size % chosen.block_n:
        raise UnsupportedBackendError(
            f"gemm_mn: tiles of {order.block_m} x {chosen.block_n} do not work for groups of {size} channels; the "
            f"Triton backend wants 16 <= block_m <= {_MAX_BLOCK_M} and groups that 16 divides; choose backend='dense'"
        )
    if any(length * weight.element_size() % 16 for length in (weight.shape[1], weight.stride(0))):
        chosen = chosen._replace(weights_by=POINTERS)
    if chosen.weights_by == TMA_STACKED and not stacked:
        raise ShapeError("weights_by=2 wants the up weight right behind the gate weight in memory; use weights_by=1")
    return _triton.gemm_mn(x, weight, order, tile=chosen, **options)


def _run_gluon(x: torch.Tensor, weight: torch.Tensor, order: Reordering, **options: Any) -> torch.Tensor:
    _check(x, weight, order, **{name: value for name, value in options.items() if name != "tile"})
    return hopper.run(x, weight, order, **options)


def _run_cuda(x: torch.Tensor, weight: torch.Tensor, order: Reordering, **options: Any) -> torch.Tensor:
    _check(x, weight, order, **{name: value for name, value in options.items() if name != "tile"})
    return hopper.run_cuda(x, weight, order, **options)


def _stacked(weight: torch.Tensor, up_weight: torch.Tensor | None) -> bool:
    bytes_of_weight = weight.numel() * weight.element_size()
    return (
        up_weight is not None
        and weight.is_contiguous()
        and up_weight.data_ptr() == weight.data_ptr() + bytes_of_weight
        and up_weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


def _run_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    packed: bool,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute every channel with the library's GEMM; the candidate that skipping must beat."""
    _check(
        x,
        weight,
        order,
        up_weight=up_weight,
        bias=bias,
        up_bias=up_bias,
        activation=activation,
        packed=packed,
        mask=mask,
    )
    if packed:
        raise UnsupportedBackendError("gemm_mn: backend 'dense' has no packed output; use packed=False")
    if up_weight is None:
        values = torch.nn.functional.linear(x, weight, bias)
        if activation != "none":
            values = activate(values.float(), activation).to(x.dtype)
        return values if mask is None else cleared(values, mask)
    if _stacked(weight, up_weight) and bias is None and up_bias is None:
        width, depth = weight.shape
        both = x @ weight.as_strided((2 * width, depth), (depth, 1)).t()
    else:
        gate = torch.nn.functional.linear(x, weight, bias)
        both = torch.cat((gate, torch.nn.functional.linear(x, up_weight, up_bias)), 1)
    if x.is_cuda and not interprets_triton():
        from wide.kernels.gemm_mn import _triton

        return _triton.gated_activation(both, activation, mask)
    gate, up = both.float().chunk(2, 1)
    values = (activate(gate, activation) * up).to(x.dtype)
    return values if mask is None else cleared(values, mask)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    size = case.sizes["group_size"]
    unfit = None if size % 16 == 0 else f"groups of {size} channels; 16 must divide them"
    if case.sizes.get("block_m", 0) > _MAX_BLOCK_M:
        unfit = f"tiles of {case.sizes['block_m']} rows; at most {_MAX_BLOCK_M}"
    return triton_obstacle(device, case.dtype) or unfit


def _dense_supports(device: torch.device, case: Case) -> str | None:
    del device
    return "it has no packed output" if case.options.get("packed") else None


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    from wide.kernels.reorder import reorder

    rows, groups, size, depth = (case.sizes[k] for k in ("num_rows", "num_groups", "group_size", "depth"))
    mask = random_mask(case, (rows, groups), device)
    weights = random_values(case, (2, groups * size, depth), device, salt=1) / depth**0.5
    options = dict(case.options)
    gated, biased = options.pop("gated", False), options.pop("biased", False)
    zeroed = options.pop("zeroed", False)
    biases = random_values(case, (2, groups * size), device, salt=2)
    return {
        "x": random_values(case, (rows, depth), device, salt=3),
        "weight": weights[0],
        "order": reorder(mask, block_m=case.sizes["block_m"], backend="torch"),
        "up_weight": weights[1] if gated else None,
        "bias": biases[0] if biased else None,
        "up_bias": biases[1] if biased and gated else None,
        "activation": "none",
        "packed": False,
        "mask": mask if zeroed else None,
        **options,
    }


def executed(arguments: Mapping[str, Any], out: torch.Tensor) -> torch.Tensor:
    """Return the meant entries of an output as one vector; everything if skipped entries are zeroed."""
    order: Reordering = arguments["order"]
    if arguments["mask"] is not None:
        return out.flatten()
    counts, offsets = order.counts.tolist(), order.offsets.tolist()
    if arguments["packed"]:
        return out[: offsets[-1]].flatten()
    grouped = out.view(out.shape[0], len(counts), -1)
    return torch.cat([grouped[order.index[g, :n].long(), g].flatten() for g, n in enumerate(counts)])


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    return relative_error(executed(arguments, got), executed(arguments, wanted))


def _work(case: Case) -> Work:
    rows, groups, size, depth = (case.sizes[k] for k in ("num_rows", "num_groups", "group_size", "depth"))
    weights = 2 if case.options.get("gated") else 1
    bytes_each = case.dtype.itemsize
    pairs = case.active * rows * groups
    return Work(
        flop=int(2 * weights * pairs * size * depth),
        bytes_read=(rows + weights * groups * size) * depth * bytes_each,
        bytes_written=int(pairs * size * bytes_each),
    )


def _cases() -> tuple[Case, ...]:
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"biased": True, "packed": True},
        {"gated": True, "activation": "silu"},
        {"gated": True, "activation": "gelu_tanh", "biased": True, "packed": True},
        {"activation": "relu2", "zeroed": True},
    )
    shapes = ((1, 1, 32, 0.5), (3, 2, 16, 1.0), (17, 3, 32, 0.5), (64, 2, 48, 0.0), (127, 2, 32, 0.5))
    return tuple(
        Case(
            sizes={"num_rows": rows, "num_groups": groups, "group_size": size, "depth": 72, "block_m": 32},
            dtype=dtype,
            active=active,
            options=options,
        )
        for dtype, (rows, groups, size, active) in zip((torch.float32, torch.float16) * 3, shapes, strict=False)
        for options in variants
    )


GEMM_MN = Operator(
    name="gemm_mn",
    reference=gemm_mn_reference,
    backends={
        "torch": Backend(run=_run_torch, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
        "gluon": Backend(run=_run_gluon, supports=hopper.supports),
        "cuda": Backend(run=_run_cuda, supports=hopper.supports_cuda),
        "dense": Backend(run=_run_dense, supports=_dense_supports),
    },
    cases=_cases(),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=_work,
)
