"""Tile shapes of the decode GEMMs and which one a device gets."""

from typing import NamedTuple

from wide.kernels.device import DeviceFacts


class GemvTile(NamedTuple):
    """How one program of a decode GEMM is cut.

    Args:
        block_n: Output channels that a program owns; cut down to a divisor of the group where groups lie along them.
        block_k: Input channels in one step; a power of two. Along the K-axis, as many have their weights under way
            at once.
        num_warps: Warps of a program.
    """

    block_n: int
    block_k: int
    num_warps: int


def default_mn_tile(facts: DeviceFacts, *, is_gated: bool) -> GemvTile:
    """Return the N-axis tile for a device; small ones, so that many programs keep many loads in flight.

    Args:
        facts: Of the device.
        is_gated: Whether two products run side by side.
    """
    if facts.capability == 0:
        return GemvTile(block_n=8, block_k=64, num_warps=4)
    return GemvTile(block_n=2 if is_gated else 4, block_k=2048, num_warps=4)


def default_k_tile(facts: DeviceFacts, *, is_long: bool) -> GemvTile:
    """Return the K-axis tile for a device.

    Args:
        facts: Of the device.
        is_long: Whether a program's sum takes many steps, as that of a down projection does.
    """
    if facts.capability == 0:
        return GemvTile(block_n=8, block_k=64, num_warps=4)
    return GemvTile(block_n=2, block_k=1024, num_warps=1) if is_long else GemvTile(block_n=4, block_k=1024, num_warps=2)
