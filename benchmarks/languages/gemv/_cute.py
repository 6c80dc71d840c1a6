"""GEMMs of one to four rows on CuTe (gemv_cute.cu): one launch, weights that no row needs are not read."""

from pathlib import Path

import torch

from benchmarks.languages.cute import cute_obstacle, function
from wide.kernels.device import HALF
from wide.kernels.dispatch import largest_tile, require
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemv.op import K_BACKENDS, MN_BACKENDS, GemvShape
from wide.kernels.native.launch import misaligned

SOURCE = Path(__file__).with_name("gemv_cute.cu")
_CHANNELS = 2


def variant(dtype: torch.dtype, num_rows: int, *, along_k: bool, gated: bool = False, size: int = 0) -> dict[str, int]:
    """Return what is compiled in for a shape.

    Args:
        dtype: Of rows and weights.
        num_rows: M.
        along_k: Whether groups lie along the input.
        gated: Whether gate and up are multiplied together.
        size: Channels of a group along the output.
    """
    channels = _CHANNELS if along_k else largest_tile(size, _CHANNELS)
    half = int(dtype == torch.float16)
    return {"FLOAT16": half, "ALONG_K": int(along_k), "GATED": int(gated), "NUM_ROWS": num_rows, "CHANNELS": channels}


def supports(shape: GemvShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.size % 8 == 0:
        return None
    return (
        f"the kernel on CuTe wants half precision and multiples of 8 input channels, got {shape.dtype} and {shape.size}"
    )


@MN_BACKENDS.register("cute", needs=cute_obstacle, supports=supports)
def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    zero_skipped: bool,
) -> torch.Tensor:
    """Run `gemv_mn_reference` in one kernel."""
    require(misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias)))
    out = x.new_empty(x.shape[0], weight.shape[0])
    size = weight.shape[0] // mask.shape[1]
    compiled = variant(x.dtype, x.shape[0], along_k=False, gated=up_weight is not None, size=size)
    weights = weight, up_weight, bias, up_bias
    function(SOURCE, x.device, **compiled)(x, *weights, mask, out, ACTIVATIONS.index(activation), zero_skipped)
    return out


@K_BACKENDS.register("cute", needs=cute_obstacle, supports=supports)
def gemv_k(h: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, *, bias: torch.Tensor | None) -> torch.Tensor:
    """Run `gemv_k_reference` in one kernel."""
    require(misaligned({"h": h, "weight": weight}, (bias,)))
    out = h.new_empty(h.shape[0], weight.shape[0])
    run = function(SOURCE, h.device, **variant(h.dtype, h.shape[0], along_k=True))
    run(h, weight, None, bias, None, mask, out, 0, False)
    return out
