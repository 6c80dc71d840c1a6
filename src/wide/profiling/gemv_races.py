"""What the decode bench runs of products: one to four rows against rotating copies of the weights."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from wide.inference.measured import LayerSizes, gemv_case
from wide.inference.operator_table import OperatorName
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.gemv.tiles import GemvTile
from wide.profiling.races import (
    ATTENTION_GROUP,
    COLD_BYTES,
    FFN,
    HIDDEN,
    SIZES,
    Call,
    Race,
    choices_of,
    half_mask,
    normal,
    tile_name,
)


def _sizes(group_size: int) -> LayerSizes:
    """Return Llama-3.1-8B's shapes with other groups in the FFN (512 is the attention's own)."""
    return SIZES if group_size == ATTENTION_GROUP else dataclasses.replace(SIZES, ffn_groups=FFN // group_size)


def _matrix_vector(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.mv(weight, x[0])[None]


GEMV_TILES = tuple(
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
    tiles = GEMV_TILES[:11] if quick else GEMV_TILES
    for num_rows in (1,) if quick else (1, 2, 4):
        size, active = only or (128, 0.5)
        yield gemv_mn_race("gate_up", num_rows, FFN, size, active, tiles)
        yield gemv_mn_race("query", num_rows, HIDDEN, 512, active, tiles)
        yield gemv_k_race("down", num_rows, FFN, size, active, tiles)
        yield gemv_k_race("output", num_rows, HIDDEN, 512, active, tiles)


def _weights(parts: int, width: int, width_in: int, active: float) -> list[torch.Tensor]:
    copies = max(4, math.ceil(COLD_BYTES / (2 * active * parts * width * width_in)))
    return [normal(parts * width, width_in, scale=width_in**-0.5) for _ in range(copies)]


def _cublas(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Sequence[Call]]:
    peers: dict[str, Sequence[Call]] = {"dense cublas": [partial(linear, x, w) for w in weights]}
    if x.shape[0] == 1:
        peers["dense cublas, matrix-vector"] = [partial(_matrix_vector, w, x) for w in weights]
    return peers


def gemv_mn_race(
    name: OperatorName,
    num_rows: int,
    width: int,
    size: int,
    active: float,
    tiles: Sequence[GemvTile],
    *,
    sizes: LayerSizes | None = None,
) -> Race:
    """Return the race of a decode product over output groups; arguments as of `gemv_k_race`."""
    width_in = HIDDEN if sizes is None else sizes.hidden_size
    is_gated = name == "gate_up" and (sizes is None or sizes.is_gated)
    mask = half_mask(num_rows, width // size, active=active)
    union = mask.any(0).float().mean().item()
    weights = _weights(2 if is_gated else 1, width, width_in, union)
    x = normal(num_rows, width_in)

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
        candidates[tile_name(tile)] = [partial(gemv_mn, **a, backend="triton", tile=tile) for a in copies]
    return Race(
        name=f"gemv {name} M={num_rows} G={size} p={active}",
        candidates=candidates,
        wanted=wanted,
        executes=mask.repeat_interleave(size, 1),
        flop=0.0,
        bytes_moved=union * weights[0].numel() * 2,
        facts={"num_rows": num_rows, "group_size": size, "active": active, "union": union},
        operator="gemv_mn",
        case=gemv_case(name, sizes or _sizes(size), num_rows, active),
        choices=choices_of((name for name in candidates if name.startswith("dense")), tiles),
    )


def gemv_k_race(
    name: OperatorName,
    num_rows: int,
    width_in: int,
    size: int,
    active: float,
    tiles: Sequence[GemvTile],
    *,
    sizes: LayerSizes | None = None,
) -> Race:
    """Return the race of a decode product over input groups.

    Args:
        name: Of the product.
        num_rows: Sequences.
        width_in: Channels that are grouped (of the result, for the product over output groups).
        size: Channels of a group.
        active: Share of (sequence, group) pairs that execute.
        tiles: To compare beside the default one.
        sizes: Of the layer; None takes Llama-3.1-8B's with groups of `size`.
    """
    width = HIDDEN if sizes is None else sizes.hidden_size
    mask = half_mask(num_rows, width_in // size, active=active)
    union = mask.any(0).float().mean().item()
    weights = _weights(1, width, width_in, union)
    grouped = [w.view(width, width_in // size, size).transpose(0, 1).contiguous() for w in weights]
    h = normal(num_rows, width_in) * mask.repeat_interleave(size, 1)
    candidates = _cublas(h, weights)
    candidates["operator"] = [partial(gemv_k, h, w, mask, backend="triton") for w in weights]
    candidates["operator, grouped weights"] = [partial(gemv_k, h, w, mask, backend="triton") for w in grouped]
    for tile in tiles:
        for layout, copies in (("", weights), (" grouped", grouped)):
            candidates[tile_name(tile) + layout] = [
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
        case=gemv_case(name, sizes or _sizes(size), num_rows, active),
        choices=choices_of((name for name in candidates if name.startswith("dense")), tiles),
    )
