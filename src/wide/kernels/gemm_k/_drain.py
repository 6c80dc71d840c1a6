"""Writes a finished float32 sum to the output; the last step of every kernel that reduces."""

import torch
import triton
import triton.language as tl


def drain(total: torch.Tensor, out: torch.Tensor, column: int, bias: torch.Tensor | None, *, clears: bool) -> None:
    """Write float32 columns (plus bias) to columns of `out` from `column` on; optionally leave zeros behind."""
    num_rows, num_columns = total.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(num_columns, block))
    _drain_kernel[grid](
        total,
        out,
        out if bias is None else bias,
        num_rows,
        num_columns,
        column,
        total.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        CLEARS=clears,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _drain_kernel(
    TOTAL,
    OUT,
    BIAS,
    M,
    N,
    first_column,
    stride_total,
    stride_out,
    HAS_BIAS: tl.constexpr,
    CLEARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    places = TOTAL + rows.to(tl.int64)[:, None] * stride_total + columns[None, :]
    values = tl.load(places, mask=inside, other=0.0)
    if CLEARS:
        # The compiler may give load and store different threads: without this, one clears what another has yet to read.
        tl.debug_barrier()
        tl.store(places, tl.zeros_like(values), mask=inside)
    if HAS_BIAS:
        values += tl.load(BIAS + first_column + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out = OUT + rows.to(tl.int64)[:, None] * stride_out + (first_column + columns)[None, :]
    tl.store(out, values.to(OUT.dtype.element_ty), mask=inside)
