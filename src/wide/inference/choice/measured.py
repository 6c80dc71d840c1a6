"""Operator tables made from measurements: for each operator the fastest way at every number of tokens."""

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from wide.errors import ConfigError
from wide.inference.choice.layer_sizes import LayerSizes, backends_and_shape, misfit, operator_case
from wide.inference.operators.table import DENSE, DENSE_TABLE, OPERATORS, SUMS, OperatorName, OperatorTable, Rules
from wide.kernels.device import HALF, triton_obstacle
from wide.kernels.gemv.op import MAX_ROWS
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice, TuningTable

# Numbers of rows that a table tells apart.
_ROWS = (1, 2, *(1 << power for power in range(2, 19)))
# Above, skipping pairs in attention over a cache saves less than noise.
_NEARLY_ALL = 0.95
ONE_SORT = "gemm_k_rows"
"""Operator under whose name tables keep the K-axis product over one sort, faster under independent masks or not."""
# Of the dense time: what an estimate for other masks than those measured has to promise.
_PROMISE = 0.95


def measured_table(
    sizes: LayerSizes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    executed: tuple[float, float] = (0.5, 0.5),
    left: float | None = None,
) -> OperatorTable:
    """Return the table of measured choices; what has not been measured, or not been faster, is dense.

    Measurements are the user's own, then those that ship with the package. Where `left` is known, the down product over
    one sort is taken if its measured time, less what these masks spare tiles beyond the measured ones, promises to be a
    twentieth below that of the dense product. Raises ConfigError if a share lies outside [0, 1].

    Args:
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN.
        left: Share of the FFN's groups that tiles of rows in one order execute (`left_to_tiles`); None = unknown.
    """
    if any(not 0.0 <= share <= 1.0 for share in executed):
        raise ConfigError(f"executed shares must lie in [0, 1], got {executed}; (0.5, 0.5) skips half of the work")
    if obstacle(device, dtype) is not None:
        return DENSE_TABLE
    known = TuningTable()
    rules: list[tuple[str, Rules]] = []
    for name in OPERATORS:
        active = _share(name, executed)
        alike = left if name == "down" else None
        found = [(1, DENSE)] if name == "attention" else []
        counts = [rows for rows in _ROWS if rows > MAX_ROWS or name != "attention"]
        found += [(rows // 2 + 1, _choose(name, sizes, rows, active, alike, known, device)) for rows in counts]
        # Rules that repeat the one before say nothing.
        kept = [rule for before, rule in pairwise(found) if before[1].kernel != rule[1].kernel]
        rules.append((name, (found[0], *kept)))
    # Groups finer than a KV head leave keys to be read for the heads that stay: measured slower than dense.
    whole_heads = sizes.num_kv_heads % sizes.attention_groups == 0
    skips_cache = executed[0] < _NEARLY_ALL and whole_heads and known.knows(device)
    return OperatorTable(backend="triton", cache=skips_cache, rules=tuple(rules))


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU runs dense products only whatever was measured, None if it need not."""
    reason = triton_obstacle(device)
    if reason is None and dtype not in HALF:
        reason = f"the kernels take float16 and bfloat16, this model is in {dtype}"
    return reason


def is_measured(
    device: torch.device, layers: Sequence[LayerSizes], *, executed: tuple[float, float] = (0.5, 0.5)
) -> bool:
    """Return whether any linear operator was measured near any layer's shapes on this kind of device, dense or not."""
    known = TuningTable()
    return known.knows(device) and any(
        known.nearest(*operator_case(name, sizes, rows, _share(name, executed)), device, fewer_rows=rows > MAX_ROWS)
        for sizes in layers
        for name in OPERATORS
        if name != "attention"
        # What prompts run carries over to every format.
        for rows in ((_ROWS[0], _ROWS[-1]) if sizes.weights == "model" else _ROWS[:1])
    )


def _share(name: OperatorName, executed: tuple[float, float]) -> float:
    return executed[0] if name in ("query", "attention", "output") else executed[1]


def _choose(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    left: float | None,
    known: TuningTable,
    device: torch.device,
) -> Choice:
    """Return what runs an operator of a layer: the first of the ranked choices whose kernel takes its shape."""
    # Few rows: more of them need more groups, so a measurement of more is a safe guess for fewer, not the reverse.
    few = rows <= MAX_ROWS and name != "attention"
    found = known.nearest(*operator_case(name, sizes, rows, active), device, fewer_rows=not few)
    if found is None and sizes.int8_rows(name):
        # What pays in halves pays in int8, too, of which dense products gain as much.
        halves = operator_case(name, replace(sizes, weights="model"), rows, active)
        found = None if few else known.nearest(*halves, device, fewer_rows=True)
    found = found or DENSE
    if few:
        missing = _missing(name, sizes, rows, found, device)
        if missing is not None:
            _warn_of(missing, "the Triton kernel")
            found = Choice(backend="triton")
        return found
    if left is not None and (found.backend == "dense" or found.groups_per_block > PATTERN_GROUPS):
        found = _one_sort(sizes, rows, left, known, device) or DENSE
    ranked = list(_ranked(name, sizes, found))
    for choice, behind in pairwise(ranked):
        if misfit(name, sizes, choice) is None:
            missing = _missing(name, sizes, rows, choice, device)
            if missing is None:
                return choice
            _warn_of(missing, "the dense product" if behind is DENSE else "the Triton kernel")
    return DENSE


def _missing(name: OperatorName, sizes: LayerSizes, rows: int, choice: Choice, device: torch.device) -> str | None:
    """Return what a measured choice needs that is not there, or None."""
    if choice.backend in ("dense", "triton"):
        return None
    one_sort = choice.groups_per_block > PATTERN_GROUPS
    backends, shape = backends_and_shape(name, sizes, rows, one_sort=one_sort)
    return backends.obstacle(choice.backend, device, shape)


def _ranked(name: OperatorName, sizes: LayerSizes, found: Choice) -> Iterator[Choice]:
    """Yield a measured choice, then what is to run where its kernel does not."""
    if found.backend == "dense":
        yield DENSE
        return
    if found.backend == "triton" and name in SUMS and found.tile and sizes.hidden_size % found.tile[0]:
        # Measured for another width: the operator's own default fits.
        found = replace(found, tile=())
    yield found
    groups = max(sizes.grouped(name)[1], found.groups_per_block)
    if found.backend != "triton" and (name not in SUMS or groups <= PATTERN_GROUPS):
        # The general kernel was measured slower, yet faster than dense; over many groups it was not.
        yield replace(found, backend="triton", tile=(), block_m=0)
    yield DENSE


def _one_sort(sizes: LayerSizes, rows: int, left: float, known: TuningTable, device: torch.device) -> Choice | None:
    """Return the down product over one sort if it pays under masks that leave this share to tiles."""
    # Its time hangs on what tiles execute, not on the share of pairs: as if few did, so that any measurement will do.
    _, case = operator_case("down", sizes, rows, 0.0)
    found = known.nearest(ONE_SORT, case, device, fewer_rows=True)
    if found is None or not found.dense_us:
        return None
    return found if found.median_us / found.dense_us - (found.left_to_tiles - left) <= _PROMISE else None


@functools.cache
def _warn_of(missing: str, instead: str) -> None:
    warnings.warn(f"wide: {missing}; {instead} runs instead of what was measured faster", stacklevel=2)
