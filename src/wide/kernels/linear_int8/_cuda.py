"""Dense products of int8 rows and weights on Hopper: the kernel of GEMM-MN with nothing skipped."""

import torch

from wide.kernels.device import cuda_obstacle, hopper_step
from wide.kernels.gemm_mn._cuda import CLUSTER_TILE, multiply
from wide.kernels.linear_int8.op import BACKENDS, Int8Shape


def supports(shape: Int8Shape) -> str | None:
    """Return why no device runs a shape, or None."""
    step = hopper_step(torch.int8)
    if shape.dtype == torch.int8 and shape.width % CLUSTER_TILE[1] == 0 and step and shape.depth % step == 0:
        return None
    return (
        f"the kernel in CUDA C++ wants int8 rows, N a multiple of {CLUSTER_TILE[1]} and K of {step}; got "
        f"{shape.dtype}, N={shape.width}, K={shape.depth}"
    )


@BACKENDS.register("cuda", needs=cuda_obstacle, supports=supports)
def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run `linear_int8_reference`."""
    return multiply(x, weight, None, bias=bias, x_scale=x_scale, scale=scale, dtype=dtype)
