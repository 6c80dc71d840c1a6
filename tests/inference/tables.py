"""Operator tables for small sizes, whose thresholds tests choose."""

from wide.inference.operators.table import DENSE, OperatorTable
from wide.kernels.gemv.op import MAX_ROWS
from wide.kernels.tuning import Choice


def fixed(backend="triton", *, query=512, attention=256, output=512, gate_up=512, down=None, few=None):
    """Return a table in which operators skip from so many rows on, None never, and `few` of them for 1 to 4 rows."""
    sparse, most = Choice(backend=backend), MAX_ROWS + 1
    starts = {"query": query, "attention": attention, "output": output, "gate_up": gate_up, "down": down}
    rules = []
    for name, start in starts.items():
        is_prompt = name == "attention"
        has_few = name in (("query", "output", "gate_up", "down") if few is None else few)
        found = [(1, sparse), (most, DENSE)] if has_few and not is_prompt else []
        if start is not None:
            found.append((start if is_prompt else max(start, most), sparse))
        rules.append((name, tuple(found)))
    return OperatorTable(backend=backend, rules=tuple(rules))
