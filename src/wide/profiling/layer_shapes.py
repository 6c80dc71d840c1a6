"""The linear operators and the prefill attention of one layer, as measurements that a tuning table is filled from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from wide.inference.measured import LayerSizes, gemm_case
from wide.inference.operator_table import OperatorName
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k.tiles import default_tile as k_tile
from wide.kernels.gemm_mn.tiles import default_tile as mn_tile
from wide.profiling import attention, operators
from wide.profiling.gemv_races import GEMV_TILES, gemv_k_race, gemv_mn_race
from wide.profiling.k_tiles import DOWN_TILES, OUTPUT_TILES, AnyKTile, k_hopper_tiles, stored_tiles
from wide.profiling.mn_tiles import MN_GATED_TILES, MN_PLAIN_TILES, AnyMnTile, MnTiles, mn_hopper_tiles
from wide.profiling.races import PREFILL_TILES, Race, prefill_race
from wide.profiling.sweeps import (
    DOWN_BLOCKS,
    Sweep,
    k_sweep,
    mn_sweep,
    normal,
)

_FEW_ROWS = (1, 2, 4)
_BLOCK_M = 128
_SUPER_BLOCK = 8
# Groups in a super-block where no measurement says which are worth trying.
_SUPER_BLOCKS = (4, 8)
_FEW_TILES, _PROMPT_TILES = 8, 4

Records = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLayer:
    """A layer whose operators are measured.

    Args:
        sizes: Of its operators.
        attention: Whether tokens skip in its attention.
        ffn: Whether tokens skip in its FFN.
    """

    sizes: LayerSizes
    attention: bool
    ffn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One shape of one operator.

    Args:
        name: In words.
        run: Checks every candidate against the dense peer, times those that agree, and returns one record each.
    """

    name: str
    run: Callable[[int], Records]


def layer_measurements(
    layer: TunedLayer, rows: Sequence[int], executed: tuple[float, float], *, quick: bool
) -> Iterator[Measurement]:
    """Yield what `wide.optimize` looks up for a layer: its operators at many rows and, but for attention, at few.

    Args:
        layer: The layer.
        rows: Numbers of tokens of a prompt.
        executed: Shares of (token, group) pairs that execute, in attention and FFN.
        quick: One row instead of one, two and four in a step, and fewer tiles.
    """
    names: list[tuple[OperatorName, float]] = []
    names += [("query", executed[0]), ("output", executed[0])] if layer.attention else []
    names += [("gate_up", executed[1]), ("down", executed[1])] if layer.ffn else []
    sizes = layer.sizes
    for name, active in names:
        for count in _FEW_ROWS[:1] if quick else _FEW_ROWS:
            make = partial(_few, name, sizes, count, active, quick)
            yield Measurement(name=f"{name}, {count} rows", run=partial(_race, make))
        for count in rows:
            product = partial(_many, name, sizes, count, active, quick)
            yield Measurement(name=f"{name}, {count} rows", run=partial(_sweep, product))
    if layer.attention:
        tiles = PREFILL_TILES[:_PROMPT_TILES] if quick else PREFILL_TILES
        for count in rows:
            prompt = partial(prefill_race, count, executed[0], tiles, sizes=sizes)
            yield Measurement(name=f"attention, {count} tokens", run=partial(_race, prompt))


def _race(make: Callable[[], Race], rounds: int) -> Records:
    return attention.run(make(), rounds)


def _sweep(make: Callable[[], Sweep], rounds: int) -> Records:
    return operators.run(make(), rounds)


def _grouped(name: OperatorName, sizes: LayerSizes) -> tuple[int, int]:
    """Return the channels that are grouped and those of a group."""
    if name in ("gate_up", "down"):
        return sizes.ffn_width, sizes.ffn_width // sizes.ffn_groups
    return sizes.query_width, sizes.query_width // sizes.attention_groups


def _few(name: OperatorName, sizes: LayerSizes, rows: int, active: float, quick: bool) -> Race:
    width, size = _grouped(name, sizes)
    make = gemv_mn_race if name in ("query", "gate_up") else gemv_k_race
    tiles = GEMV_TILES[:_FEW_TILES] if quick else GEMV_TILES
    return make(name, rows, width, size, active, tiles, sizes=sizes)


def _many(name: OperatorName, sizes: LayerSizes, rows: int, active: float, quick: bool) -> Sweep:
    """Return the sweep of a linear operator, kept under the very case by which it is looked up."""
    make = _k_sweep if name in ("output", "down") else _mn_sweep
    return replace(make(name, sizes, rows, active, quick), case=gemm_case(name, sizes, rows, active))


def _k_sweep(name: OperatorName, sizes: LayerSizes, rows: int, active: float, quick: bool) -> Sweep:
    width, size = _grouped(name, sizes)
    weight = normal(sizes.hidden_size, width, scale=width**-0.5)
    variants = _k_variants(weight, rows, size, width // size, quick)
    return k_sweep(name, weight, rows, size, active, variants, with_variants=False)


def _mn_sweep(name: OperatorName, sizes: LayerSizes, rows: int, active: float, quick: bool) -> Sweep:
    (width, size), depth = _grouped(name, sizes), sizes.hidden_size
    gated = name == "gate_up" and sizes.is_gated
    # One buffer, as `wide.optimize` lays gate and up.
    weights = normal(2 if gated else 1, width, depth, scale=depth**-0.5)
    tiles = _mn_tiles(weights.device, size, gated, quick)
    up = weights[1] if gated else None
    # The down projection reads zeros wherever it is dense, as it mostly is.
    zeroed = name == "gate_up"
    x = normal(rows, depth)
    return mn_sweep(name, x, weights[0], up, size, active, tiles, with_variants=False, zeroed=zeroed)


def _mn_tiles(device: torch.device, size: int, gated: bool, quick: bool) -> MnTiles:
    """Return the tiles that fit groups of `size` channels, the device's defaults first."""
    found: list[tuple[int, AnyMnTile]] = [
        (rows, mn_tile(device, group_size=size, block_m=rows, gated=gated, stacked=gated, dtype=torch.bfloat16))
        for rows in (_BLOCK_M, _BLOCK_M // 2)
    ]
    found += mn_hopper_tiles(device, size, gated=gated)
    if not quick:
        every = MN_GATED_TILES if gated else MN_PLAIN_TILES
        found += [(rows, tile) for rows, tile in every if size % tile.block_n == 0]
    return tuple(dict.fromkeys(found))


def _k_variants(
    weight: torch.Tensor, rows: int, size: int, num_groups: int, quick: bool
) -> list[tuple[int, int, AnyKTile]]:
    """Return super-blocks and tiles that fit groups of `size` channels, the device's defaults first."""
    width = weight.shape[0]
    blocks = [_SUPER_BLOCK] if num_groups <= _SUPER_BLOCK else list(DOWN_BLOCKS.get(size, _SUPER_BLOCKS))
    default = k_tile(weight.device, group_size=size, num_rows=rows, width=width, block_m=_BLOCK_M, dtype=torch.bfloat16)
    tiles: list[tuple[int, AnyKTile]] = [(_BLOCK_M, default)]
    if hopper_obstacle(weight.device) is None:
        tiles += k_hopper_tiles(width)
    stored = stored_tiles(weight.device, group_size=size, num_groups=num_groups, width=width)
    if not quick:
        every = OUTPUT_TILES if num_groups <= _SUPER_BLOCK else DOWN_TILES
        fitting = [(m, tile) for m, tile in every if width % tile.block_n == 0 and size % tile.block_k == 0]
        tiles += [(m, tile._replace(slab=default.slab // tile.block_n * tile.block_n)) for m, tile in fitting]
    one_sort = [(max(num_groups, _SUPER_BLOCK), m, tile) for m, tile in stored]
    return list(dict.fromkeys([*one_sort, *((block, m, tile) for block in blocks for m, tile in tiles)]))
