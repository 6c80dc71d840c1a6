"""Tiles of the Triton kernel for many rows."""

from typing import NamedTuple

from wide.kernels.device import DeviceFacts

SMALLEST_BLOCK = 16
_SMALL_SHARED_MEMORY = (89, 120)


class RouteTile(NamedTuple):
    """Tile of the Triton kernel.

    Args:
        block_m: Rows.
        block_k: Channels of a pipeline stage.
        block_g: Groups decided at a time.
        num_warps: Warps of a program.
        num_stages: Pipeline stages.
    """

    block_m: int
    block_k: int
    block_g: int
    num_warps: int
    num_stages: int


def default_tile(facts: DeviceFacts, num_rows: int) -> RouteTile:
    """Return the largest tile that still gives most multiprocessors rows of their own."""
    block_m = next((b for b in (128, 64, 32) if num_rows >= b * facts.num_sms * 3 // 4), SMALLEST_BLOCK)
    # Only warp-group products leave registers for 64 groups at a time.
    block_g = 64 if facts.capability in (90, 100, 103) else 32
    if facts.capability in _SMALL_SHARED_MEMORY:
        return RouteTile(min(block_m, 64), 64, block_g, 4, 3)
    return RouteTile(block_m, 128, block_g, 4 if block_m <= 64 else 8, 4 if block_m <= 64 else 3)
