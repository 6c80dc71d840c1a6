"""What the operator bench runs: inputs of Llama-3.1-8B shape, dense peers, and variants to compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from wide.kernels.contract import Case
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k import KTile, gemm_k
from wide.kernels.gemm_k.tiles import HopperKTile, StoredKTile
from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.gemm_mn import gemm_mn
from wide.kernels.gemm_mn.tiles import ClusterMnTile, HopperMnTile
from wide.kernels.reorder import reorder, reorder_patterns
from wide.kernels.reorder_rows import left_to_tiles, reorder_rows
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering
from wide.kernels.tuning import Choice
from wide.profiling.k_tiles import DOWN_TILES, OUTPUT_TILES, AnyKTile, k_hopper_tiles, stored_tiles
from wide.profiling.mn_tiles import MN_GATED_TILES, MN_PLAIN_TILES, AnyMnTile, MnTiles, mn_hopper_tiles

HIDDEN = 4096
FFN = 14336
ATTENTION_GROUP = 512
# Share of a graph's output that may differ from the dense peer's in norm; bfloat16 rounding alone gives about 0.004.
GATE = 1e-2

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Candidates that compute the same thing.

    Args:
        name: For example 'gate_up G=128 M=4096'.
        peer: Name of the candidate that ratios refer to.
        candidates: Calls by name; each charges its reordering.
        flop: Operations of active pairs; 0 if a rate means nothing.
        error: Relative error of a result against the peer's on executed places; None compares nothing.
        facts: Shape and mask, for the records.
        wanted: Name of the candidate whose result the others must equal, if it is not the peer's.
        operator: Name under which the fastest choice is kept.
        case: The shape under which it is kept; None keeps nothing.
        choices: What a candidate stands for, by its name.
    """

    name: str
    peer: str
    candidates: dict[str, Run]
    flop: float
    error: Callable[[torch.Tensor, torch.Tensor], float] | None
    facts: dict[str, float] = field(default_factory=dict)
    wanted: str = ""
    operator: str = ""
    case: Case | None = None
    choices: dict[str, Choice] = field(default_factory=dict)


def random_rows(num_rows: int, num_groups: int, active: float) -> torch.Tensor:
    """Return a random bool mask [M, N_G] on the GPU, the same for the same sizes."""
    generator = torch.Generator(device="cuda").manual_seed(17)
    return torch.rand(num_rows, num_groups, device="cuda", generator=generator) < active


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 noise on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return error if error == error else float("inf")


def gemm_mn_sweeps(rows: tuple[int, ...], quick: bool, only: tuple[int, float] | None = None) -> Iterator[Sweep]:
    """Time gate+up+SwiGLU and Q against cuBLAS (followed by a fused SwiGLU kernel).

    Args:
        rows: Numbers of tokens.
        quick: Fewer shapes.
        only: Group size of the FFN and share that executes, instead of the usual ones.
    """
    shapes = ((128, 0.5),) if quick else ((128, 0.5), (128, 0.72), (256, 0.5))
    shapes = shapes if only is None else (only,)
    gate_up = normal(2, FFN, HIDDEN, scale=HIDDEN**-0.5)
    query = normal(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
    for num_rows in rows:
        x = normal(num_rows, HIDDEN)
        for group_size, active in shapes:
            gated = (*MN_GATED_TILES, *mn_hopper_tiles(x.device, group_size, gated=True))
            yield mn_sweep("gate_up", x, gate_up[0], gate_up[1], group_size, active, gated)
        plain = (*MN_PLAIN_TILES, *mn_hopper_tiles(x.device, ATTENTION_GROUP, gated=False))
        yield mn_sweep("q", x, query, None, ATTENTION_GROUP, 0.5 if only is None else only[1], plain)


def mn_sweep(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    group_size: int,
    active: float,
    tiles: MnTiles,
    *,
    with_variants: bool = True,
    zeroed: bool = False,
) -> Sweep:
    """Return the sweep of one product over output groups.

    Args:
        name: Of the product.
        x: Inputs, [M, K].
        weight: [N, K].
        up_weight: Gated with it, [N, K]; None = not gated.
        group_size: Channels of a group of N.
        active: Share of (row, group) pairs that execute.
        tiles: Rows of a tile, and the rest of it.
        with_variants: Whether the first tile also runs packed; that one, and gated ones in CUDA C++, also write zeros.
        zeroed: Whether every tile writes zeros to skipped places, as a dense product that reads them needs.
    """
    num_groups = weight.shape[0] // group_size
    mask = random_rows(x.shape[0], num_groups, active)
    candidates, choices = _mn_candidates(x, weight, up_weight, mask, tiles, with_variants, zeroed)

    def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        chosen = wanted.view(*mask.shape, group_size)
        if got.shape == wanted.shape:
            return _relative(got.view_as(chosen)[mask], chosen[mask])
        in_groups = chosen.transpose(0, 1)[mask.t()]
        return _relative(got[: in_groups.shape[0]], in_groups)

    flop = 2.0 * mask.sum().item() * group_size * x.shape[1] * (1 if up_weight is None else 2)
    return Sweep(
        name=f"{name} G={group_size} p={active} M={x.shape[0]}",
        peer="dense",
        candidates=candidates,
        flop=flop,
        error=error,
        facts={"num_rows": float(x.shape[0]), "group_size": float(group_size), "active": active},
        operator="gemm_mn",
        case=Case(
            sizes={
                "num_rows": x.shape[0],
                "num_groups": num_groups,
                "group_size": group_size,
                "depth": x.shape[1],
            },
            dtype=x.dtype,
            active=active,
            options={} if up_weight is None else {"gated": True},
        ),
        choices=choices,
    )


def _mn_candidates(
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    mask: torch.Tensor,
    tiles: MnTiles,
    with_variants: bool,
    every_zeroed: bool,
) -> tuple[dict[str, Run], dict[str, Choice]]:
    """Return the calls by name, and what those stand for that a table may choose."""
    activation = "none" if up_weight is None else "silu"
    unused = reorder(mask, backend="triton")

    def dense() -> torch.Tensor:
        return gemm_mn(x, weight, unused, up_weight=up_weight, activation=activation, backend="dense")

    def sparse(block_m: int, tile: AnyMnTile, packed: bool, zeroed: bool) -> Run:
        def run() -> torch.Tensor:
            return gemm_mn(
                x,
                weight,
                reorder(mask, block_m=block_m, backend="triton"),
                up_weight=up_weight,
                activation=activation,
                packed=packed,
                mask=mask if zeroed else None,
                backend=_backend(tile),
                tile=tile,
            )

        return run

    candidates: dict[str, Run] = {"dense": dense}
    choices = {"dense": Choice(backend="dense")}
    for block_m, tile in tiles:
        candidate = f"{block_m}x{_fields(tile)}"
        candidates[candidate] = sparse(block_m, tile, False, every_zeroed)
        choices[candidate] = Choice(backend=_backend(tile), tile=tuple(tile), block_m=block_m)
    if with_variants:
        block_m, tile = tiles[0]
        candidates[f"{block_m}x{_fields(tile)} packed"] = sparse(block_m, tile, True, False)
        native = [one for one in tiles[1:] if up_weight is not None and _backend(one[1]) == "cuda"]
        for block_m, tile in (tiles[0], *native):
            candidates[f"{block_m}x{_fields(tile)} zeroed"] = sparse(block_m, tile, False, True)
    return candidates, choices


def _backend(tile: tuple[int, ...]) -> str:
    if isinstance(tile, ClusterMnTile | StoredKTile):
        return "cuda"
    return "gluon" if isinstance(tile, HopperMnTile | HopperKTile) else "triton"


def _fields(tile: tuple[int, ...]) -> str:
    backend = _backend(tile)
    return ("" if backend == "triton" else f"{backend} ") + "x".join(str(value) for value in tile)


_HOPPER_BLOCKS = {128: (6, 7, 8), 256: (4, 5)}
# Groups in a super-block that are worth trying, by group size.
DOWN_BLOCKS = {128: (4, 5, 6, 8), 256: (3, 4, 5)}
_DOWN_BLOCKS_QUICK = {128: (4, 6), 256: (4,)}


def gemm_k_sweeps(rows: tuple[int, ...], quick: bool, only: tuple[int, float] | None = None) -> Iterator[Sweep]:
    """Time down and O against cuBLAS; arguments as of `gemm_mn_sweeps`."""
    blocks_by_size = _DOWN_BLOCKS_QUICK if quick else DOWN_BLOCKS
    active = 0.5
    if only is not None:
        size, active = only
        blocks_by_size = {size: DOWN_BLOCKS.get(size, (4, 6, 8))}
    down = normal(HIDDEN, FFN, scale=FFN**-0.5)
    output = normal(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
    for num_rows in rows:
        # Slabs of 16 and 32 MB (or everything).
        slabs = sorted({min(HIDDEN, 2**22 // num_rows), min(HIDDEN, 2**23 // num_rows)})
        for group_size, blocks in blocks_by_size.items():
            variants: list[tuple[int, int, AnyKTile]]
            variants = [(s, m, t._replace(slab=slab)) for s in blocks for m, t in DOWN_TILES for slab in slabs]
            if hopper_obstacle(down.device) is None:
                hopper = k_hopper_tiles(HIDDEN)
                variants += [(s, m, t) for s in _HOPPER_BLOCKS.get(group_size, (4, 8)) for m, t in hopper]
            groups = FFN // group_size
            stored = stored_tiles(down.device, group_size=group_size, num_groups=groups, width=HIDDEN)
            variants += [(groups, m, t) for m, t in stored]
            yield k_sweep("down", down, num_rows, group_size, active, variants)
        variants = [(8, m, t) for m, t in OUTPUT_TILES]
        variants += [(4, m, t._replace(slab=slabs[-1])) for m, t in (DOWN_TILES[0], DOWN_TILES[3], DOWN_TILES[5])]
        if hopper_obstacle(output.device) is None:
            variants += [(s, m, t) for s in (8, 4) for m, t in k_hopper_tiles(HIDDEN)]
        groups = HIDDEN // ATTENTION_GROUP
        stored = stored_tiles(output.device, group_size=ATTENTION_GROUP, num_groups=groups, width=HIDDEN)
        variants += [(groups, m, t) for m, t in stored]
        yield k_sweep("o", output, num_rows, ATTENTION_GROUP, active, variants)


def k_sweep(
    name: str,
    weight: torch.Tensor,
    num_rows: int,
    group_size: int,
    active: float,
    variants: Sequence[tuple[int, int, AnyKTile]],
    *,
    with_variants: bool = True,
) -> Sweep:
    """Return the sweep of one product over input groups.

    Args:
        name: Of the product.
        weight: [N, K].
        num_rows: M.
        group_size: Channels of a group of K.
        active: Share of (row, group) pairs that execute.
        variants: Groups of a super-block, rows of a tile, and the rest of it.
        with_variants: Whether the deterministic form runs, too.
    """
    num_groups = weight.shape[1] // group_size
    mask = random_rows(num_rows, num_groups, active)
    values = normal(num_rows, num_groups, group_size)
    candidates, choices = _k_candidates(values, weight, mask, variants, with_variants)
    return Sweep(
        name=f"{name} G={group_size} p={active} M={num_rows}",
        peer="dense",
        candidates=candidates,
        flop=2.0 * mask.sum().item() * group_size * weight.shape[0],
        error=_relative,
        facts={"num_rows": float(num_rows), "group_size": float(group_size), "active": active},
        wanted="dense on zeros",
        operator="gemm_k",
        case=Case(
            sizes={
                "num_rows": num_rows,
                "num_groups": num_groups,
                "group_size": group_size,
                "width": weight.shape[0],
            },
            dtype=weight.dtype,
            active=active,
        ),
        choices=choices,
    )


def _by_rows(h: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    order = reorder_rows(mask, backend="cuda")
    return gemm_k_rows(h, weight, order, group_size=h.shape[1] // mask.shape[1], backend="cuda")


def _k_choice(mask: torch.Tensor, groups_per_block: int, block_m: int, tile: AnyKTile) -> Choice:
    left = left_to_tiles(mask) if groups_per_block > PATTERN_GROUPS else 1.0
    return Choice(
        backend=_backend(tile),
        tile=tuple(tile),
        block_m=block_m,
        groups_per_block=groups_per_block,
        left_to_tiles=left,
    )


def _k_candidates(
    values: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    variants: Sequence[tuple[int, int, AnyKTile]],
    with_variants: bool,
) -> tuple[dict[str, Run], dict[str, Choice]]:
    """Return the calls by name, and what those stand for that a table may choose."""
    num_rows, num_groups, group_size = values.shape
    zeros = torch.where(mask.unsqueeze(2), values, 0).view(num_rows, -1)
    # What gemm_mn leaves in skipped places is unspecified: NaN shows any reader.
    holes = torch.where(mask.unsqueeze(2), values, float("nan")).view(num_rows, -1)

    def sort(groups_per_block: int, block_m: int) -> PatternReordering:
        return reorder_patterns(
            mask,
            groups_per_block=groups_per_block,
            block_m=block_m,
            keeps_empty=groups_per_block >= num_groups,
            backend="triton",
        )

    unused = sort(8, 128)

    def sparse(groups_per_block: int, block_m: int, tile: AnyKTile, deterministic: bool) -> Run:
        if groups_per_block > PATTERN_GROUPS:
            return partial(_by_rows, holes, weight, mask)

        def run() -> torch.Tensor:
            order = sort(groups_per_block, block_m)
            return gemm_k(
                holes,
                weight,
                order,
                group_size=group_size,
                deterministic=deterministic,
                backend=_backend(tile),
                tile=tile,
            )

        return run

    # A dense model multiplies no zeros, and zeros draw less power: the peer is the former, our fallback the latter.
    full = values.view(num_rows, -1)
    candidates: dict[str, Run] = {
        "dense": lambda: gemm_k(full, weight, unused, group_size=group_size, backend="dense"),
        "dense on zeros": lambda: gemm_k(zeros, weight, unused, group_size=group_size, backend="dense"),
        "dense with select": lambda: gemm_k(holes, weight, unused, group_size=group_size, mask=mask, backend="dense"),
    }
    choices = {"dense on zeros": Choice(backend="dense")}
    for groups_per_block, block_m, tile in variants:
        candidate = f"s={groups_per_block} {block_m}x{_fields(tile)}"
        candidates[candidate] = sparse(groups_per_block, block_m, tile, False)
        choices[candidate] = _k_choice(mask, groups_per_block, block_m, tile)
    if with_variants:
        candidates["s=8 deterministic"] = sparse(8, 128, KTile(128, 64, 3, 8, 1, 1), True)
    return candidates, choices
