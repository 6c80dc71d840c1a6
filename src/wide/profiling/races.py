"""What the attention and decode bench runs: inputs of Llama-3.1-8B shape, dense peers, and tiles to compare."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from wide.kernels.attention_decode import attention_decode
from wide.kernels.attention_decode.tiles import DecodeTile
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.attention_prefill.tiles import HopperTile, PrefillTile
from wide.kernels.contract import Case
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.gemv.tiles import GemvTile
from wide.kernels.measured import LayerSizes, attention_case, gemv_case
from wide.kernels.operator_table import OperatorName
from wide.kernels.reorder import reorder_sequences
from wide.kernels.tuning import Choice

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, FFN = 4096, 14336
ATTENTION_GROUP = 512
# Copies of caches and weights rotate through more bytes of executing data than any second-level cache holds.
_COLD_BYTES = 192 * 1024**2

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
_SIZES = LayerSizes(
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


def _sizes(group_size: int) -> LayerSizes:
    """Return the shapes with other groups in the FFN (512 is the attention's own)."""
    return _SIZES if group_size == ATTENTION_GROUP else dataclasses.replace(_SIZES, ffn_groups=FFN // group_size)


def _choices(dense: str, tiles: Sequence[PrefillTile | HopperTile | GemvTile]) -> dict[str, Choice]:
    """Return what candidates stand for in a tuning table."""
    found = {
        _name(tile): Choice(
            backend="gluon" if isinstance(tile, HopperTile) else "triton", tile=tuple(int(value) for value in tile)
        )
        for tile in tiles
    }
    return {dense: Choice(backend="dense"), **found}


def half_mask(*shape: int, active: float) -> torch.Tensor:
    """Return a random bool mask with exactly the wanted share of True over all entries, rounded."""
    generator = torch.Generator(device="cuda").manual_seed(17)
    count = math.prod(shape)
    order = torch.randperm(count, generator=generator, device="cuda")
    return (order < round(active * count)).view(shape)


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS[backend]):
        shares = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shares)


def _sdpa_step(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _sdpa(backend, q[:, :, None], k, v, is_causal=False)[:, :, 0]


def _token_major_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _sdpa("flash", q, k, v, is_causal=True).transpose(1, 2)


def _reorder_and_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention_prefill(q, k, v, reorder_sequences(mask, backend="triton"), backend="triton")


def _matrix_vector(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.mv(weight, x[0])[None]


_PREFILL_TILES = (
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


def _name(tile: tuple[int, ...]) -> str:
    return ("tile hopper " if isinstance(tile, HopperTile) else "tile ") + "-".join(str(int(value)) for value in tile)


def prefill_races(*, quick: bool, only: tuple[int, float] | None = None) -> Iterator[Race]:
    """Time causal prefill attention of one sequence against SDPA; the reordering is charged in 'operator'."""
    shapes = _HALF if quick else [(1024, 0.5), *_HALF, (4096, 0.34), (16384, 0.34)]
    shapes = shapes if only is None else [(length, only[1]) for length, _ in _HALF]
    for length, active in shapes:
        q = _normal(1, length, QUERY_HEADS, HEAD_DIM)
        k, v = _normal(1, length, KV_HEADS, HEAD_DIM), _normal(1, length, KV_HEADS, HEAD_DIM)
        mask = half_mask(1, length, KV_HEADS, active=active)
        order = reorder_sequences(mask, backend="triton")
        heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        repeated = [heads_first[0], *(t.repeat_interleave(4, 1) for t in heads_first[1:])]
        dense = reorder_sequences(torch.ones_like(mask), backend="triton")
        candidates: dict[str, Sequence[Call]] = {
            "dense cudnn": [partial(_sdpa, "cudnn", *heads_first, is_causal=True)],
            "dense cudnn, repeated KV": [partial(_sdpa, "cudnn", *repeated, is_causal=True)],
            "dense flash": [partial(_sdpa, "flash", *heads_first, is_causal=True)],
            "operator, reorder charged": [partial(_reorder_and_attend, q, k, v, mask)],
            "operator, nothing skipped": [partial(attention_prefill, q, k, v, dense, backend="triton")],
        }
        tiles: tuple[PrefillTile | HopperTile, ...] = _PREFILL_TILES[:4] if quick else _PREFILL_TILES
        if hopper_obstacle(q.device) is None:
            tiles += _HOPPER_TILES
        for tile in tiles:
            backend = "gluon" if isinstance(tile, HopperTile) else "triton"
            candidates[_name(tile)] = [partial(attention_prefill, q, k, v, order, backend=backend, tile=tile)]
        yield Race(
            name=f"prefill T={length} p={active}",
            candidates=candidates,
            wanted=partial(_token_major_flash, *repeated),
            executes=mask.repeat_interleave(QUERY_HEADS // KV_HEADS, 2),
            flop=active * 2.0 * length * (length + 1) * QUERY_HEADS * HEAD_DIM,
            bytes_moved=0.0,
            facts={"length": length, "active": active},
            operator="attention_prefill",
            case=attention_case(_SIZES, length, active),
            choices=_choices("dense cudnn", tiles),
        )


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
        pair_bytes = 2 * length * HEAD_DIM * 2
        mask = half_mask(batch, KV_HEADS, active=active)
        active_bytes = int(mask.sum()) * pair_bytes
        copies = max(1, math.ceil(_COLD_BYTES / active_bytes))
        q = _normal(batch, QUERY_HEADS, HEAD_DIM)
        caches = [_normal(2, batch, KV_HEADS, length, HEAD_DIM) for _ in range(copies)]
        views = [tuple(c.transpose(1, 2) for c in cache) for cache in caches]
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")

        def dense(backend: str, q: torch.Tensor = q, caches: list[torch.Tensor] = caches) -> list[Call]:
            return [partial(_sdpa_step, backend, q, c[0], c[1]) for c in caches]

        def ours(
            mask: torch.Tensor | None,
            tile: DecodeTile | None = None,
            q: torch.Tensor = q,
            views: Any = views,
            lengths: torch.Tensor = lengths,
        ) -> list[Call]:
            return [partial(attention_decode, q, k, v, lengths, mask, backend="triton", tile=tile) for k, v in views]

        candidates: dict[str, Sequence[Call]] = {
            "dense cudnn": dense("cudnn"),
            "dense flash": dense("flash"),
            "dense operator": ours(None),
            "operator": ours(mask),
        }
        for tile in _DECODE_TILES[:4] if quick else _DECODE_TILES:
            candidates[_name(tile)] = ours(mask, tile)
            candidates["dense " + _name(tile)] = ours(None, tile)
        yield Race(
            name=f"decode B={batch} T={length} p={active}",
            candidates=candidates,
            wanted=dense("flash")[0],
            executes=mask.repeat_interleave(QUERY_HEADS // KV_HEADS, 1),
            flop=0.0,
            bytes_moved=active_bytes,
            facts={"batch": batch, "length": length, "active": active},
        )


_GEMV_TILES = tuple(
    GemvTile(block_n=n, block_k=k, num_warps=w)
    for n, k, w in (
        (4, 2048, 4),
        (2, 4096, 4),
        (4, 1024, 2),
        (2, 1024, 2),
        (2, 2048, 4),
        (4, 1024, 4),
        (2, 1024, 1),
        (1, 2048, 2),
        (2, 512, 1),
        (4, 512, 1),
        (4, 2048, 8),
        (8, 512, 2),
        (8, 1024, 4),
        (4, 4096, 8),
        (1, 4096, 4),
    )
)


def gemv_races(*, quick: bool, only: tuple[int, float] | None = None) -> Iterator[Race]:
    """Time the decode GEMMs against cuBLAS, on rotating copies of the weights."""
    tiles = _GEMV_TILES[:11] if quick else _GEMV_TILES
    for num_rows in (1,) if quick else (1, 2, 4):
        size, active = only or (128, 0.5)
        yield _mn_race("gate_up", num_rows, FFN, size, active, tiles)
        yield _mn_race("query", num_rows, HIDDEN, 512, active, tiles)
        yield _k_race("down", num_rows, FFN, size, active, tiles)
        yield _k_race("output", num_rows, HIDDEN, 512, active, tiles)


def _weights(parts: int, width: int, width_in: int, active: float) -> list[torch.Tensor]:
    copies = max(4, math.ceil(_COLD_BYTES / (2 * active * parts * width * width_in)))
    return [_normal(parts * width, width_in, scale=width_in**-0.5) for _ in range(copies)]


def _cublas(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Sequence[Call]]:
    peers: dict[str, Sequence[Call]] = {"dense cublas": [partial(linear, x, w) for w in weights]}
    if x.shape[0] == 1:
        peers["dense cublas, matrix-vector"] = [partial(_matrix_vector, w, x) for w in weights]
    return peers


def _mn_race(
    name: OperatorName, num_rows: int, width: int, size: int, active: float, tiles: Sequence[GemvTile]
) -> Race:
    width_in, is_gated = HIDDEN, name == "gate_up"
    mask = half_mask(num_rows, width // size, active=active)
    union = mask.any(0).float().mean().item()
    weights = _weights(2 if is_gated else 1, width, width_in, union)
    x = _normal(num_rows, width_in)

    def arguments(weight: torch.Tensor) -> dict[str, Any]:
        if not is_gated:
            return {"x": x, "weight": weight, "mask": mask}
        return {"x": x, "weight": weight[:width], "mask": mask, "up_weight": weight[width:], "activation": "silu"}

    def wanted() -> torch.Tensor:
        both = linear(x.float(), weights[0].float())
        return torch.nn.functional.silu(both[:, :width]) * both[:, width:] if is_gated else both

    candidates = _cublas(x, weights)
    copies = [arguments(weight) for weight in weights]
    candidates["operator"] = [partial(gemv_mn, **a, backend="triton") for a in copies]
    for tile in tiles:
        candidates[_name(tile)] = [partial(gemv_mn, **a, backend="triton", tile=tile) for a in copies]
    return Race(
        name=f"gemv {name} M={num_rows} G={size} p={active}",
        candidates=candidates,
        wanted=wanted,
        executes=mask.repeat_interleave(size, 1),
        flop=0.0,
        bytes_moved=union * weights[0].numel() * 2,
        facts={"num_rows": num_rows, "group_size": size, "active": active, "union": union},
        operator="gemv_mn",
        case=gemv_case(name, _sizes(size), num_rows, active),
        choices=_choices("dense cublas", tiles),
    )


def _k_race(
    name: OperatorName, num_rows: int, width_in: int, size: int, active: float, tiles: Sequence[GemvTile]
) -> Race:
    width = HIDDEN
    mask = half_mask(num_rows, width_in // size, active=active)
    union = mask.any(0).float().mean().item()
    weights = _weights(1, width, width_in, union)
    grouped = [w.view(width, width_in // size, size).transpose(0, 1).contiguous() for w in weights]
    h = _normal(num_rows, width_in) * mask.repeat_interleave(size, 1)
    candidates = _cublas(h, weights)
    candidates["operator"] = [partial(gemv_k, h, w, mask, backend="triton") for w in weights]
    candidates["operator, grouped weights"] = [partial(gemv_k, h, w, mask, backend="triton") for w in grouped]
    for tile in tiles:
        for layout, copies in (("", weights), (" grouped", grouped)):
            candidates[_name(tile) + layout] = [
                partial(gemv_k, h, w, mask, backend="triton", tile=tile) for w in copies
            ]
    return Race(
        name=f"gemv {name} M={num_rows} G={size} p={active}",
        candidates=candidates,
        wanted=lambda: linear(h.float(), weights[0].float()),
        executes=None,
        flop=0.0,
        bytes_moved=union * weights[0].numel() * 2,
        facts={"num_rows": num_rows, "group_size": size, "active": active, "union": union},
        operator="gemv_k",
        case=gemv_case(name, _sizes(size), num_rows, active),
        choices=_choices("dense cublas", tiles),
    )
