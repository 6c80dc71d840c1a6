"""What the attention and decode bench runs: inputs of Llama-3.1-8B shape, dense peers, and tiles to compare."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from wide.inference.measured import LayerSizes, attention_case
from wide.kernels.attention_decode import attention_decode
from wide.kernels.attention_decode.tiles import DecodeTile
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.attention_prefill.tiles import HopperTile, PrefillTile
from wide.kernels.contract import Case
from wide.kernels.device import hopper_obstacle
from wide.kernels.reorder import reorder_sequences
from wide.kernels.tuning import Choice

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, FFN = 4096, 14336
ATTENTION_GROUP = 512
# Copies of caches and weights rotate through more bytes of executing data than any second-level cache holds.
COLD_BYTES = 192 * 1024**2

Call = Callable[[], torch.Tensor]
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Candidates that compute the same thing on executing places.

    Args:
        name: For example 'prefill T=16384 p=0.5'.
        candidates: For each candidate one call per copy of the data; names that start with 'dense' are peers.
        wanted: Makes the result that all are compared with.
        executes: Places to compare, bool, of the result's shape; None = all.
        flop: Operations of executing pairs.
        bytes_moved: Bytes of executing data.
        facts: Shape and mask, for the records.
        operator: Name under which the fastest choice is kept; empty keeps nothing.
        case: The shape under which it is kept.
        choices: What a candidate stands for, by its name.
    """

    name: str
    candidates: dict[str, Sequence[Call]]
    wanted: Call
    executes: torch.Tensor | None
    flop: float
    bytes_moved: float
    facts: dict[str, float] = field(default_factory=dict)
    operator: str = ""
    case: Case | None = None
    choices: dict[str, Choice] = field(default_factory=dict)


_HALF = [(4096, 0.5), (16384, 0.5)]
SIZES = LayerSizes(
    hidden_size=HIDDEN,
    query_width=QUERY_HEADS * HEAD_DIM,
    head_dim=HEAD_DIM,
    num_kv_heads=KV_HEADS,
    attention_groups=KV_HEADS,
    ffn_width=FFN,
    ffn_groups=FFN // 128,
    is_gated=True,
    is_stacked=True,
)


def choices_of(dense: Iterable[str], tiles: Sequence[tuple[int, ...]]) -> dict[str, Choice]:
    """Return what candidates stand for in a tuning table: the dense peers by name, and the tiles."""
    found = {
        tile_name(tile): Choice(
            backend="gluon" if isinstance(tile, HopperTile) else "triton", tile=tuple(int(value) for value in tile)
        )
        for tile in tiles
    }
    return {**dict.fromkeys(dense, Choice(backend="dense")), **found}


def half_mask(*shape: int, active: float) -> torch.Tensor:
    """Return a random bool mask with exactly the wanted share of True over all entries, rounded."""
    generator = torch.Generator(device="cuda").manual_seed(17)
    count = math.prod(shape)
    order = torch.randperm(count, generator=generator, device="cuda")
    return (order < round(active * count)).view(shape)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 noise on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS[backend]):
        shares = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shares)


def sdpa_step(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of one query a sequence, [B, H_q, d], over keys and values [B, H_k, T, d] by a library."""
    return _sdpa(backend, q[:, :, None], k, v, is_causal=False)[:, :, 0]


def _token_major_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _sdpa("flash", q, k, v, is_causal=True).transpose(1, 2)


def _reorder_and_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, backend: str
) -> torch.Tensor:
    tile = _HOPPER_TILES[0] if backend == "gluon" else None
    return attention_prefill(q, k, v, reorder_sequences(mask, backend="triton"), backend=backend, tile=tile)


PREFILL_TILES = (
    PrefillTile(block_m=128, block_n=128, num_warps=8, num_stages=2, uses_tma=True),
    PrefillTile(block_m=128, block_n=128, num_warps=8, num_stages=3, uses_tma=True),
    PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3, uses_tma=True),
    PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=4, uses_tma=True),
    PrefillTile(block_m=64, block_n=128, num_warps=4, num_stages=2, uses_tma=True),
    PrefillTile(block_m=64, block_n=64, num_warps=4, num_stages=3, uses_tma=True),
    PrefillTile(block_m=128, block_n=64, num_warps=4, num_stages=2, uses_tma=True),
    PrefillTile(block_m=128, block_n=128, num_warps=8, num_stages=2),
    PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3),
    PrefillTile(block_m=64, block_n=64, num_warps=4, num_stages=3),
)


_HOPPER_TILES = (
    HopperTile(block_n=128, num_stages=2, takes_turns=0),
    HopperTile(block_n=128, num_stages=2, takes_turns=1),
    HopperTile(block_n=64, num_stages=4, takes_turns=0),
)


def tile_name(tile: tuple[int, ...]) -> str:
    """Return the name of a candidate with a tile."""
    return ("tile hopper " if isinstance(tile, HopperTile) else "tile ") + "-".join(str(int(value)) for value in tile)


def prefill_races(*, quick: bool, only: tuple[int, float] | None = None) -> Iterator[Race]:
    """Time causal prefill attention of one sequence against SDPA; the reordering is charged in 'operator'."""
    shapes = _HALF if quick else [(1024, 0.5), *_HALF, (4096, 0.34), (16384, 0.34)]
    shapes = shapes if only is None else [(length, only[1]) for length, _ in _HALF]
    for length, active in shapes:
        yield prefill_race(length, active, PREFILL_TILES[:4] if quick else PREFILL_TILES)


def prefill_race(length: int, active: float, tiles: Sequence[PrefillTile], *, sizes: LayerSizes | None = None) -> Race:
    """Return the race of one sequence of `length` tokens.

    Args:
        length: Tokens.
        active: Share of (token, group) pairs that execute.
        tiles: To compare, with the order known; empty compares the default tiles alone.
        sizes: Of the layer; None takes Llama-3.1-8B's.
    """
    heads, kv_heads, groups, head_dim = _heads(sizes)
    q = normal(1, length, heads, head_dim)
    k, v = normal(1, length, kv_heads, head_dim), normal(1, length, kv_heads, head_dim)
    mask = half_mask(1, length, groups, active=active)
    order = reorder_sequences(mask, backend="triton")
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    repeated = [heads_first[0], *(t.repeat_interleave(heads // kv_heads, 1) for t in heads_first[1:])]
    dense = reorder_sequences(torch.ones_like(mask), backend="triton")
    candidates: dict[str, Sequence[Call]] = {
        "dense cudnn": [partial(_sdpa, "cudnn", *heads_first, is_causal=True)],
        "dense flash": [partial(_sdpa, "flash", *heads_first, is_causal=True)],
        "operator, reorder charged": [partial(_reorder_and_attend, q, k, v, mask, "triton")],
    }
    every: tuple[PrefillTile | HopperTile, ...] = tuple(tiles)
    is_hopper = hopper_obstacle(q.device) is None
    if is_hopper:
        candidates["hopper, reorder charged"] = [partial(_reorder_and_attend, q, k, v, mask, "gluon")]
    if tiles:
        candidates["dense cudnn, repeated KV"] = [partial(_sdpa, "cudnn", *repeated, is_causal=True)]
        candidates["operator, nothing skipped"] = [partial(attention_prefill, q, k, v, dense, backend="triton")]
        every += _HOPPER_TILES if is_hopper else ()
    for tile in every:
        backend = "gluon" if isinstance(tile, HopperTile) else "triton"
        candidates[tile_name(tile)] = [partial(attention_prefill, q, k, v, order, backend=backend, tile=tile)]
    return Race(
        name=f"prefill T={length} p={active}",
        candidates=candidates,
        wanted=partial(_token_major_flash, *repeated),
        executes=mask.repeat_interleave(heads // groups, 2),
        flop=active * 2.0 * length * (length + 1) * heads * head_dim,
        bytes_moved=0.0,
        facts={"length": length, "active": active},
        operator="attention_prefill",
        case=attention_case(sizes or SIZES, length, active),
        choices=choices_of(("dense cudnn", "dense flash"), every),
    )


def _heads(sizes: LayerSizes | None) -> tuple[int, int, int, int]:
    """Return query heads, KV heads, groups and channels of a head."""
    if sizes is None:
        return QUERY_HEADS, KV_HEADS, KV_HEADS, HEAD_DIM
    return sizes.query_width // sizes.head_dim, sizes.num_kv_heads, sizes.attention_groups, sizes.head_dim


_DECODE_TILES = tuple(
    DecodeTile(block_n=n, min_blocks=2, programs_per_sm=p, num_warps=w, num_stages=s)
    for n, p, w, s in (
        (64, 2, 4, 3),
        (64, 2, 4, 2),
        (64, 1, 4, 5),
        (64, 3, 4, 2),
        (128, 1, 4, 3),
        (128, 1, 8, 3),
        (128, 2, 8, 2),
        (32, 3, 4, 4),
        (32, 4, 4, 3),
        (64, 2, 8, 3),
        (64, 3, 2, 2),
    )
)


def decode_races(*, quick: bool, only: tuple[int, float] | None = None) -> Iterator[Race]:
    """Time decode attention over full caches, [B, H_k, T, d] in memory, against SDPA and our own dense run."""
    shapes = [(32, 4096), (8, 32768)] if quick else [(32, 4096), (8, 32768), (1, 4096), (1, 32768), (4, 4096)]
    active = 0.5 if only is None else only[1]
    for batch, length in shapes:
        yield decode_race(batch, length, active, _DECODE_TILES[:4] if quick else _DECODE_TILES)


def decode_race(batch: int, length: int, active: float, tiles: Sequence[DecodeTile]) -> Race:
    """Return the race of one step.

    Args:
        batch: Sequences.
        length: Keys of each.
        active: Share of (sequence, KV head) pairs that execute.
        tiles: To compare beside the default one.
    """
    pair_bytes = 2 * length * HEAD_DIM * 2
    mask = half_mask(batch, KV_HEADS, active=active)
    active_bytes = int(mask.sum()) * pair_bytes
    copies = max(1, math.ceil(COLD_BYTES / active_bytes))
    q = normal(batch, QUERY_HEADS, HEAD_DIM)
    caches = [normal(2, batch, KV_HEADS, length, HEAD_DIM) for _ in range(copies)]
    views = [tuple(c.transpose(1, 2) for c in cache) for cache in caches]
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def dense(backend: str) -> list[Call]:
        return [partial(sdpa_step, backend, q, c[0], c[1]) for c in caches]

    def ours(chosen: torch.Tensor | None, tile: DecodeTile | None = None) -> list[Call]:
        return [partial(attention_decode, q, k, v, lengths, chosen, backend="triton", tile=tile) for k, v in views]

    candidates: dict[str, Sequence[Call]] = {
        "dense cudnn": dense("cudnn"),
        "dense flash": dense("flash"),
        "dense operator": ours(None),
        "operator": ours(mask),
    }
    for tile in tiles:
        candidates[tile_name(tile)] = ours(mask, tile)
        candidates["dense " + tile_name(tile)] = ours(None, tile)
    return Race(
        name=f"decode B={batch} T={length} p={active}",
        candidates=candidates,
        wanted=dense("flash")[0],
        executes=mask.repeat_interleave(QUERY_HEADS // KV_HEADS, 1),
        flop=0.0,
        bytes_moved=active_bytes,
        facts={"batch": batch, "length": length, "active": active},
    )
