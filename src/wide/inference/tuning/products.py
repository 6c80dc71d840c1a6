"""Races of a layer's linear operators: many rows against cuBLAS, and one to four rows over rotating copies of weights.

Inputs are random, in bfloat16. Products over input groups read NaN where nothing executes, so that any reader shows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu

from wide.inference.measured import LayerSizes, gemm_case, gemv_case
from wide.inference.operator_table import OperatorName
from wide.inference.tuning.race import Call, Race, relative
from wide.inference.tuning.tiles import KTiles, MnTiles, backend_of
from wide.kernels.contract import Case, Operator
from wide.kernels.gemm_k import GEMM_K, gemm_k
from wide.kernels.gemm_k.tiles import KTile, StoredKTile
from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.gemm_mn import GEMM_MN, gemm_mn
from wide.kernels.gemm_mn.tiles import ClusterMnTile, MnTile
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.gemv.tiles import GemvTile
from wide.kernels.reorder import reorder, reorder_patterns
from wide.kernels.reorder_rows import left_to_tiles, reorder_rows
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice

# Copies of weights and caches rotate through more bytes of executing data than any second-level cache holds.
COLD_BYTES = 192 * 1024**2
_LEAST_COPIES = 4
_BLOCK_M = 128
_LABELS = {"query": "q", "output": "o"}
_MN_TYPES: Mapping[str, Callable[..., Any]] = {"triton": MnTile, "cuda": ClusterMnTile}
_K_TYPES: Mapping[str, Callable[..., Any]] = {"triton": KTile, "cuda": StoredKTile}
# Gated products are compared with a float32 reference and round once more than it.
_GEMV_TOLERANCE = 1.5e-2


def normal(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 noise."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale


def exact_mask(*shape: int, active: float, device: torch.device) -> torch.Tensor:
    """Return a random bool mask with the wanted share of True over all entries, rounded; the same for equal sizes."""
    generator = torch.Generator(device=device).manual_seed(17)
    count = math.prod(shape)
    order = torch.randperm(count, generator=generator, device=device)
    return (order < round(active * count)).view(shape)


def shipped_name(choices: Mapping[str, Choice], shipped: Choice | None) -> str:
    """Return the candidate that a choice of a table stands for; a choice without a tile takes its backend's first."""
    if shipped is None:
        return ""

    def key(choice: Choice) -> tuple[object, ...]:
        return choice.backend, choice.tile, choice.block_m, choice.groups_per_block

    alike = [name for name, choice in choices.items() if choice.backend == shipped.backend]
    same = [name for name in alike if shipped.tile and key(choices[name]) == key(shipped)]
    return next(iter([*same, *alike]), "")


def grouped(name: OperatorName, sizes: LayerSizes) -> tuple[int, int, int]:
    """Return the channels that are grouped, the number of groups, and the channels of one."""
    if name in ("gate_up", "down"):
        return sizes.ffn_width, sizes.ffn_groups, sizes.ffn_width // sizes.ffn_groups
    return sizes.query_width, sizes.attention_groups, sizes.query_width // sizes.attention_groups


def _least_bytes(operator: Operator, case: Case) -> int:
    work = operator.work(case)
    return work.bytes_read + work.bytes_written


def _many(
    name: OperatorName, sizes: LayerSizes, rows: int, active: float, device: torch.device
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mask of a race over many rows, and what all such races say of themselves."""
    _, groups, size = grouped(name, sizes)
    generator = torch.Generator(device=device).manual_seed(17)
    mask = torch.rand(rows, groups, device=device, generator=generator) < active
    case = gemm_case(name, sizes, rows, active)
    operator = GEMM_K if name in ("output", "down") else GEMM_MN
    parts = 2 if case.options.get("gated") else 1
    about = {
        "kind": "sweep",
        "name": f"{_LABELS.get(name, name)} G={size} p={active} M={rows}",
        "peer": "dense",
        "flop": 2.0 * mask.sum().item() * size * sizes.hidden_size * parts,
        "bytes_moved": _least_bytes(operator, case),
        "facts": {"num_rows": float(rows), "group_size": float(size), "active": active},
        "operator": operator.name,
        "case": case,
    }
    return mask, about


def output_groups_race(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    tiles: MnTiles,
    *,
    device: torch.device,
    zeroed: bool | None = None,
    shipped: Choice | None = None,
) -> Race:
    """Return the race of a product over output groups ('query' or 'gate_up'); each call charges its reordering.

    Args:
        name: Of the product.
        sizes: Of the layer.
        rows: M.
        active: Share of (row, group) pairs that execute.
        tiles: That are tried.
        device: Where.
        zeroed: Whether tiles write zeros to skipped places, as a dense product that reads them needs; None leaves such
            places unwritten, and has the first tile write zeros, too.
        shipped: What `wide.optimize` takes today, which is tried first.
    """
    mask, about = _many(name, sizes, rows, active, device)
    width, _, size = grouped(name, sizes)
    gated = bool(about["case"].options.get("gated"))
    # One buffer, as `wide.optimize` lays gate and up.
    weights = normal(2 if gated else 1, width, sizes.hidden_size, device=device, scale=sizes.hidden_size**-0.5)
    x = normal(rows, sizes.hidden_size, device=device)
    options: dict[str, Any] = {"up_weight": weights[1] if gated else None, "activation": "silu" if gated else "none"}
    unused = reorder(mask, backend="triton")

    def sparse(block_m: int, tile: tuple[int, ...], zeros: torch.Tensor | None) -> torch.Tensor:
        order = reorder(mask, block_m=block_m, backend="triton")
        return gemm_mn(x, weights[0], order, **options, mask=zeros, backend=backend_of(tile), tile=tile)  # type: ignore[arg-type]

    def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        groups = (*mask.shape, size)
        return relative(got.view(groups)[mask], wanted.view(groups)[mask])

    if shipped is not None and shipped.tile:
        tiles = [(shipped.block_m or _BLOCK_M, _MN_TYPES[shipped.backend](*shipped.tile)), *tiles]
    dense = partial(gemm_mn, x, weights[0], unused, **options, backend="dense")
    candidates: dict[str, Sequence[Call]] = {"dense": [dense]}
    choices = {"dense": Choice(backend="dense")}
    for block_m, tile in tiles:
        named = f"{block_m}x{_fields(tile)}"
        candidates[named] = [partial(sparse, block_m, tile, mask if zeroed else None)]
        choices[named] = Choice(backend=backend_of(tile), tile=tuple(tile), block_m=block_m)
    if zeroed is None:
        block_m, tile = tiles[0]
        candidates[f"{block_m}x{_fields(tile)} zeroed"] = [partial(sparse, block_m, tile, mask)]
    return Race(
        candidates=candidates,
        wanted=dense,
        error=error,
        choices=choices,
        shipped=shipped_name(choices, shipped),
        **about,
    )


def input_groups_race(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    tiles: KTiles,
    *,
    device: torch.device,
    shipped: Choice | None = None,
) -> Race:
    """Return the race of a product over input groups ('output' or 'down'); arguments as of `output_groups_race`.

    The peer multiplies what a dense model has; zeros in skipped places, our fallback, draw less power and are faster.
    """
    mask, about = _many(name, sizes, rows, active, device)
    width, groups, size = grouped(name, sizes)
    weight = normal(sizes.hidden_size, width, device=device, scale=width**-0.5)
    values = normal(rows, groups, size, device=device)
    chosen = mask.unsqueeze(2)
    full, zeros = values.view(rows, -1), torch.where(chosen, values, 0).view(rows, -1)
    holes = torch.where(chosen, values, float("nan")).view(rows, -1)
    unused = reorder_patterns(mask, groups_per_block=8, keeps_empty=groups <= 8, backend="triton")

    def by_patterns(groups_per_block: int, block_m: int, tile: tuple[int, ...]) -> torch.Tensor:
        order = reorder_patterns(
            mask,
            groups_per_block=groups_per_block,
            block_m=block_m,
            keeps_empty=groups_per_block >= groups,
            backend="triton",
        )
        return gemm_k(holes, weight, order, group_size=size, backend=backend_of(tile), tile=tile)  # type: ignore[arg-type]

    def by_rows() -> torch.Tensor:
        return gemm_k_rows(holes, weight, reorder_rows(mask, backend="cuda"), group_size=size, backend="cuda")

    if shipped is not None and shipped.tile:
        first = (shipped.groups_per_block, shipped.block_m or _BLOCK_M, _K_TYPES[shipped.backend](*shipped.tile))
        tiles = [first, *tiles]
    dense = partial(gemm_k, weight=weight, order=unused, group_size=size, backend="dense")
    candidates: dict[str, Sequence[Call]] = {
        "dense": [partial(dense, full)],
        "dense on zeros": [partial(dense, zeros)],
        "dense with select": [partial(dense, holes, mask=mask)],
    }
    choices = {"dense on zeros": Choice(backend="dense")}
    for groups_per_block, block_m, tile in tiles:
        named = f"s={groups_per_block} {block_m}x{_fields(tile)}"
        is_one_sort = groups_per_block > PATTERN_GROUPS
        candidates[named] = [by_rows if is_one_sort else partial(by_patterns, groups_per_block, block_m, tile)]
        choices[named] = Choice(
            backend=backend_of(tile),
            tile=tuple(tile),
            block_m=block_m,
            groups_per_block=groups_per_block,
            left_to_tiles=left_to_tiles(mask) if is_one_sort else 1.0,
        )
    return Race(
        candidates=candidates,
        wanted=candidates["dense on zeros"][0],
        # It multiplies what the others skip.
        trusted=("dense",),
        choices=choices,
        shipped=shipped_name(choices, shipped),
        **about,
    )


def _fields(tile: tuple[int, ...]) -> str:
    backend = backend_of(tile)
    return ("" if backend == "triton" else f"{backend} ") + "x".join(str(value) for value in tile)


def tile_name(tile: tuple[int, ...]) -> str:
    """Return the name of a candidate of attention or of a product of few rows with a tile."""
    return ("tile hopper " if backend_of(tile) == "gluon" else "tile ") + "-".join(str(int(value)) for value in tile)


def few_rows_race(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    tiles: Sequence[GemvTile],
    *,
    device: torch.device,
    shipped: Choice | None = None,
) -> Race:
    """Return the race of a product of one to four rows; weights are never found in a cache, as in a step.

    Arguments as of `output_groups_race`; 'operator' runs the operator's own default tile.
    """
    case = gemv_case(name, sizes, rows, active)
    width, groups, size = grouped(name, sizes)
    sums_inputs = name in ("output", "down")
    gated = bool(case.options.get("is_gated"))
    mask = exact_mask(rows, groups, active=active, device=device)
    union = mask.any(0).float().mean().item()
    num_outputs, num_inputs = (sizes.hidden_size, width) if sums_inputs else (width, sizes.hidden_size)
    parts = 2 if gated else 1
    copies = max(_LEAST_COPIES, math.ceil(COLD_BYTES / (2 * union * parts * width * sizes.hidden_size)))
    weights = [normal(parts * num_outputs, num_inputs, device=device, scale=num_inputs**-0.5) for _ in range(copies)]
    x = normal(rows, num_inputs, device=device)
    executing = mask.repeat_interleave(size, 1)
    if sums_inputs:
        x = x * executing

    def ours(tile: GemvTile | None, layout: Sequence[torch.Tensor]) -> list[Call]:
        if sums_inputs:
            return [partial(gemv_k, x, weight, mask, backend="triton", tile=tile) for weight in layout]
        options: dict[str, Any] = {"activation": "silu"} if gated else {}
        return [
            partial(
                gemv_mn,
                x,
                weight[:width],
                mask,
                up_weight=weight[width:] if gated else None,
                backend="triton",
                tile=tile,
                **options,
            )
            for weight in layout
        ]

    def wanted() -> torch.Tensor:
        both = linear(x.float(), weights[0].float())
        return silu(both[:, :width]) * both[:, width:] if gated else both

    def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        return relative(got, wanted) if sums_inputs else relative(got[executing], wanted[executing])

    candidates: dict[str, Sequence[Call]] = {"dense cublas": [partial(linear, x, weight) for weight in weights]}
    if rows == 1:
        candidates["dense cublas, matrix-vector"] = [partial(_matrix_vector, weight, x) for weight in weights]
    choices = dict.fromkeys(candidates, Choice(backend="dense"))
    candidates["operator"] = ours(None, weights)
    choices["operator"] = Choice(backend="triton")
    if shipped is not None and shipped.tile:
        tiles = [GemvTile(*shipped.tile), *tiles]
    for tile in dict.fromkeys(tiles):
        candidates[tile_name(tile)] = ours(tile, weights)
        choices[tile_name(tile)] = Choice(backend="triton", tile=tuple(tile))
    return Race(
        name=f"gemv {name} M={rows} G={size} p={active}",
        candidates=candidates,
        wanted=wanted,
        error=error,
        # A gated peer gives both products, as wide as two of ours: how long it takes is what counts.
        trusted=tuple(name for name in candidates if gated and name.startswith("dense")),
        tolerance=_GEMV_TOLERANCE,
        bytes_moved=union * weights[0].numel() * 2,
        facts={"num_rows": rows, "group_size": size, "active": active, "union": union},
        operator="gemv_k" if sums_inputs else "gemv_mn",
        case=case,
        choices=choices,
        shipped=shipped_name(choices, shipped),
    )


def _matrix_vector(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.mv(weight, x[0])[None]
