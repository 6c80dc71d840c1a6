"""Dynamically pruned products C = A B^T as one would write them without kernels of one's own, and fused ones.

Three axes may be pruned by a mask: rows (M, whole tokens), columns of the result (N, groups of output features) and the
reduction (K, groups of input features). Skipped outputs are zero, except in the fused product over N, which leaves
them unwritten.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.gemm_k.op import gemm_k
from wide.kernels.gemm_mn.op import gemm_mn
from wide.kernels.reorder.op import reorder, reorder_patterns
from wide.kernels.reordering import PATTERN_GROUPS

AXES = ("M", "N", "K")
NAMES = ("dense", "gather-scatter", "grouped product", "fused")
"""Of the implementations; whole tokens have no grouped product, which would be the gathered one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One pruned product.

    Args:
        axis: 'M', 'N' or 'K'.
        a: [M, K].
        b: [N, K].
        group_size: Channels of a group of the axis; for 'M' there is one group.
        mask: True = execute, bool [M, N_G]; every row executes equally many groups, for 'M' rows execute or not.
        indices: What gather needs, given for free: executing rows [M'], or per row its groups [M, R].
    """

    axis: str
    a: Tensor
    b: Tensor
    group_size: int
    mask: Tensor
    indices: Tensor

    @property
    def active(self) -> float:
        """Share of (row, group) pairs that execute."""
        return float(self.mask.float().mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Data elements that an implementation moves and stores, masks and indices left out.

    Args:
        traffic: Elements read and written.
        storage: Elements of intermediate tensors.
    """

    traffic: float
    storage: float


def make_problem(
    axis: str, size: int, *, group_size: int, active: float, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Return a product of M = N = K = size with a random mask, the same on every device.

    Raises:
        ShapeError: If the axis is unknown or the groups do not divide the size.
    """
    if axis not in AXES or size % group_size:
        raise ShapeError(f"axis {axis!r} and groups of {group_size} in {size}: wanted one of {AXES}, and a divisor")
    generator = torch.Generator().manual_seed(17)
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    b /= size**0.5
    if axis == "M":
        rows = torch.randperm(size, generator=generator)[: round(active * size)].sort().values
        mask = torch.zeros(size, 1, dtype=torch.bool)
        mask[rows] = True
        return Problem(axis=axis, a=a, b=b, group_size=size, mask=mask.to(device), indices=rows.to(device))
    num_groups = size // group_size
    order = torch.rand(size, num_groups, generator=generator).argsort(1)
    groups = order[:, : max(1, round(active * num_groups))].sort(1).values
    mask = torch.zeros(size, num_groups, dtype=torch.bool).scatter_(1, groups, True)
    return Problem(axis=axis, a=a, b=b, group_size=group_size, mask=mask.to(device), indices=groups.to(device))


def implementations(problem: Problem, *, backend: str) -> Mapping[str, Callable[[], Tensor]]:
    """Return the ways to compute a problem, by name; each call charges all it needs but the indices.

    Args:
        problem: What to compute.
        backend: Of the fused operators: 'triton', 'cuda', or 'torch' to check them on a CPU.
    """
    gathered = {"M": _gathered_rows, "N": _gathered_columns, "K": _gathered_depth}[problem.axis]
    # Inputs of skipped groups must not count; in a model they come as zeros, so the dense peer is not charged for it.
    dense_input = problem.a * _inputs(problem) if problem.axis == "K" else problem.a
    fused = _fused_depth if problem.axis == "K" else _fused_columns
    found: dict[str, Callable[[], Tensor]] = {
        "dense": partial(torch.matmul, dense_input, problem.b.t()),
        "gather-scatter": partial(gathered, problem),
        "fused": partial(fused, problem, backend),
    }
    if problem.axis != "M":
        # With one group a grouped product is the gathered one.
        grouped = _grouped_depth if problem.axis == "K" else _grouped_columns
        found["grouped product"] = partial(grouped, problem, sorting_backend(backend))
    return found


def sorting_backend(backend: str) -> str:
    """Return what sorts the mask for fused operators of a backend: kernels of Hopper GPUs have no sort of their own."""
    return backend if backend == "torch" else "triton"


def wanted(problem: Problem) -> Tensor:
    """Return the result in float32 from float32 products, [M, N], with skipped outputs zero."""
    a, b = problem.a.float(), problem.b.float()
    if problem.axis == "K":
        return (a * _inputs(problem)) @ b.t()
    return (a @ b.t()) * _outputs(problem)


def executed(problem: Problem, name: str, result: Tensor) -> Tensor:
    """Return what may be compared with `wanted`: the dense and the fused product fill skipped outputs with anything."""
    if problem.axis == "K" or name not in ("dense", "fused"):
        return result
    return torch.where(_outputs(problem), result, 0)


def work(axis: str, name: str, size: int, group_size: int, active: float) -> Work:
    """Return what an implementation must move and store for M = N = K = size.

    The dense product and the gathered ones are the paper's accounting; the grouped product is counted alike (packing,
    product, unpacking), and the fused one reads and writes executing data once.

    Source: paper, appendix A.
    """
    square, cube = float(size) ** 2, float(size) ** 3
    repeats = 1.0 if axis == "M" else size / group_size
    traffic, storage = {
        "dense": (3 * square, 0.0),
        "gather-scatter": (
            3 * active * square + 2 * square + 3 * active * square
            if axis == "M"
            else square + 3 * active * cube + 3 * active * square + square * (axis == "N"),
            2 * active * square if axis == "M" else active * cube + active * square,
        ),
        "grouped product": (
            3 * active * square * repeats + square + 3 * active * square + square,
            active * square * (repeats + 1),
        ),
        "fused": ((2 + active) * square, 0.0),
    }[name]
    return Work(traffic=traffic, storage=storage)


def _inputs(problem: Problem) -> Tensor:
    return problem.mask.repeat_interleave(problem.group_size, 1)


def _outputs(problem: Problem) -> Tensor:
    return problem.mask if problem.axis == "M" else _inputs(problem)


def _channels(problem: Problem) -> Tensor:
    """Return per row the channels of its groups, [M, R * G]."""
    offsets = torch.arange(problem.group_size, device=problem.a.device)
    return (problem.indices.unsqueeze(-1) * problem.group_size + offsets).flatten(1)


def _gathered_rows(problem: Problem) -> Tensor:
    out = problem.a.new_zeros(problem.a.shape[0], problem.b.shape[0])
    out[problem.indices] = problem.a[problem.indices] @ problem.b.t()
    return out


def _gathered_columns(problem: Problem) -> Tensor:
    channels = _channels(problem)
    parts = torch.einsum("mk,mnk->mn", problem.a, problem.b[channels])
    return problem.a.new_zeros(problem.a.shape[0], problem.b.shape[0]).scatter_(1, channels, parts)


def _gathered_depth(problem: Problem) -> Tensor:
    channels = _channels(problem)
    return torch.einsum("mk,mnk->mn", problem.a.gather(1, channels), problem.b[:, channels].permute(1, 0, 2))


def grouped_product() -> Callable[..., Tensor]:
    """Return torch's grouped product: rows [R, K] packed by group, weights [N_G, K, N], ends of groups int32 [N_G].

    Raises:
        UnsupportedBackendError: If this torch has none.
    """
    found = getattr(torch, "_grouped_mm", None)
    if found is None:
        raise UnsupportedBackendError(
            f"torch {torch.__version__} has no grouped product (torch._grouped_mm); use torch 2.8 or newer, or leave "
            "this candidate out"
        )
    product: Callable[..., Tensor] = found
    return product


def packed_rows(problem: Problem, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the mask and return the executing rows of all groups behind each other, the group of each, and groups' ends.

    Args:
        problem: Whose mask is sorted; how many pairs execute is given for free.
        backend: Of the sort.

    Returns:
        Rows int64 [R], groups int64 [R] and ends int32 [N_G]; R is the number of executing (row, group) pairs.
    """
    order = reorder(problem.mask, backend=backend)
    num_rows = order.index.shape[1]
    total = problem.indices.numel()
    # Of fixed shape, so that nothing waits for the host: place p belongs to the group whose end lies behind it.
    ends = order.offsets[1:].to(torch.int32)
    places = torch.arange(total, device=problem.a.device, dtype=torch.int32)
    group = torch.searchsorted(ends, places, right=True)
    rows = order.index.flatten()[group * num_rows + places - order.offsets[group]].long()
    return rows, group, ends


def _grouped_columns(problem: Problem, backend: str) -> Tensor:
    rows, group, ends = packed_rows(problem, backend)
    size = problem.group_size
    weights = problem.b.view(-1, size, problem.b.shape[1])
    parts = grouped_product()(problem.a[rows], weights.transpose(1, 2), offs=ends)
    out = problem.a.new_zeros(problem.a.shape[0], len(weights), size)
    return out.index_put_((rows, group), parts).flatten(1)


def _grouped_depth(problem: Problem, backend: str) -> Tensor:
    rows, group, ends = packed_rows(problem, backend)
    size = problem.group_size
    inputs = problem.a.view(problem.a.shape[0], -1, size)[rows, group]
    weights = problem.b.view(problem.b.shape[0], -1, size).permute(1, 2, 0)
    parts = grouped_product()(inputs, weights, offs=ends)
    out = torch.zeros(problem.a.shape[0], problem.b.shape[0], dtype=torch.float32, device=problem.a.device)
    return out.index_add_(0, rows, parts.float()).to(problem.a.dtype)


def _fused_columns(problem: Problem, backend: str) -> Tensor:
    return gemm_mn(problem.a, problem.b, reorder(problem.mask, backend=sorting_backend(backend)), backend=backend)


def _fused_depth(problem: Problem, backend: str) -> Tensor:
    num_groups = problem.mask.shape[1]
    per_block = min(PATTERN_GROUPS, num_groups)
    order = reorder_patterns(
        problem.mask,
        groups_per_block=per_block,
        keeps_empty=per_block >= num_groups,
        backend=sorting_backend(backend),
    )
    return gemm_k(problem.a, problem.b, order, group_size=problem.group_size, backend=backend)
