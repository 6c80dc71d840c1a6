"""Operator tables made from measurements: for each operator the fastest way at every number of tokens."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wide.errors import ConfigError
from wide.inference.operator_table import DENSE, OPERATORS, OperatorName, OperatorTable, Rules
from wide.kernels.contract import Case
from wide.kernels.device import HOPPER_STEP, triton_obstacle
from wide.kernels.gemm_k.op import fits_stored
from wide.kernels.gemm_k_rows import fits_rows
from wide.kernels.gemm_mn.op import fits_cluster
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import SPECIAL_BACKENDS, Choice, TuningTable

_FEW_ROWS = (1, 2, 4)
_MANY_ROWS = tuple(1 << power for power in range(3, 19))
_HALVES = (torch.bfloat16, torch.float16)
# Above, skipping pairs in attention over a cache saves less than noise.
_NEARLY_ALL = 0.95
ONE_SORT = "gemm_k_rows"
"""Operator under whose name tables keep the K-axis product over one sort, faster under independent masks or not."""
# Of the dense time: what an estimate for other masks than those measured has to promise.
_PROMISE = 0.95
# Hidden sizes that the Hopper kernels take are multiples of it.
_WIDTH_STEP = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """What measurements of a layer's operators depend on.

    Args:
        hidden_size: D.
        query_width: H_q d.
        head_dim: d.
        num_kv_heads: H_k.
        attention_groups: N_G of the attention half.
        ffn_width: F.
        ffn_groups: N_G of the FFN half.
        is_gated: Whether the FFN has a gate.
        is_stacked: Whether the up weight lies right behind the gate weight in memory.
    """

    hidden_size: int
    query_width: int
    head_dim: int
    num_kv_heads: int
    attention_groups: int
    ffn_width: int
    ffn_groups: int
    is_gated: bool
    is_stacked: bool


def measured_table(
    sizes: LayerSizes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    executed: tuple[float, float] = (0.5, 0.5),
    left: float | None = None,
    tuning: TuningTable | None = None,
) -> OperatorTable:
    """Return the table of measured choices; what has not been measured, or not been faster, is dense.

    Where `left` is known, the down product over one sort is taken if its measured time, less what these masks spare
    tiles beyond the measured ones, promises to be a twentieth below that of the dense product.

    Args:
        sizes: Of the layer.
        device: Where it runs.
        dtype: Of its weights.
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN.
        left: Share of the FFN's groups that tiles of rows in one order execute (`left_to_tiles`); None = unknown.
        tuning: The measurements; None takes the user's own, then those that ship with the package.

    Raises:
        ConfigError: If a share lies outside [0, 1].
    """
    if any(not 0.0 <= share <= 1.0 for share in executed):
        raise ConfigError(f"executed shares must lie in [0, 1], got {executed}; (0.5, 0.5) skips half of the work")
    if triton_obstacle(device) is not None or dtype not in _HALVES:
        return dense_table()
    known = tuning or TuningTable()
    rules: list[tuple[str, Rules]] = []
    for name in OPERATORS:
        active = executed[0] if name in ("query", "attention", "output") else executed[1]
        found = [(1, DENSE)] if name == "attention" else _few(name, sizes, known, device, active)
        found += _many(name, sizes, known, device, active, left if name == "down" else None)
        rules.append((name, _merged(found)))
    # Groups finer than a KV head leave keys to be read for the heads that stay: measured slower than dense.
    whole_heads = sizes.num_kv_heads % sizes.attention_groups == 0
    skips_cache = executed[0] < _NEARLY_ALL and whole_heads and known.knows(device)
    return OperatorTable(backend="triton", cache=skips_cache, rules=tuple(rules))


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU runs dense products only whatever was measured, None if it need not."""
    reason = triton_obstacle(device)
    if reason is None and dtype not in _HALVES:
        reason = f"the kernels take float16 and bfloat16, this model is in {dtype}"
    return reason


def is_measured(
    device: torch.device,
    layers: Sequence[LayerSizes],
    *,
    executed: tuple[float, float] = (0.5, 0.5),
    tuning: TuningTable | None = None,
) -> bool:
    """Return whether anything is known of shapes near those of any layer, on this kind of device."""
    known = tuning or TuningTable()
    return known.knows(device) and any(_knows(sizes, known, device, executed) for sizes in layers)


def _knows(sizes: LayerSizes, known: TuningTable, device: torch.device, executed: tuple[float, float]) -> bool:
    """Return whether any linear operator of a layer was measured, dense winning included."""
    for name in OPERATORS:
        if name == "attention":
            continue
        active = executed[0] if name in ("query", "output") else executed[1]
        few, many = ("gemv_mn", "gemm_mn") if name in ("query", "gate_up") else ("gemv_k", "gemm_k")
        one, most = gemv_case(name, sizes, 1, active), gemm_case(name, sizes, _MANY_ROWS[-1], active)
        if known.nearest(few, device, one, fewer_rows=False) or known.nearest(many, device, most, fewer_rows=True):
            return True
    return False


def dense_table(backend: str = "torch") -> OperatorTable:
    """Return the table by which nothing skips: dense products, and zeros in skipped places."""
    every: tuple[tuple[str, Rules], ...] = tuple((name, ((1, DENSE),)) for name in OPERATORS)
    return OperatorTable(backend=backend, cache=False, rules=every)


def _few(
    name: OperatorName, sizes: LayerSizes, known: TuningTable, device: torch.device, active: float
) -> list[tuple[int, Choice]]:
    operator = "gemv_mn" if name in ("query", "gate_up") else "gemv_k"
    found = []
    for rows in _FEW_ROWS:
        # More rows need more groups, so a measurement of more rows is a safe guess for fewer, not the reverse.
        choice = known.nearest(operator, device, gemv_case(name, sizes, rows, active), fewer_rows=False)
        found.append((rows // 2 + 1, choice or DENSE))
    return found


def _many(
    name: OperatorName,
    sizes: LayerSizes,
    known: TuningTable,
    device: torch.device,
    active: float,
    left: float | None,
) -> list[tuple[int, Choice]]:
    found = []
    for rows in _MANY_ROWS:
        if name == "attention":
            operator, case = "attention_prefill", attention_case(sizes, rows, active)
        else:
            operator = "gemm_mn" if name in ("query", "gate_up") else "gemm_k"
            case = gemm_case(name, sizes, rows, active)
        start = 1 if name == "attention" and rows == _MANY_ROWS[0] else rows // 2 + 1
        choice = known.nearest(operator, device, case, fewer_rows=True) or DENSE
        if operator == "gemm_k" and choice.backend == "cuda" and not _sorts_alike(name, sizes, choice):
            # What one sort of few groups takes says nothing of many, and nothing but its kernel takes many.
            choice = DENSE
        if choice.backend in SPECIAL_BACKENDS and _misfits_hopper(name, sizes):
            # No specialised kernel takes them; the general one was measured slower, yet faster than dense.
            choice = dataclasses.replace(choice, backend="triton", tile=(), block_m=0)
        if choice.backend == "cuda" and not _runs_cuda(name, sizes):
            choice = dataclasses.replace(choice, backend="triton", tile=(), block_m=0)
        if operator == "gemm_k" and choice.tile and sizes.hidden_size % _columns(choice):
            # Measured for another width: the operator's own default fits.
            choice = dataclasses.replace(choice, tile=())
        if left is not None and (choice.backend == "dense" or choice.groups_per_block > PATTERN_GROUPS):
            choice = _one_sort(sizes, rows, left, known, device) or DENSE
        found.append((start, choice))
    return found


def _one_sort(sizes: LayerSizes, rows: int, left: float, known: TuningTable, device: torch.device) -> Choice | None:
    """Return the down product over one sort if it pays under masks that leave this share to tiles."""
    # Its time hangs on what tiles execute, not on the share of pairs: as if few did, so that any measurement will do.
    case = gemm_case("down", sizes, rows, 0.0)
    found = known.nearest(ONE_SORT, device, case, fewer_rows=True)
    if found is None or not found.dense_us:
        return None
    promised = found.median_us / found.dense_us - (found.left_to_tiles - left)
    return found if promised <= _PROMISE and _sorts_alike("down", sizes, found) else None


def _misfits_hopper(name: OperatorName, sizes: LayerSizes) -> bool:
    """Return whether width or groups are none that any kernel for Hopper takes."""
    if sizes.hidden_size % _WIDTH_STEP or name == "attention":
        return sizes.hidden_size % _WIDTH_STEP != 0
    width, groups = _grouped(name, sizes)
    return width // groups % HOPPER_STEP != 0


def _runs_cuda(name: OperatorName, sizes: LayerSizes) -> bool:
    """Return whether the kernel in CUDA C++ takes a layer's groups and can be compiled here."""
    width, groups = _grouped(name, sizes)
    if name in ("output", "down"):
        fits = groups > PATTERN_GROUPS or fits_stored(width // groups, groups, sizes.hidden_size)
    else:
        fits = fits_cluster(width // groups, gated=name == "gate_up" and sizes.is_gated)
    if not fits:
        return False
    missing = native_obstacle()
    if missing is not None:
        _warn_of(missing, "the Triton kernel")
    return missing is None


def _sorts_alike(name: OperatorName, sizes: LayerSizes, choice: Choice) -> bool:
    """Return whether a layer's rows are sorted as where a kernel in CUDA C++ was measured, and many groups run here."""
    width, groups = _grouped(name, sizes)
    if groups <= PATTERN_GROUPS or choice.groups_per_block <= PATTERN_GROUPS:
        return groups <= PATTERN_GROUPS and choice.groups_per_block <= PATTERN_GROUPS
    if not fits_rows(width // groups, groups, sizes.hidden_size):
        return False
    missing = native_obstacle()
    if missing is not None:
        _warn_of(missing, "the dense product")
    return missing is None


@functools.cache
def _warn_of(missing: str, instead: str) -> None:
    """Say once that something slower runs."""
    warnings.warn(
        f"wide: {missing}; {instead} runs instead of one in CUDA C++, which was measured faster", stacklevel=2
    )


def _columns(choice: Choice) -> int:
    """Return the output columns of a GEMM-K tile."""
    return choice.tile[1 if choice.backend in SPECIAL_BACKENDS else 0]


def gemm_case(name: OperatorName, sizes: LayerSizes, rows: int, active: float) -> Case:
    """Return the case of a linear operator over many rows, as the operator bench names it."""
    width, groups = _grouped(name, sizes)
    extents = {"num_rows": rows, "num_groups": groups, "group_size": width // groups}
    if name in ("output", "down"):
        return Case(sizes={**extents, "width": sizes.hidden_size}, dtype=torch.bfloat16, active=active)
    gated = name == "gate_up" and sizes.is_gated
    options = {"gated": True} if gated else {}
    if gated and sizes.is_stacked:
        options["stacked"] = True
    return Case(sizes={**extents, "depth": sizes.hidden_size}, dtype=torch.bfloat16, active=active, options=options)


def gemv_case(name: OperatorName, sizes: LayerSizes, rows: int, active: float) -> Case:
    """Return the case of a linear operator over one to four rows."""
    assert rows <= MAX_ROWS
    width, groups = _grouped(name, sizes)
    extents = {"num_rows": rows, "num_groups": groups, "group_size": width // groups}
    if name in ("output", "down"):
        return Case(sizes={**extents, "width_out": sizes.hidden_size}, dtype=torch.bfloat16, active=active)
    options = {"is_gated": True} if name == "gate_up" and sizes.is_gated else {}
    return Case(sizes={**extents, "width_in": sizes.hidden_size}, dtype=torch.bfloat16, active=active, options=options)


def attention_case(sizes: LayerSizes, length: int, active: float) -> Case:
    """Return the case of causal prefill attention over one sequence."""
    extents = {
        "num_rows": length,
        "num_query_heads": sizes.query_width // sizes.head_dim,
        "num_kv_heads": sizes.num_kv_heads,
        "num_groups": sizes.attention_groups,
        "head_dim": sizes.head_dim,
    }
    return Case(sizes=extents, dtype=torch.bfloat16, active=active)


def _grouped(name: OperatorName, sizes: LayerSizes) -> tuple[int, int]:
    if name in ("gate_up", "down"):
        return sizes.ffn_width, sizes.ffn_groups
    return sizes.query_width, sizes.attention_groups


def _merged(found: list[tuple[int, Choice]]) -> Rules:
    """Drop rules that repeat the one before."""
    kept: list[tuple[int, Choice]] = []
    for start, choice in found:
        if not kept or not _same(kept[-1][1], choice):
            kept.append((start, choice))
    return tuple(kept)


def _same(first: Choice, second: Choice) -> bool:
    return (first.backend, first.tile, first.block_m, first.groups_per_block) == (
        second.backend,
        second.tile,
        second.block_m,
        second.groups_per_block,
    )
