"""Races of one decode step's attention over full caches against the libraries' kernels and our own dense run.

A group of fewer heads than share a KV head splits that head's work: keys and values are then read once for each
executing group of it, which is what the paper calls the step from multi-head to GQA-packed attention. Beside it runs
the way out: read a KV head for all its query heads if any of them executes.

Source: paper, appendix on decoding and attention groups.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.races import BenchRace
from wide.inference.choice.tuning.attention import TOLERANCE, library_attention
from wide.inference.choice.tuning.products import COLD_BYTES, choice_name, exact_mask, normal
from wide.inference.choice.tuning.race import Call, relative
from wide.kernels.attention_decode.op import BACKENDS, DecodeShape, attention_decode
from wide.kernels.tuning import Choice

Tile = tuple[int, ...]
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP_HEADS = (1, 2, 4, 8, 16, 32)
"""Query heads of a group."""
_LONG = ((32, 4096), (8, 32768))
_MORE = ((1, 4096), (1, 32768), (4, 4096))
# Tiles of the Triton kernel (`DecodeTile`) that are worth trying, the likeliest first.
_TILES: tuple[Tile, ...] = (
    (64, 2, 2, 4, 3), (64, 2, 2, 4, 2), (64, 2, 1, 4, 5), (64, 2, 3, 4, 2), (128, 2, 1, 4, 3), (128, 2, 1, 8, 3),
    (128, 2, 2, 8, 2), (32, 2, 3, 4, 4), (32, 2, 4, 4, 3), (64, 2, 2, 8, 3), (64, 2, 3, 2, 2),
)  # fmt: skip


def decode_races(active: float, *, quick: bool, device: torch.device) -> Iterator[BenchRace]:
    """Yield the races of groups of whole KV heads, with several tiles.

    Args:
        active: Share of (sequence, group) pairs that execute.
        quick: Fewer shapes and tiles.
        device: Where.
    """
    for batch, length in _LONG if quick else (*_LONG, *_MORE):
        yield decode_race(batch, length, active, _TILES[:4] if quick else _TILES, device=device)


def decode_race(batch: int, length: int, active: float, tiles: Sequence[Tile], *, device: torch.device) -> BenchRace:
    """Return the race of one step with groups of whole KV heads.

    Args:
        batch: Sequences.
        length: Keys of each.
        active: Share of (sequence, KV head) pairs that execute.
        tiles: To compare beside the default one.
        device: Where.
    """
    mask = exact_mask(batch, KV_HEADS, active=active, device=device)
    return _race(f"decode B={batch} T={length} p={active}", mask, length, active, tiles, _caches(mask, length))


def group_races(active: float, *, quick: bool, device: torch.device) -> Iterator[BenchRace]:
    """Yield the races of groups of 1 to 32 query heads; arguments as of `decode_races`."""
    for batch, length in _LONG[:1] if quick else _LONG:
        masks = [exact_mask(batch, QUERY_HEADS // heads, active=active, device=device) for heads in GROUP_HEADS]
        caches = _caches(masks[-1], length)
        for heads, mask in zip(GROUP_HEADS, masks, strict=True):
            name = f"decode_groups G={heads * HEAD_DIM} B={batch} T={length} p={active}"
            yield _race(name, mask, length, active, (), caches)


def _caches(mask: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Return copies of keys and values, [2, B, H_k, T, d], that no cache of the device holds together."""
    batch = mask.shape[0]
    bytes_read = 2 * 2 * mask.float().mean().item() * batch * KV_HEADS * length * HEAD_DIM
    copies = 1 + math.ceil(COLD_BYTES / max(1.0, bytes_read))
    return [normal(2, batch, KV_HEADS, length, HEAD_DIM, device=mask.device) for _ in range(copies)]


def _race(
    name: str,
    mask: torch.Tensor,
    length: int,
    active: float,
    tiles: Sequence[Tile],
    caches: Sequence[torch.Tensor],
) -> BenchRace:
    batch, num_groups = mask.shape
    heads = QUERY_HEADS // num_groups
    q = normal(batch, QUERY_HEADS, HEAD_DIM, device=mask.device)
    views = [(cache[0].transpose(1, 2), cache[1].transpose(1, 2)) for cache in caches]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=mask.device)
    executing = mask.repeat_interleave(heads, 1)
    needed = executing.view(batch, KV_HEADS, -1).any(2)
    union = needed.float().mean().item()

    def library(which: str, cache: torch.Tensor) -> torch.Tensor:
        return library_attention(which, q[:, :, None], cache[0], cache[1], is_causal=False)[:, :, 0]

    def ours(chosen: torch.Tensor | None, tile: Tile | None = None) -> list[Call]:
        return [partial(attention_decode, q, k, v, lengths, chosen, backend="triton", tile=tile) for k, v in views]

    shape = DecodeShape(q.dtype, HEAD_DIM, QUERY_HEADS // math.lcm(KV_HEADS, num_groups))
    candidates: dict[str, Sequence[Call]] = {
        f"dense {which}": [partial(library, which, cache) for cache in caches] for which in ("cudnn", "flash")
    }
    candidates |= {"dense operator": ours(None), "operator": ours(mask)}
    if num_groups > KV_HEADS:
        candidates["operator, whole KV heads"] = ours(needed)
    candidates |= {
        f"operator {backend}": [partial(attention_decode, q, k, v, lengths, mask, backend=backend) for k, v in views]
        for backend in BACKENDS
        if backend not in ("torch", "triton") and BACKENDS.obstacle(backend, mask.device, shape) is None
    }
    for tile in tiles:
        name_of_tile = choice_name(Choice(backend="triton", tile=tile))
        candidates[name_of_tile] = ours(mask, tile)
        candidates[f"dense {name_of_tile}"] = ours(None, tile)
    facts = {"batch": batch, "length": length, "active": active}
    if name.startswith("decode_groups"):
        facts |= {"group_size": heads * HEAD_DIM, "group_heads": heads, "union": union}
    return BenchRace(
        name=name,
        candidates=candidates,
        wanted=candidates["dense flash"][0],
        error=lambda got, wanted: relative(got[executing], wanted[executing]),
        tolerance=TOLERANCE,
        bytes_moved=union * batch * KV_HEADS * 2 * length * HEAD_DIM * q.element_size(),
        facts=facts,
        # The operator chooses its tile by itself.
        shipped="operator",
    )
