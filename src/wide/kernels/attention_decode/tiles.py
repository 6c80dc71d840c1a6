"""Tile shapes of decode attention and which one a device gets."""

from typing import NamedTuple

from wide.kernels.device import DeviceFacts

_FEW_PAIRS = 16


class DecodeTile(NamedTuple):
    """How the cache of all executing pairs is shared out over programs.

    Args:
        block_n: Keys in one step, the unit in which work is shared out.
        min_blocks: Steps that a program gets at least, so that short caches make few partial results.
        programs_per_sm: Programs that run on one multiprocessor at a time.
        num_warps: Warps of a program.
        num_stages: Depth of the load pipeline over keys.
    """

    block_n: int
    min_blocks: int
    programs_per_sm: int
    num_warps: int
    num_stages: int


def num_splits(num_blocks: int, num_pairs: int, most: int) -> int:
    """Return into how many parts the keys of a pair are cut: a power of two, so that few kernels are compiled.

    Args:
        num_blocks: That keep a device busy.
        num_pairs: Sequences times head units.
        most: Parts that a full cache is worth.
    """
    return 1 << (min(max(1, num_blocks // num_pairs), max(1, most)) - 1).bit_length()


def default_tile(facts: DeviceFacts, head_dim: int, num_pairs: int) -> DecodeTile:
    """Return the tile for a device; the host gets several programs, so that splits are exercised.

    Args:
        facts: Of the device.
        head_dim: d.
        num_pairs: Sequences times KV heads.
    """
    if facts.capability == 0:
        return DecodeTile(block_n=16, min_blocks=2, programs_per_sm=5, num_warps=4, num_stages=1)
    block_n = 64 if head_dim <= 128 else 32
    has_room = facts.shared_memory_bytes >= 160 * 1024
    # Few pairs: half as many programs with twice the keys each measured 16 % faster over 16384 keys.
    programs = 2 if has_room and num_pairs > _FEW_PAIRS else 1
    # Large heads would spill registers on sm_89 and sm_120.
    warps = 4 if has_room or head_dim <= 128 else 8
    return DecodeTile(
        block_n=block_n, min_blocks=2, programs_per_sm=programs, num_warps=warps, num_stages=3 if has_room else 2
    )
