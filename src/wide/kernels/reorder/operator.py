"""Reorder as operators of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask
from wide.kernels.device import triton_obstacle
from wide.kernels.registration import implement
from wide.kernels.reorder.reference import (
    reorder_patterns_reference,
    reorder_reference,
    reorder_sequences_reference,
)
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering, Reordering, SequenceReordering

Tensors = tuple[torch.Tensor, ...]

_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "reorder(Tensor mask, int block_m, bool with_rank, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("reorder_sequences(Tensor mask, str backend) -> (Tensor, Tensor)")
_LIBRARY.define(
    "reorder_patterns(Tensor mask, int block_m, int groups_per_block, bool keeps_empty, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _triton_reorder(mask: torch.Tensor, *, block_m: int, with_rank: bool) -> Tensors:
    from wide.kernels.reorder import _triton

    return _triton.reorder(mask, block_m=block_m, with_rank=with_rank)


def _triton_sequences(mask: torch.Tensor) -> Tensors:
    from wide.kernels.reorder import _triton

    return _triton.reorder_sequences(mask)


def _triton_patterns(mask: torch.Tensor, *, block_m: int, groups_per_block: int, keeps_empty: bool) -> Tensors:
    from wide.kernels.reorder.patterns import _triton

    return _triton.reorder_patterns(mask, block_m=block_m, groups_per_block=groups_per_block, keeps_empty=keeps_empty)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _check_mask(mask: torch.Tensor, dimensions: int, backend: str) -> None:
    if mask.dtype != torch.bool or mask.dim() != dimensions or 0 in mask.shape:
        raise ShapeError(
            f"reorder wants a bool mask with {dimensions} non-empty dimensions, got {mask.dtype} {tuple(mask.shape)}"
        )
    if backend == "triton":
        obstacle = triton_obstacle(mask.device)
        if obstacle is not None:
            raise UnsupportedBackendError(f"reorder: {obstacle}; choose backend='torch'")
    elif backend != "torch":
        raise UnsupportedBackendError(f"reorder has the backends 'torch' and 'triton', got {backend!r}")


def _check_block(block_m: int) -> None:
    if block_m < 1 or block_m & (block_m - 1):
        raise ShapeError(f"block_m must be a power of two, got {block_m}; 64 and 128 are usual")


@implement(_LIBRARY, "reorder")
def _reorder_impl(mask: torch.Tensor, block_m: int, with_rank: bool, backend: str) -> Tensors:
    _check_mask(mask, 2, backend)
    _check_block(block_m)
    return REORDER.backends[backend].run(mask, block_m=block_m, with_rank=with_rank)  # type: ignore[no-any-return]


@implement(_LIBRARY, "reorder_sequences")
def _sequences_impl(mask: torch.Tensor, backend: str) -> Tensors:
    _check_mask(mask, 3, backend)
    return REORDER_SEQUENCES.backends[backend].run(mask)  # type: ignore[no-any-return]


@implement(_LIBRARY, "reorder_patterns")
def _patterns_impl(mask: torch.Tensor, block_m: int, groups_per_block: int, keeps_empty: bool, backend: str) -> Tensors:
    _check_mask(mask, 2, backend)
    _check_block(block_m)
    if not 1 <= groups_per_block <= PATTERN_GROUPS:
        raise ShapeError(f"groups_per_block must lie in 1..{PATTERN_GROUPS}, got {groups_per_block}")
    run = REORDER_PATTERNS.backends[backend].run
    return run(  # type: ignore[no-any-return]
        mask, block_m=block_m, groups_per_block=groups_per_block, keeps_empty=keeps_empty
    )


@torch.library.register_fake("wide::reorder", lib=_LIBRARY)
def _reorder_fake(mask: torch.Tensor, block_m: int, with_rank: bool, backend: str) -> Tensors:
    del backend
    num_rows, num_groups = mask.shape
    shapes: list[tuple[Any, ...]] = [
        (num_groups, num_rows),
        (num_groups,),
        (num_groups + 1,),
        (num_groups * ((num_rows + block_m - 1) // block_m), 2),
        (2,),
        (num_rows, num_groups) if with_rank else (0,),
    ]
    return tuple(mask.new_empty(shape, dtype=torch.int32) for shape in shapes)


@torch.library.register_fake("wide::reorder_sequences", lib=_LIBRARY)
def _sequences_fake(mask: torch.Tensor, backend: str) -> Tensors:
    del backend
    num_sequences, num_tokens, num_groups = mask.shape
    return (
        mask.new_empty((num_sequences, num_groups, num_tokens), dtype=torch.int32),
        mask.new_empty((num_sequences, num_groups), dtype=torch.int32),
    )


@torch.library.register_fake("wide::reorder_patterns", lib=_LIBRARY)
def _patterns_fake(mask: torch.Tensor, block_m: int, groups_per_block: int, keeps_empty: bool, backend: str) -> Tensors:
    del keeps_empty, backend
    num_rows, num_groups = mask.shape
    num_blocks = (num_groups + groups_per_block - 1) // groups_per_block
    max_tiles = num_blocks * ((num_rows + block_m - 1) // block_m)
    shapes: list[tuple[Any, ...]] = [
        (num_blocks, num_rows),
        (num_blocks, num_rows),
        (num_blocks,),
        (max_tiles, 2),
        (1,),
    ]
    return tuple(mask.new_empty(shape, dtype=torch.int32) for shape in shapes)


def reorder(mask: torch.Tensor, *, block_m: int = 128, with_rank: bool = False, backend: str) -> Reordering:
    """Return per group the ascending list of rows that execute it, over all tokens.

    Runs on the mask's device with fixed shapes and no host synchronisation (backend 'triton').

    Args:
        mask: True = execute, bool [M, N_G], any strides.
        block_m: Rows in a tile of the GEMM that follows; a power of two.
        with_rank: Whether `Reordering.rank` is wanted (readers of packed tensors need it).
        backend: 'torch' or 'triton'.

    Raises:
        ShapeError: If mask or block_m do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    index, counts, offsets, tiles, num_tiles, rank = torch.ops.wide.reorder(mask, block_m, with_rank, backend)
    return Reordering(index, counts, offsets, tiles, num_tiles, rank, block_m)


def reorder_sequences(mask: torch.Tensor, *, backend: str) -> SequenceReordering:
    """Return per sequence and group the ascending list of positions that execute it.

    Args:
        mask: True = execute, bool [B, T, N_G], any strides.
        backend: 'torch' or 'triton'.
    """
    index, counts = torch.ops.wide.reorder_sequences(mask, backend)
    return SequenceReordering(index, counts)


def reorder_patterns(
    mask: torch.Tensor, *, groups_per_block: int, block_m: int = 128, keeps_empty: bool = False, backend: str
) -> PatternReordering:
    """Return rows sorted by their pattern over super-blocks of neighbouring groups.

    Args:
        mask: True = execute, bool [M, N_G], any strides.
        groups_per_block: Groups in a super-block, s; 1 to 8.
        block_m: Rows in a tile of the GEMM that follows; a power of two.
        keeps_empty: Whether rows that execute no group of a super-block are listed too (first).
        backend: 'torch' or 'triton'.
    """
    index, patterns, counts, tiles, num_tiles = torch.ops.wide.reorder_patterns(
        mask, block_m, groups_per_block, keeps_empty, backend
    )
    return PatternReordering(index, patterns, counts, tiles, num_tiles, block_m, groups_per_block, keeps_empty)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_rows"], case.sizes["num_groups"])
    return {"mask": random_mask(case, shape, device), "block_m": case.sizes["block_m"], **case.options}


def _build_sequences(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_sequences"], case.sizes["num_rows"], case.sizes["num_groups"])
    return {"mask": random_mask(case, shape, device)}


def _build_patterns(case: Case, device: torch.device) -> dict[str, Any]:
    return {**_build(case, device), "groups_per_block": case.sizes["groups_per_block"]}


def _prefixes(lists: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Replace what lies beyond each count by -1."""
    places = torch.arange(lists.shape[-1], device=lists.device)
    return torch.where(places < counts.unsqueeze(-1), lists, -1)


def _same(got: Tensors, wanted: Tensors) -> float:
    equal = all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    return 0.0 if equal else float("inf")


def _compare(arguments: Mapping[str, Any], got: Tensors, wanted: Tensors) -> float:
    del arguments

    def meaning(parts: Tensors) -> Tensors:
        index, counts, offsets, tiles, num_tiles, rank = parts
        return _prefixes(index, counts), counts, offsets, tiles[: int(num_tiles[0])], num_tiles, rank

    return _same(meaning(got), meaning(wanted))


def _compare_sequences(arguments: Mapping[str, Any], got: Tensors, wanted: Tensors) -> float:
    del arguments
    return _same((_prefixes(*got), got[1]), (_prefixes(*wanted), wanted[1]))


def _compare_patterns(arguments: Mapping[str, Any], got: Tensors, wanted: Tensors) -> float:
    del arguments

    def meaning(parts: Tensors) -> Tensors:
        index, patterns, counts, tiles, num_tiles = parts
        return _prefixes(index, counts), _prefixes(patterns, counts), counts, tiles[: int(num_tiles)]

    return _same(meaning(got), meaning(wanted))


def _work(case: Case) -> Work:
    pairs = case.sizes.get("num_sequences", 1) * case.sizes["num_rows"] * case.sizes["num_groups"]
    return Work(flop=0, bytes_read=pairs, bytes_written=int(4 * case.active * pairs))


def _cases(more: Mapping[str, int], options: Mapping[str, Any]) -> tuple[Case, ...]:
    shapes = ((1, 1, 0.5), (3, 2, 0.5), (17, 8, 0.5), (64, 5, 0.0), (127, 33, 0.5), (300, 20, 0.3), (130, 7, 1.0))
    return tuple(
        Case(sizes={"num_rows": rows, "num_groups": groups, **more}, dtype=torch.bool, active=active, options=options)
        for rows, groups, active in shapes
    )


REORDER = Operator(
    name="reorder",
    reference=reorder_reference,
    backends={
        "torch": Backend(run=reorder_reference, supports=anywhere),
        "triton": Backend(run=_triton_reorder, supports=_triton_supports),
    },
    cases=_cases({"block_m": 16}, {"with_rank": True}) + _cases({"block_m": 64}, {"with_rank": False}),
    build=_build,
    compare=_compare,
    tolerance={torch.bool: 0.0},
    work=_work,
)
REORDER_SEQUENCES = Operator(
    name="reorder_sequences",
    reference=reorder_sequences_reference,
    backends={
        "torch": Backend(run=reorder_sequences_reference, supports=anywhere),
        "triton": Backend(run=_triton_sequences, supports=_triton_supports),
    },
    cases=_cases({"num_sequences": 3}, {}),
    build=_build_sequences,
    compare=_compare_sequences,
    tolerance={torch.bool: 0.0},
    work=_work,
)
REORDER_PATTERNS = Operator(
    name="reorder_patterns",
    reference=reorder_patterns_reference,
    backends={
        "torch": Backend(run=reorder_patterns_reference, supports=anywhere),
        "triton": Backend(run=_triton_patterns, supports=_triton_supports),
    },
    cases=_cases({"block_m": 16, "groups_per_block": 4}, {"keeps_empty": False})
    + _cases({"block_m": 32, "groups_per_block": 8}, {"keeps_empty": True})
    + _cases({"block_m": 16, "groups_per_block": 1}, {"keeps_empty": False}),
    build=_build_patterns,
    compare=_compare_patterns,
    tolerance={torch.bool: 0.0},
    work=_work,
)
