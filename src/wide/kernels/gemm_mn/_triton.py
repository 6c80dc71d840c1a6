"""GEMM-MN in Triton: a persistent grid over row tiles listed on the device; rows are gathered."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from wide.errors import ShapeError
from wide.kernels.device import device_facts, triton_obstacle
from wide.kernels.dispatch import Candidate, largest_tile, require
from wide.kernels.gemm_mn.op import BACKENDS, GATED_BACKENDS, MnShape, is_stacked
from wide.kernels.reordering import BLOCK_M, Reordering

# How the kernel reads weights: `MnTile.weights_by`.
POINTERS, TMA, TMA_STACKED = 0, 1, 2
# More rows do not fit into shared memory.
_MAX_BLOCK_M = 128


class MnTile(NamedTuple):
    """How one program is cut.

    The rows of a tile come from `Reordering.block_m`.

    Args:
        block_n: Channels of a tile (of gate and up each); divides the group size.
        block_k: Reduction elements of a pipeline stage.
        weights_by: 0 pointers, 1 tensor-memory access (sm_90 and newer), 2 the same with gate and up as one product;
            needs the up weight right behind the gate weight in memory. Where rows of weights are not a multiple of 16
            bytes long and apart, as that access wants, 1 and 2 mean 0: tiles of tables and of `wide tune` may come
            from other shapes, and their other fields still hold.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int = 1
    weights_by: int = 0


# Rows of a tile, and the tile.
_GATED = (
    (128, MnTile(128, 64, 4, 8, 1, 2)),
    (128, MnTile(128, 64, 3, 8, 1, 2)),
    (128, MnTile(128, 64, 4, 8, 1, 1)),
    (128, MnTile(64, 64, 3, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 2)),
    (64, MnTile(128, 64, 2, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 1)),
    (64, MnTile(64, 64, 4, 4, 2, 2)),
)
_PLAIN = (
    (128, MnTile(256, 64, 4, 8, 1, 1)),
    (128, MnTile(256, 64, 3, 8, 1, 1)),
    (128, MnTile(128, 64, 3, 4, 2, 1)),
    (64, MnTile(256, 64, 5, 4, 1, 1)),
    (64, MnTile(256, 64, 4, 4, 1, 1)),
    (64, MnTile(256, 64, 2, 4, 2, 1)),
    (64, MnTile(128, 64, 4, 4, 2, 1)),
    (64, MnTile(128, 64, 3, 4, 3, 1)),
    (64, MnTile(64, 64, 4, 4, 3, 1)),
)


def default_tile(device: torch.device, shape: MnShape, *, stacked: bool) -> MnTile:
    """Return a tile that fits the device; `stacked` is what `is_stacked` says. Measured tables replace it."""
    facts = device_facts(device)
    if facts.capability in (90, 100, 103):
        # Later than sm_90 sums of int8 stay in registers.
        widest = 128 if shape.dtype == torch.int8 and facts.capability != 90 else 256
        block_n = largest_tile(shape.group_size, widest // 2 if shape.gated else widest)
        warps = 8 if shape.block_m >= 128 and block_n * (2 if shape.gated else 1) >= 128 else 4
        return MnTile(block_n, 128 // shape.dtype.itemsize, 4, warps, 1, 2 if shape.gated and stacked else 1)
    block_n = largest_tile(shape.group_size, 64 if shape.gated else 128)
    block_k, stages = 32 if shape.dtype == torch.float32 or facts.capability in (89, 120) else 64, 3
    if shape.dtype == torch.int8:
        # Three stages of 64 spill on sm_89.
        block_k, stages = 128, 2 if block_k == 32 else 3
    return MnTile(block_n, block_k, stages, 8 if shape.block_m >= 128 else 4)


def supports(shape: MnShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.group_size % 16 == 0 and 16 <= shape.block_m <= _MAX_BLOCK_M:
        return None
    return (
        f"the Triton backend wants groups that 16 divides and tiles of 16 to {_MAX_BLOCK_M} rows, got groups of "
        f"{shape.group_size} channels and tiles of {shape.block_m}"
    )


def candidates(shape: MnShape, device: torch.device, few: bool) -> Iterator[Candidate]:
    """Yield the default tiles and, unless few are wanted, those worth trying."""
    for block_m in (BLOCK_M, BLOCK_M // 2):
        yield Candidate(default_tile(device, shape._replace(block_m=block_m), stacked=shape.gated), block_m)
    for block_m, tile in () if few else _GATED if shape.gated else _PLAIN:
        if shape.group_size % tile.block_n == 0:
            # A stage has as many bytes of int8.
            wider = tile._replace(block_k=2 * tile.block_k)
            yield Candidate(wider if shape.dtype == torch.int8 else tile, block_m)


@BACKENDS.register("triton", needs=triton_obstacle, supports=supports, candidates=candidates)
def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_mn_reference`; the tile is an `MnTile`."""
    num_groups = order.counts.numel()
    size, stacked = weight.shape[0] // num_groups, is_stacked(weight, up_weight)
    shape = MnShape(x.dtype, size, x.shape[1], up_weight is not None, order.block_m)
    chosen = MnTile(*tile) if tile else default_tile(x.device, shape, stacked=stacked)
    if chosen.block_n < 16 or size % chosen.block_n:
        require(f"{chosen} does not work for groups of {size} channels; leave the tile out")
    if any(length * weight.element_size() % 16 for length in (weight.shape[1], weight.stride(0))):
        chosen = chosen._replace(weights_by=POINTERS)
    if chosen.weights_by == TMA_STACKED and not stacked:
        raise ShapeError("weights_by=2 wants the up weight right behind the gate weight in memory; use weights_by=1")
    num_rows, depth = x.shape
    width = weight.shape[0]
    block_n, block_k, num_stages, num_warps, ctas_per_sm, weights_by = chosen
    out = x.new_empty(num_rows, width, dtype=dtype or x.dtype)
    w, w_up = _weight_arguments(weight, up_weight, block_n, block_k, weights_by)
    capacity = order.tiles.shape[0] * (size // block_n)
    grid = (min(capacity, ctas_per_sm * device_facts(x.device).num_sms),)
    _gemm_mn_kernel[grid](
        x, w, w_up, out, bias, up_bias, order.index, order.counts, order.tiles, order.num_tiles,
        None if mask is None else mask.view(torch.uint8), x_scale, scale, up_scale,
        num_rows, depth,
        x.stride(0), weight.stride(0), out.stride(0), *((0, 0) if mask is None else mask.stride()),
        num_groups,
        G=size, BLOCK_M=order.block_m, BLOCK_N=block_n, BLOCK_K=block_k, GATED=up_weight is not None,
        ACTIVATION=activation, WEIGHTS_BY=weights_by, WHOLE_K=depth % block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_stages=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return out


def _weight_arguments(
    weight: torch.Tensor, up_weight: torch.Tensor | None, block_n: int, block_k: int, weights_by: int
) -> tuple[object, object]:
    if weights_by == POINTERS:
        return weight, weight if up_weight is None else up_weight
    if weights_by == TMA:
        descriptor = TensorDescriptor.from_tensor(weight, [block_n, block_k])
        return descriptor, descriptor if up_weight is None else TensorDescriptor.from_tensor(
            up_weight, [block_n, block_k]
        )
    width, depth = weight.shape
    stacked = TensorDescriptor(weight, [2, width, depth], [width * depth, depth, 1], [2, block_n, block_k])
    return stacked, stacked


@triton.jit
def activate(values, ACTIVATION: tl.constexpr):
    """Return the activation of float32 values."""
    if ACTIVATION == "silu":
        values = values / (1.0 + tl.exp(-values))
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (values + 0.044715 * values * values * values)
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        values = values / (1.0 + tl.exp(-inner))
    elif ACTIVATION == "relu2":
        values = tl.maximum(values, 0.0)
        values = values * values
    return values


@triton.jit
def _weight_block(
    W, column, k, stride_w, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, WHOLE_K: tl.constexpr
):
    if TMA:
        block = W.load([column, k])
    else:
        columns = column + tl.arange(0, BLOCK_N)
        ks = k + tl.arange(0, BLOCK_K)
        places = W + columns.to(tl.int64)[:, None] * stride_w + ks[None, :]
        if WHOLE_K:
            block = tl.load(places)
        else:
            block = tl.load(places, mask=(ks < K)[None, :], other=0.0)
    return block


@triton.jit
def _clear_skipped(
    OUT, MASK, first, end, group, column, stride_out, stride_mask_m, stride_mask_g,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    channels = column + tl.arange(0, BLOCK_N)
    for start in range(first, end, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        executes = tl.load(MASK + rows * stride_mask_m + group * stride_mask_g, mask=rows < end, other=1)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), OUT.dtype.element_ty)
        tl.store(OUT + rows[:, None] * stride_out + channels[None, :], zeros, mask=(executes == 0)[:, None])


@triton.jit(do_not_specialize=["M"])
def _gemm_mn_kernel(
    X, W, W_UP, OUT, BIAS, UP_BIAS, INDEX, COUNTS, TILES, NUM_TILES, MASK, X_SCALE, SCALE, UP_SCALE,
    M, K,
    stride_x, stride_w, stride_out, stride_mask_m, stride_mask_g,
    N_G,
    G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHTS_BY: tl.constexpr, WHOLE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.int32 if X_SCALE is not None else tl.float32
    PARTS: tl.constexpr = G // BLOCK_N
    STACKED: tl.constexpr = WEIGHTS_BY == 2
    BY_TMA: tl.constexpr = WEIGHTS_BY == 1
    ks = tl.arange(0, BLOCK_K)
    num_tiles = tl.load(NUM_TILES) * PARTS
    if MASK is not None:
        # Groups that no row executes have no tile that would clear them.
        for group in range(tl.program_id(0), N_G, tl.num_programs(0)):
            if tl.load(COUNTS + group) == 0:
                for part in tl.static_range(0, G, BLOCK_N):
                    _clear_skipped(
                        OUT, MASK, 0, M, group, group * G + part,
                        stride_out, stride_mask_m, stride_mask_g, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.load(TILES + 2 * (tile // PARTS))
        row_tile = tl.load(TILES + 2 * (tile // PARTS) + 1)
        count = tl.load(COUNTS + group)
        places = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        # Rows beyond the count read row 0 and are never stored.
        rows = tl.load(INDEX + group * M + places, mask=places < count, other=0).to(tl.int64)
        column = group * G + (tile % PARTS) * BLOCK_N
        if MASK is not None:
            # Each tile of a group clears its share of all rows; the writes go out while the products run.
            share = tl.cdiv(M, tl.cdiv(count, BLOCK_M))
            _clear_skipped(
                OUT, MASK, row_tile * share, tl.minimum((row_tile + 1) * share, M), group, column,
                stride_out, stride_mask_m, stride_mask_g, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        x_places = X + rows[:, None] * stride_x + ks[None, :]
        if STACKED:
            both = tl.zeros((BLOCK_M, 2 * BLOCK_N), SUM)
            for k in range(0, K, BLOCK_K):
                if WHOLE_K:
                    a = tl.load(x_places + k)
                else:
                    a = tl.load(x_places + k, mask=(k + ks < K)[None, :], other=0.0)
                b = W.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
                both = tl.dot(a, b.T, both, input_precision=PRECISION, out_dtype=SUM)
            values, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        else:
            values = tl.zeros((BLOCK_M, BLOCK_N), SUM)
            up = tl.zeros((BLOCK_M, BLOCK_N), SUM)
            for k in range(0, K, BLOCK_K):
                if WHOLE_K:
                    a = tl.load(x_places + k)
                else:
                    a = tl.load(x_places + k, mask=(k + ks < K)[None, :], other=0.0)
                b = _weight_block(W, column, k, stride_w, K, BLOCK_N, BLOCK_K, BY_TMA, WHOLE_K)
                values = tl.dot(a, b.T, values, input_precision=PRECISION, out_dtype=SUM)
                if GATED:
                    b = _weight_block(W_UP, column, k, stride_w, K, BLOCK_N, BLOCK_K, BY_TMA, WHOLE_K)
                    up = tl.dot(a, b.T, up, input_precision=PRECISION, out_dtype=SUM)
        channels = tl.arange(0, BLOCK_N)
        if X_SCALE is not None:
            row_scale = tl.load(X_SCALE + rows, mask=places < count, other=0.0)[:, None]
            values = values.to(tl.float32) * row_scale * tl.load(SCALE + column + channels)[None, :]
            if GATED:
                up = up.to(tl.float32) * row_scale * tl.load(UP_SCALE + column + channels)[None, :]
        if BIAS is not None:
            values += tl.load(BIAS + column + channels).to(tl.float32)[None, :]
        values = activate(values, ACTIVATION)
        if GATED:
            if UP_BIAS is not None:
                up += tl.load(UP_BIAS + column + channels).to(tl.float32)[None, :]
            values = values * up
        target = rows * stride_out + column
        out = OUT + target[:, None] + channels[None, :]
        tl.store(out, values.to(OUT.dtype.element_ty), mask=(places < count)[:, None])


@GATED_BACKENDS.register("triton")
def gated_activation(both: torch.Tensor, activation: str, mask: torch.Tensor | None) -> torch.Tensor:
    """Return act(gate) * up of `both` = [gate | up], [M, 2 N], zero where `mask` [M, N_G] is given and False."""
    num_rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(num_rows, width)
    raw = None if mask is None else mask.view(torch.uint8)
    _gated_kernel[(num_rows, triton.cdiv(width, 1024))](
        both, out, raw,
        width, 1 if mask is None else width // mask.shape[1],
        both.stride(0), *((0, 0) if raw is None else raw.stride()),
        ACTIVATION=activation, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    BOTH, OUT, MASK, N, G, stride_both, stride_m, stride_g, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < N
    gate = tl.load(BOTH + row * stride_both + channels, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * stride_both + N + channels, mask=inside, other=0.0).to(tl.float32)
    values = activate(gate, ACTIVATION) * up
    if MASK is not None:
        executes = tl.load(MASK + row * stride_m + (channels // G) * stride_g, mask=inside, other=0)
        values = tl.where(executes != 0, values, 0.0)
    tl.store(OUT + row * N + channels, values.to(OUT.dtype.element_ty), mask=inside)
