"""Tile shapes of prefill attention and which one a device gets."""

from dataclasses import dataclass

from wide.kernels.device import DeviceFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTile:
    """How one program of prefill attention is cut.

    Args:
        block_m: Rows (tokens x heads of a unit) that a program owns.
        block_n: Keys in one step.
        num_warps: Warps of a program.
        num_stages: Depth of the load pipeline over keys.
        uses_tma: Whether K and V are read through tensor descriptors (sm_90 and newer).
        is_warp_specialized: Whether loads run in a warp of their own; needs `uses_tma`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    uses_tma: bool = False
    is_warp_specialized: bool = False


def default_tile(facts: DeviceFacts, head_dim: int) -> PrefillTile:
    """Return the tile for a device and head size; the host's is small because the interpreter is slow."""
    if facts.capability == 0:
        return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if facts.shared_memory_bytes < 160 * 1024:
        if head_dim > 128:
            return PrefillTile(block_m=64, block_n=32, num_warps=4, num_stages=2)
        return PrefillTile(block_m=128, block_n=64 if head_dim <= 96 else 32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillTile(block_m=128, block_n=64 if facts.capability >= 90 else 32, num_warps=8, num_stages=2)
    if facts.capability < 90:
        return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3)
    return PrefillTile(block_m=128, block_n=128, num_warps=8, num_stages=2)
