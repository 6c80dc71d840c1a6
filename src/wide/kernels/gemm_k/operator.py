"""GEMM-K as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import (
    Backend,
    Case,
    Operator,
    anywhere,
    random_mask,
    random_values,
    relative_error,
)
from wide.kernels.device import triton_obstacle
from wide.kernels.gemm_k import hopper
from wide.kernels.gemm_k.reference import gemm_k_reference
from wide.kernels.gemm_k.tiles import HopperKTile, KTile, StoredKTile, default_tile
from wide.kernels.gemm_k.work import least_work
from wide.kernels.registration import implement
from wide.kernels.reordering import PatternReordering, Reordering

_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "gemm_k(Tensor h, Tensor weight, Tensor? bias, Tensor index, Tensor patterns, Tensor counts, Tensor tiles,"
    " Tensor num_tiles, int block_m, int groups_per_block, bool keeps_empty, int group_size, Tensor? packed_offsets,"
    " Tensor? packed_rank, Tensor? mask, ScalarType? out_dtype, bool deterministic, str backend, int[] tile) -> Tensor"
)


@implement(_LIBRARY, "gemm_k")
def _impl(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    patterns: torch.Tensor,
    counts: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    block_m: int,
    groups_per_block: int,
    keeps_empty: bool,
    group_size: int,
    packed_offsets: torch.Tensor | None,
    packed_rank: torch.Tensor | None,
    mask: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    order = PatternReordering(index, patterns, counts, tiles, num_tiles, block_m, groups_per_block, keeps_empty)
    packed = None
    if packed_offsets is not None and packed_rank is not None:
        packed = Reordering(index, counts, packed_offsets, tiles, num_tiles, packed_rank, block_m)
    options: dict[str, Any] = {
        "group_size": group_size,
        "bias": bias,
        "packed": packed,
        "mask": mask,
        "out_dtype": out_dtype,
        "deterministic": deterministic,
    }
    if backend not in GEMM_K.backends:
        raise UnsupportedBackendError(f"gemm_k has the backends {sorted(GEMM_K.backends)}, got {backend!r}")
    if backend in ("triton", "gluon", "cuda"):
        options["tile"] = tuple(tile) or None
    return GEMM_K.backends[backend].run(h, weight, order, **options)  # type: ignore[no-any-return]


@torch.library.register_fake("wide::gemm_k", lib=_LIBRARY)
def _fake(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    patterns: torch.Tensor,
    counts: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    block_m: int,
    groups_per_block: int,
    keeps_empty: bool,
    group_size: int,
    packed_offsets: torch.Tensor | None,
    packed_rank: torch.Tensor | None,
    mask: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    del bias, patterns, counts, tiles, num_tiles, block_m, groups_per_block, keeps_empty, group_size
    del packed_offsets, packed_rank, mask, deterministic, backend, tile
    return h.new_empty((index.shape[1], weight.shape[0]), dtype=out_dtype or h.dtype)


def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    packed: Reordering | None = None,
    mask: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    backend: str,
    tile: KTile | HopperKTile | StoredKTile | None = None,
) -> torch.Tensor:
    """Return per row the sum over its executing groups of h[m, channels] W[:, channels]^T, plus bias.

    Accumulates in float32. Skipped channels of `h` are never read into a product, whatever they hold.

    Args:
        h: [M, K], rows contiguous; or, with `packed`, [M * N_G, G].
        weight: [N, K].
        order: Rows by pattern over super-blocks of groups (`reorder_patterns`); with one super-block and
            `keeps_empty` every row is written once, otherwise tiles are reduced into float32.
        group_size: Channels of a group, G.
        bias: [N]; added to every row.
        packed: The reordering (with rank) by which `h` is packed.
        mask: bool [M, N_G]; needed by backend 'dense' unless the skipped channels of `h` are zero.
        out_dtype: Of the result; None means that of `h`.
        deterministic: Add super-blocks in order, so that results are reproducible bit by bit.
        backend: 'torch', 'triton', 'gluon' (sm_90, half precision, G a multiple of 64, super-blocks of up to 8 groups,
            neither packed nor deterministic), 'cuda' (the same in CUDA C++, for one super-block that keeps empty rows,
            N a multiple of 256, `out_dtype` that of `h`; deterministic) or 'dense' (multiplies everything).
        tile: Tile of the backend's kernel; None takes a default for the device.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.gemm_k(  # type: ignore[no-any-return]
        h,
        weight,
        bias,
        *order,
        group_size,
        None if packed is None else packed.offsets,
        None if packed is None else packed.rank,
        mask,
        out_dtype,
        deterministic,
        backend,
        tile or (),
    )


def _check(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    packed: Reordering | None,
    mask: torch.Tensor | None,
    **others: Any,
) -> None:
    del others
    num_rows, depth = order.index.shape[1], weight.shape[1]
    if depth % group_size or h.dim() != 2 or weight.dim() != 2 or h.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_k wants h and weight [N, K] of one dtype and groups that divide K, got {h.dtype} {tuple(h.shape)}, "
            f"{weight.dtype} {tuple(weight.shape)} and groups of {group_size}"
        )
    num_groups = depth // group_size
    wanted = (num_rows, depth) if packed is None else (num_rows * num_groups, group_size)
    if tuple(h.shape) != wanted or order.counts.numel() != -(-num_groups // order.groups_per_block):
        raise ShapeError(f"h must be {wanted} and the reordering cover {num_groups} groups, got h {tuple(h.shape)}")
    if packed is not None and packed.rank.shape != (num_rows, num_groups):
        raise ShapeError("packed inputs need the rank of their reordering: reorder(..., with_rank=True)")
    if num_rows * num_groups >= 2**31:
        raise ShapeError(f"{num_rows} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if h.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError("gemm_k wants h and weight with contiguous rows; call .contiguous() once, at load time")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must have {weight.shape[0]} entries, got {tuple(bias.shape)}")
    if mask is not None and (mask.shape != (num_rows, num_groups) or mask.dtype != torch.bool):
        raise ShapeError(f"mask must be bool {(num_rows, num_groups)}, got {mask.dtype} {tuple(mask.shape)}")


def _run_torch(h: torch.Tensor, weight: torch.Tensor, order: PatternReordering, **options: Any) -> torch.Tensor:
    _check(h, weight, order, **options)
    return gemm_k_reference(h, weight, order, **options)


def _run_triton(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    _check(h, weight, order, **options)
    obstacle = triton_obstacle(h.device, h.dtype)
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_k: {obstacle}; choose backend='torch'")
    from wide.kernels.gemm_k import _triton

    group_size, width = options["group_size"], weight.shape[0]
    chosen = (
        KTile(*tile)
        if tile
        else default_tile(
            h.device,
            group_size=group_size,
            num_rows=order.index.shape[1],
            width=width,
            block_m=order.block_m,
            dtype=h.dtype,
        )
    )
    fits = group_size % chosen.block_k == 0 and width % chosen.block_n == 0 and chosen.slab % chosen.block_n == 0
    if not fits or min(order.block_m, chosen.block_n, chosen.block_k) < 16:
        raise UnsupportedBackendError(
            f"gemm_k: {chosen} with block_m={order.block_m} does not work for groups of {group_size} and a width of "
            f"{width}; the Triton backend wants multiples of 16; choose backend='dense'"
        )
    if weight.stride(0) * weight.element_size() % 16:
        chosen = chosen._replace(weights_by=0)
    options.pop("mask")
    options["out_dtype"] = options["out_dtype"] or h.dtype
    return _triton.gemm_k(h, weight, order, tile=chosen, **options)


def _run_gluon(h: torch.Tensor, weight: torch.Tensor, order: PatternReordering, **options: Any) -> torch.Tensor:
    _check(h, weight, order, **{name: value for name, value in options.items() if name != "tile"})
    return hopper.run(h, weight, order, **options)


def _run_cuda(h: torch.Tensor, weight: torch.Tensor, order: PatternReordering, **options: Any) -> torch.Tensor:
    _check(h, weight, order, **{name: value for name, value in options.items() if name != "tile"})
    return hopper.run_cuda(h, weight, order, **options)


def _run_dense(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    packed: Reordering | None,
    mask: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    deterministic: bool,
) -> torch.Tensor:
    """Multiply everything with the library's GEMM; the candidate that skipping must beat."""
    del deterministic
    _check(h, weight, order, group_size=group_size, bias=bias, packed=packed, mask=mask)
    if packed is not None:
        raise UnsupportedBackendError("gemm_k: backend 'dense' reads no packed input; let gemm_mn return [M, N]")
    if mask is not None:
        h = torch.where(mask.unsqueeze(2), h.view(*mask.shape, group_size), 0).view_as(h)
    return torch.nn.functional.linear(h, weight, bias).to(out_dtype or h.dtype)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    size, width = case.sizes["group_size"], case.sizes["width"]
    fits = size % 16 == 0 and width % 16 == 0
    unfit = None if fits else f"groups of {size}, width {width}; 16 must divide both"
    return triton_obstacle(device, case.dtype) or unfit


def _dense_supports(device: torch.device, case: Case) -> str | None:
    del device
    return "it reads no packed input" if case.options.get("packed") else None


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    from wide.kernels.reorder import reorder, reorder_patterns

    rows, groups, size, width = (case.sizes[k] for k in ("num_rows", "num_groups", "group_size", "width"))
    mask = random_mask(case, (rows, groups), device)
    options = dict(case.options)
    keeps_empty, is_packed = options.pop("keeps_empty", False), options.pop("packed", False)
    biased = options.pop("biased", False)
    h = random_values(case, (rows, groups, size), device, salt=1)
    h = torch.where(mask.unsqueeze(2), h, float("nan"))
    packing = reorder(mask, with_rank=True, backend="torch") if is_packed else None
    if packing is not None:
        flat = torch.full((rows * groups, size), float("nan"), dtype=h.dtype, device=device)
        row, group = mask.nonzero(as_tuple=True)
        flat[packing.offsets[group] + packing.rank[row, group]] = h[row, group]
        h = flat
    return {
        "h": h if is_packed else h.view(rows, groups * size),
        "weight": random_values(case, (width, groups * size), device, salt=2) / (groups * size) ** 0.5,
        "order": reorder_patterns(
            mask,
            groups_per_block=case.sizes["groups_per_block"],
            block_m=case.sizes["block_m"],
            keeps_empty=keeps_empty,
            backend="torch",
        ),
        "group_size": size,
        "bias": random_values(case, (width,), device, salt=3) if biased else None,
        "packed": packing,
        "mask": mask,
        "out_dtype": None,
        "deterministic": False,
        **options,
    }


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del arguments
    return relative_error(got, wanted)


def _cases() -> tuple[Case, ...]:
    variants: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {}),
        (3, {"biased": True, "packed": True}),
        (4, {"deterministic": True, "biased": True}),
        (8, {"keeps_empty": True, "biased": True}),
        (2, {"out_dtype": torch.float32, "biased": True}),
    )
    shapes = ((1, 1, 32, 0.5), (3, 2, 16, 1.0), (17, 5, 32, 0.5), (64, 3, 48, 0.0), (127, 6, 32, 0.5))
    return tuple(
        Case(
            sizes={
                "num_rows": rows,
                "num_groups": groups,
                "group_size": size,
                "width": 48,
                "block_m": 32,
                "groups_per_block": groups_per_block,
            },
            dtype=dtype,
            active=active,
            options=options,
        )
        for dtype, (rows, groups, size, active) in zip((torch.float32, torch.float16) * 3, shapes, strict=False)
        for groups_per_block, options in variants
    )


GEMM_K = Operator(
    name="gemm_k",
    reference=gemm_k_reference,
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
    work=least_work,
)
