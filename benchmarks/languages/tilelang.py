"""What products in TileLang share."""

from typing import Any


def warp_policy(block_m: int, block_n: int, num_warps: int) -> Any:
    """Return how warps share out the tile of a product."""
    import tilelang.language as T

    # One instruction of sm_90 for 256 columns wants more registers than the compiler grants 512 threads.
    if block_n > 128 and num_warps > 4:
        return T.GemmWarpPolicy.FullCol
    return T.GemmWarpPolicy.FullRow if block_m >= 16 * num_warps else T.GemmWarpPolicy.Square


def activate(value: Any, activation: str) -> Any:
    """Return the activation of a float32 expression of a kernel."""
    import tilelang.language as T

    if activation == "silu":
        return value / (1.0 + T.exp(-value))
    if activation == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        return value / (1.0 + T.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    if activation == "relu2":
        return T.max(value, 0.0) * T.max(value, 0.0)
    return value
