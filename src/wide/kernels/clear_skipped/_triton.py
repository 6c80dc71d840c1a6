"""Zeros for skipped groups in Triton: the mask is all that is read, and executing channels are not touched."""

import torch
import triton
import triton.language as tl

from wide.kernels.clear_skipped.op import BACKENDS
from wide.kernels.device import elementwise_obstacle

# Values that a program looks after, and the most (row, group) pairs and channels of a step that these are.
_VALUES, _MAX_PAIRS, _MAX_CHANNELS = 16384, 256, 512


@triton.jit(do_not_specialize=["num_pairs"])
def _clear_skipped(
    OUT, MASK,
    num_pairs, N_G,
    stride_out, stride_mask_m, stride_mask_g,
    G: tl.constexpr, PAIRS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    rows = (pairs // N_G).to(tl.int64)
    groups = pairs % N_G
    places = MASK + rows * stride_mask_m + groups * stride_mask_g
    executes = tl.load(places, mask=pairs < num_pairs, other=1).to(tl.int32)
    # Where everything executes, nothing but the mask costs anything.
    if tl.min(executes, 0) == 0:
        out = OUT + rows * stride_out + groups * G
        zeros = tl.zeros((PAIRS, BLOCK_C), OUT.dtype.element_ty)
        for column in range(0, G, BLOCK_C):
            channels = column + tl.arange(0, BLOCK_C)
            skipped = (executes == 0)[:, None]
            if G % BLOCK_C != 0:
                skipped = skipped & (channels < G)[None, :]
            tl.store(out[:, None] + channels[None, :], zeros, mask=skipped)


@BACKENDS.register("triton", needs=elementwise_obstacle)
def clear_skipped(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Clear in one kernel."""
    num_rows, num_groups = mask.shape
    size = values.shape[1] // num_groups
    block = min(triton.next_power_of_2(size), _MAX_CHANNELS)
    pairs = min(_VALUES // block, _MAX_PAIRS)
    raw = mask.view(torch.uint8)
    _clear_skipped[(triton.cdiv(num_rows * num_groups, pairs),)](
        values, raw,
        num_rows * num_groups, num_groups,
        values.stride(0), *raw.stride(),
        G=size, PAIRS=pairs, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
