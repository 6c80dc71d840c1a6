"""Tile shapes of prefill attention and which one a device gets."""

from typing import NamedTuple

import torch

from wide.kernels.device import DeviceFacts

_TMA_CAPABILITIES = (90, 100)
# Bytes that a block may use on data-centre parts, but not on sm_89 and sm_120.
_LARGE_SHARED_MEMORY = 160 * 1024


class PrefillTile(NamedTuple):
    """How one program of prefill attention is cut.

    Args:
        block_m: Rows (tokens x heads of a unit) that a program owns.
        block_n: Keys in one step.
        num_warps: Warps of a program.
        num_stages: Depth of the load pipeline over keys.
        uses_tma: 1 if K and V are read through tensor descriptors (sm_90 and newer), else 0.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    uses_tma: int = 0


def can_use_tma(facts: DeviceFacts, tensor: torch.Tensor) -> bool:
    """Return whether K or V can be read through a tensor descriptor: 16-byte steps, on a device that has them."""
    steps = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    return facts.capability in _TMA_CAPABILITIES and tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in steps)


def default_tile(facts: DeviceFacts, head_dim: int, *, uses_tma: bool) -> PrefillTile:
    """Return the largest tile that does not spill on the device; the host's is small for the interpreter's sake."""
    if facts.capability == 0:
        return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if facts.capability < 90 or facts.shared_memory_bytes < _LARGE_SHARED_MEMORY:
        if head_dim > 128:
            return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=2)
        if facts.shared_memory_bytes < _LARGE_SHARED_MEMORY:
            block_m, block_n = (128, 64) if head_dim <= 64 else (64, 32)
            return PrefillTile(block_m=block_m, block_n=block_n, num_warps=8, num_stages=2)
        return PrefillTile(block_m=128, block_n=64 if head_dim <= 64 else 32, num_warps=8, num_stages=3)
    if head_dim > 128:
        # Tensor memory of sm_100 holds what the registers of sm_90 do not.
        if facts.capability >= 100 and uses_tma:
            return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=2, uses_tma=True)
        return PrefillTile(block_m=128, block_n=32, num_warps=8, num_stages=2)
    if uses_tma:
        # A third stage measured 12 % faster on sm_90; sm_100 keeps more of its shared memory to itself.
        return PrefillTile(
            block_m=128, block_n=128, num_warps=8, num_stages=3 if facts.capability == 90 else 2, uses_tma=True
        )
    return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3)
