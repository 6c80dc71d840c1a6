"""Dense products with int8 weights in CUDA C++: of few rows as of a step, and on Hopper of int8 rows."""

from typing import Any

import torch

from wide.kernels.device import HALF, HOPPER_STEP, cuda_obstacle
from wide.kernels.gemm_mn._cuda import CLUSTER_TILE, multiply
from wide.kernels.gemv import _cuda as gemv
from wide.kernels.linear_int8.op import BACKENDS, Int8Shape

# Weight rows of the kernel of few rows: of a block of many, or of a gate and what it is multiplied by.
_WIDTH = 2 * gemv.CHANNELS
# Where the Triton kernel was measured faster than clusters.
_THIN_ROWS, _THIN_WIDTH = 64, 8192


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return cuda_obstacle(device, dtype) if dtype == torch.int8 else gemv.obstacle(device, dtype)


def supports(shape: Int8Shape) -> str | None:
    """Return why no device runs a shape, or None."""
    is_int8, step = shape.dtype == torch.int8, 2 * HOPPER_STEP
    if _is_small(shape) or (is_int8 and shape.width % CLUSTER_TILE[1] == 0 and shape.depth % step == 0):
        thin = gemv.MAX_ROWS < shape.rows <= _THIN_ROWS and shape.width < _THIN_WIDTH
        return "so few rows and channels leave most multiprocessors without work" if thin else None
    return (
        f"the kernels in CUDA C++ take up to {gemv.MAX_ROWS} rows, N a multiple of {_WIDTH} and K of {gemv.PIECE}, and "
        f"more int8 rows, N a multiple of {CLUSTER_TILE[1]} and K of {step}; got {shape.rows} rows in {shape.dtype}, "
        f"N={shape.width}, K={shape.depth}"
    )


def _is_small(shape: Int8Shape) -> bool:
    """Return whether the kernel of few rows takes a shape: it reads weights with all multiprocessors."""
    fits = shape.dtype in (*HALF, torch.int8) and shape.width % _WIDTH == 0 and shape.depth % gemv.PIECE == 0
    return fits and shape.rows <= gemv.MAX_ROWS


@BACKENDS.register("cuda", needs=_obstacle, supports=supports)
def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rotation: torch.Tensor | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """Run `linear_int8_reference`."""
    is_small = _is_small(Int8Shape(x.shape[0], x.dtype, *weight.shape))
    options: dict[str, Any] = {"bias": bias, "scale": scale}
    if gate is not None:
        half = weight.shape[0] // 2
        options |= {"up_weight": weight[half:], "up_scale": scale[half:], "activation": gate, "scale": scale[:half]}
        if bias is not None:
            options |= {"bias": bias[:half], "up_bias": bias[half:]}
        weight = weight[:half]
    if x_scale is not None:
        options |= {"x_scale": x_scale, "dtype": dtype}
    return (
        gemv.gemv_mn(x, weight, None, rotation=rotation, **options)
        if is_small
        else multiply(x, weight, None, **options)
    )
