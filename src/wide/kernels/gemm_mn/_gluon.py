"""GEMM-MN for Hopper: one warp group gathers rows, the others multiply 64 of them each.

A persistent program walks the row tiles that are listed on the device. The producer fills a ring of stages: rows of `x`
by 16-byte asynchronous copies, weights by tensor-memory access. Each consumer owns 64 rows of the tile and its own
accumulator, so a consumer that is still writing does not hold up the other, and rows beyond the count cost nothing.
Where the next product needs zeros in skipped channels, the producer writes some between two stages: it mostly waits.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide.kernels.device import device_facts
from wide.kernels.gemm_mn.tiles import HopperMnTile
from wide.kernels.reorder.tile_list._triton import row_tiles
from wide.kernels.reordering import Reordering

# Rows of a tile: two consumers of 64, what one warp group's product instruction takes.
TILE_ROWS = 128
# Reduction elements of a stage: one 128-byte line of bfloat16 per row.
BLOCK_K = 64
# Channels of a slot: 16 bytes, what one thread writes at once.
SLOT = 8
# Of a thread; without spills, and what the launch's 168 for each of 384 threads allow.
_CONSUMER_REGISTERS = gl.constexpr(216)
_PRODUCER_REGISTERS = gl.constexpr(72)
# Tiles of a program below which the zeros wait for the last of them.
_FEW = gl.constexpr(6)


def gemm_mn(
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
    tile: tuple[int, ...],
) -> torch.Tensor:
    """Run `gemm_mn_reference`; `tile` is a `HopperMnTile`."""
    num_rows, num_groups = x.shape[0], order.counts.numel()
    size = weight.shape[0] // num_groups
    chosen = HopperMnTile(*tile)
    gated = up_weight is not None
    columns = chosen.block_n // 2 if gated else chosen.block_n
    out = x.new_empty((num_rows * num_groups, size) if packed else (num_rows, weight.shape[0]))
    clears = mask is not None
    raw = None if mask is None else mask.view(torch.uint8)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weights = [
        TensorDescriptor.from_tensor(w, [columns, BLOCK_K], layout)
        for w in (weight, weight if up_weight is None else up_weight)
    ]
    tiles, num_tiles = row_tiles(order, TILE_ROWS)
    parts = size // columns
    programs = device_facts(x.device).num_sms
    _gemm_mn_kernel[(programs if clears else min(tiles.shape[0] * parts, programs),)](
        x, *weights, out, weight if bias is None else bias, weight if up_bias is None else up_bias,
        order.index, order.counts, order.offsets, tiles, num_tiles, out if raw is None else raw,
        *x.shape, num_rows * (weight.shape[0] // SLOT), weight.shape[0] // SLOT, x.stride(0), out.stride(0),
        *((0, 0) if raw is None else raw.stride()),
        G=size,
        PARTS=parts,
        BLOCK_N=chosen.block_n,
        STAGES=chosen.num_stages,
        GATED=gated,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        HAS_UP_BIAS=up_bias is not None,
        PACKED=packed,
        WIDE=chosen.wide_stores,
        CLEARS=clears,
        num_warps=4,
    )  # fmt: skip
    return out


@gluon.jit
def _activate(values, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu":
        values = values / (1.0 + gl.exp(-values))
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (values + 0.044715 * values * values * values)
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        values = values / (1.0 + gl.exp(-inner))
    elif ACTIVATION == "relu2":
        values = gl.maximum(values, 0.0)
        values = values * values
    return values


@gluon.jit
def _rows_of(LISTED, places, count, stride_x, ks):
    # Rows beyond the count read row 0 and are never stored. Offsets in 32 bits: the producer has few registers.
    rows = gl.load(LISTED + places, mask=places < count, other=0)
    return gl.expand_dims(rows * stride_x, 1) + gl.expand_dims(ks, 0)


@gluon.jit
def _skipped_slots(
    OUT, MASK, piece, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    # What the mask says of the slots of some pieces (128 each, dealt out to the sharers in turn), and where they are.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    lanes = gl.arange(0, 128 * PIECES, layout=gl.SliceLayout(1, layout))
    slots = (piece + (lanes // 128) * sharers) * 128 + lanes % 128
    rows = slots // slots_per_row
    channels = (slots - rows * slots_per_row) * 8
    places = MASK + rows.to(gl.int64) * stride_m + (channels // G) * stride_g
    # Where there is no slot, nothing is to be cleared.
    executes = gl.load(places, mask=slots < num_slots, other=1)
    return executes, OUT + (rows.to(gl.int64) * stride_out + channels)


@gluon.jit
def _clear(executes, targets):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    slot = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, layout)), 0)
    zeros = gl.zeros((targets.shape[0], 8), targets.dtype.element_ty, layout=layout)
    gl.store(gl.expand_dims(targets, 1) + slot, zeros, mask=gl.expand_dims(executes == 0, 1))


@gluon.jit
def _clear_from(OUT, MASK, piece, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G: gl.constexpr):
    for first in range(piece, (num_slots + 127) // 128, 8 * sharers):
        executes, targets = _skipped_slots(
            OUT, MASK, first, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G, 8
        )  # fmt: skip
        _clear(executes, targets)


@gluon.jit
def _produce(
    X, W, W_UP, OUT, INDEX, COUNTS, TILES, NUM_TILES, MASK, a_ring, b_ring, full, empty, M, K, num_slots, slots_per_row,
    stride_x, stride_out, stride_m, stride_g, G: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, CLEARS: gl.constexpr,
):  # fmt: skip
    # Eight lanes copy the 128 bytes of a row.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    ks = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    num_tiles = gl.load(NUM_TILES) * PARTS
    num_pieces = (num_slots + 127) // 128
    sharers = gl.num_programs(0)
    piece = gl.program_id(0)
    if CLEARS:
        if num_tiles < _FEW * sharers:
            # Nothing between two stages: the zeros of few rows cost less when the products are done.
            piece = num_pieces
        # What the mask says of the next piece is loaded one step ahead, so that nobody waits for it.
        executes, targets = _skipped_slots(
            OUT, MASK, piece, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G, 1
        )  # fmt: skip
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group = gl.load(TILES + 2 * (tile // PARTS))
        places = gl.load(TILES + 2 * (tile // PARTS) + 1) * 128 + lanes
        count = gl.load(COUNTS + group)
        column = group * G + (tile % PARTS) * COLUMNS
        listed = INDEX + group * M
        x0 = _rows_of(listed, places, count, stride_x, ks)
        x1 = _rows_of(listed, places + 64, count, stride_x, ks)
        source = X
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_K * 2)
            b = b_ring.index(stage)
            if GATED:
                tma.async_copy_global_to_shared(W, [column, k], full.index(stage), b.slice(0, COLUMNS, 0))
                tma.async_copy_global_to_shared(W_UP, [column, k], full.index(stage), b.slice(COLUMNS, COLUMNS, 0))
            else:
                tma.async_copy_global_to_shared(W, [column, k], full.index(stage), b)
            async_copy.async_copy_global_to_shared(a_ring.index(stage * 2), source + x0)
            async_copy.async_copy_global_to_shared(a_ring.index(stage * 2 + 1), source + x1)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            source += BLOCK_K
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            # Only pairs that no tile lists are written here, so the order does not matter.
            if CLEARS:  # noqa: SIM102 (the inner condition is the device's)
                if piece < num_pieces:
                    _clear(executes, targets)
                    piece += sharers
                    executes, targets = _skipped_slots(
                        OUT, MASK, piece, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G, 1
                    )  # fmt: skip
    if CLEARS:
        if num_tiles < _FEW * sharers:
            # Those without a tile in the last turn clear everything while the others multiply, if they are enough.
            busy = num_tiles % sharers
            if (sharers - busy) * 8 < sharers:
                busy = 0
            sharers -= busy
            piece = gl.program_id(0) - busy
        if piece >= 0:
            _clear_from(OUT, MASK, piece, sharers, num_slots, slots_per_row, stride_out, stride_m, stride_g, G)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    # Computed afresh in every step: the compiler takes a variable that equals `stage` when a loop starts, and is set to
    # it inside, for one that never changes.
    before = stage - 1
    if stage == 0:
        before = STAGES - 1
    return before


@gluon.jit
def _consume(
    OUT, BIAS, UP_BIAS, INDEX, COUNTS, OFFSETS, TILES, NUM_TILES, a_ring, b_ring, full, empty, M, K, stride_out,
    UNIT: gl.constexpr, G: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_UP_BIAS: gl.constexpr,
    PACKED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_tiles = gl.load(NUM_TILES) * PARTS
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group = gl.load(TILES + 2 * (tile // PARTS))
        first = gl.load(TILES + 2 * (tile // PARTS) + 1) * 128 + UNIT * 64
        count = gl.load(COUNTS + group)
        if first < count:
            total = gl.zeros((64, BLOCK_N), gl.float32, layout=mma)
            for k in range(0, K, BLOCK_K):
                mbarrier.wait(full.index(stage), phase)
                # Rows arrive through the generic proxy, the product reads through the asynchronous one.
                fence_async_shared()
                b = b_ring.index(stage).permute([1, 0])
                total = warpgroup_mma(a_ring.index(stage * 2 + UNIT), b, total, use_acc=k > 0, is_async=True)
                total = warpgroup_mma_wait(1, (total,))
                # The step before is done: its stage may be filled again.
                mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=k > 0)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            total = warpgroup_mma_wait(0, (total,))
            mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
            part = (tile % PARTS) * COLUMNS
            if GATED:
                # Gate column c and up column c lie in the same thread.
                values, up = total.reshape([64, 2, COLUMNS]).permute([0, 2, 1]).split()
            else:
                values = total
            own: gl.constexpr = gl.SliceLayout(0, values.type.layout)
            if HAS_BIAS:
                bias = gl.load(BIAS + group * G + part + gl.arange(0, COLUMNS, layout=own))
                values += gl.expand_dims(bias.to(gl.float32), 0)
            values = _activate(values, ACTIVATION)
            if GATED:
                if HAS_UP_BIAS:
                    bias = gl.load(UP_BIAS + group * G + part + gl.arange(0, COLUMNS, layout=own))
                    up += gl.expand_dims(bias.to(gl.float32), 0)
                values = values * up
            finished = values.to(OUT.dtype.element_ty)
            if WIDE:
                finished = gl.convert_layout(finished, blocked)
            stored: gl.constexpr = finished.type.layout
            places = first + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
            channels = part + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, stored))
            if PACKED:
                rows = gl.load(OFFSETS + group) + places
            else:
                rows = gl.load(INDEX + group * M + places, mask=places < count, other=0)
                channels += group * G
            targets = rows.to(gl.int64) * stride_out
            out = OUT + gl.expand_dims(targets, 1) + gl.expand_dims(channels, 0)
            gl.store(out, finished, mask=gl.expand_dims(places < count, 1))
        else:
            for _ in range(0, K, BLOCK_K):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


# One compilation serves all numbers of rows; strides keep what their divisibility tells.
@gluon.jit(do_not_specialize=["M", "K", "num_slots"])
def _gemm_mn_kernel(
    X, W, W_UP, OUT, BIAS, UP_BIAS, INDEX, COUNTS, OFFSETS, TILES, NUM_TILES, MASK, M, K, num_slots, slots_per_row,
    stride_x, stride_out, stride_m, stride_g, G: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr, PACKED: gl.constexpr, WIDE: gl.constexpr, CLEARS: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = W.block_shape[1]
    a_ring = gl.allocate_shared_memory(W.dtype, [STAGES * 2, 64, BLOCK_K], W.layout)
    b_ring = gl.allocate_shared_memory(W.dtype, [STAGES, BLOCK_N, BLOCK_K], W.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every producer thread arrives when its copies have landed, and once more with the bytes of the weights.
        mbarrier.init(full.index(stage), count=128 + 1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (OUT, BIAS, UP_BIAS, INDEX, COUNTS, OFFSETS, TILES, NUM_TILES, a_ring, b_ring, full, empty, M, K,
                 stride_out, 0, G, PARTS, BLOCK_N, STAGES, GATED, ACTIVATION, HAS_BIAS, HAS_UP_BIAS,
                 PACKED, WIDE),
            ),
            (
                _consume,
                (OUT, BIAS, UP_BIAS, INDEX, COUNTS, OFFSETS, TILES, NUM_TILES, a_ring, b_ring, full, empty, M, K,
                 stride_out, 1, G, PARTS, BLOCK_N, STAGES, GATED, ACTIVATION, HAS_BIAS, HAS_UP_BIAS,
                 PACKED, WIDE),
            ),
            (
                _produce,
                (X, W, W_UP, OUT, INDEX, COUNTS, TILES, NUM_TILES, MASK, a_ring, b_ring, full, empty, M, K,
                 num_slots, slots_per_row, stride_x, stride_out, stride_m, stride_g, G, PARTS, BLOCK_N, STAGES,
                 GATED, CLEARS),
            ),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
