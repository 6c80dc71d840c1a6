"""Several comparisons of one model on one text as one, for a common table and common figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wide.errors import DataError
from wide.records import Record
from wide.report.cell_speeds import CellSpeed
from wide.report.cells import Cell, read_subject
from wide.report.comparison import DENSE, PERPLEXITY, Comparison, Row
from wide.report.selection import Selection

_SAME = ("model", "held-out text")
_JOINED = ("description", "data", "target", "LoRA", "command")
# Of the same model on the same text, on GPUs of one kind.
_TOLERANCE = 2e-3


def merge(comparisons: Mapping[str, Comparison]) -> Comparison:
    """Return one comparison of all rows; rows of one name in several of them get the comparison's name added.

    The dense rows are those of the first comparison that has them.

    Args:
        comparisons: By name, in their order.

    Raises:
        DataError: If they are not of one model and text, or their dense models disagree.
    """
    _require_same(comparisons)
    owners = [(name, method) for name, each in comparisons.items() for method in _methods(each)]
    names = [method for _, method in owners]
    shown = {(name, method): f"{method} ({name})" if names.count(method) > 1 else method for name, method in owners}
    cells: list[Record] = []
    speeds: list[CellSpeed] = []
    known: set[str] = set()
    for name, each in comparisons.items():
        fresh = [record for record in each.run.records if record.subject not in known]
        known |= {record.subject for record in each.run.records if record.subject.startswith(f"{DENSE}/")}
        cells += [moved for record in fresh if (moved := _renamed(record, name, shown)) is not None]
        speeds += [
            CellSpeed(replace(s.cell, method=shown[name, s.cell.method]), s.forward)
            for s in each.speeds
            if (name, s.cell.method) in shown
        ]
    notes = [f"{name}: {note}" for name, each in comparisons.items() for note in each.run.notes]
    return Comparison(Selection([*_grid(comparisons, list(shown.values())), *cells], notes), speeds)


def _methods(comparison: Comparison) -> list[str]:
    return [method for method in dict.fromkeys(row.method for row in comparison.rows) if method != DENSE]


def _renamed(record: Record, name: str, shown: Mapping[tuple[str, str], str]) -> Record | None:
    """Return a cell's record under its row's new name, None for records of other things."""
    found = read_subject(record.subject)
    if found is None:
        return None
    cell, recovered = found
    if cell.method == DENSE:
        return record
    method = shown.get((name, cell.method))
    if method is None:
        return None
    return replace(record, subject=Cell(method, cell.sparsity, cell.seed).subject(recovered=recovered))


def _require_same(comparisons: Mapping[str, Comparison]) -> None:
    for fact in _SAME:
        values = {name: each.run.text("run", fact) for name, each in comparisons.items()}
        if len(set(values.values())) > 1:
            told = "; ".join(f"{name}: {value or 'unknown'}" for name, value in values.items())
            raise DataError(f"comparisons of different {fact} cannot share tables ({told}); draw each by itself")
    dense = {
        name: value.mean
        for name, each in comparisons.items()
        if (value := each.value(Row(DENSE, False), 0.0, PERPLEXITY)) is not None
    }
    if dense and max(dense.values()) > (1.0 + _TOLERANCE) * min(dense.values()):
        told = ", ".join(f"{name} {value:.4f}" for name, value in dense.items())
        raise DataError(f"the dense models' perplexities differ ({told}), so the comparisons are not of one text")


def _grid(comparisons: Mapping[str, Comparison], methods: Sequence[str]) -> list[Record]:
    first = next(iter(comparisons.values()))
    facts = {fact: first.run.text("run", fact) for fact in _SAME}
    for fact in _JOINED:
        said: dict[str, list[str]] = {}
        for name, each in comparisons.items():
            said.setdefault(each.run.text("run", fact), []).append(name)
        facts[fact] = (
            next(iter(said)) if len(said) == 1 else "; ".join(f"{', '.join(of)}: {text}" for text, of in said.items())
        )
    sparsities = sorted({sparsity for each in comparisons.values() for sparsity in each.sparsities})
    facts |= {"grid.methods": json.dumps(methods), "grid.sparsities": json.dumps(sparsities)}
    recovers = any(row.recovered for each in comparisons.values() for row in each.rows)
    versions = next((record.versions for record in first.run.records if record.versions), None)
    return [
        *(
            Record(subject="run", metric=metric, value=value, unit="text", versions=versions)
            for metric, value in facts.items()
            if value
        ),
        Record(subject="run", metric="grid.recovers", value=float(recovers)),
    ]
