"""Several comparisons of one model, one text and one LoRA as one, for a common table and common figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wide.errors import DataError
from wide.records import Cell, Record, Stage
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, Comparison, Row
from wide.report.selection import Selection

_SAME, _OF_LORA = ("model", "held-out text"), ("LoRA", "data")
_JOINED = ("description", "data", "target", "LoRA", "command")
# Of the same model on the same text, on GPUs of one kind.
_TOLERANCE = 2e-3


def merge(comparisons: Mapping[str, Comparison], rows: Sequence[str] = ()) -> Comparison:
    """Return one comparison of all rows.

    Rows of one name are one row where settings, training and target are the same, seeds aside; others get the
    comparison's name added. Of equal cells the last comparison's counts, of dense ones the first's that has all stages;
    notes say which cells do not count.

    Args:
        comparisons: By name, in their order.
        rows: Names of the rows that are kept; none means all.

    Raises:
        DataError: If they are not of one model, text and LoRA, their dense models disagree, or a row is in none.
    """
    _require_same(comparisons)
    methods = {name: list(dict.fromkeys(row.method for row in each.rows)) for name, each in comparisons.items()}
    known = dict.fromkeys(method for found in methods.values() for method in found if method != DENSE)
    lacking = [row for row in rows if row not in known]
    if lacking:
        raise DataError(f"no row {', '.join(lacking)}; there are {', '.join(known)}")
    shown = {(name, DENSE): DENSE for name in comparisons}
    for method in rows or known:
        groups: dict[str, list[str]] = {}
        for name in [name for name, found in methods.items() if method in found]:
            groups.setdefault(_way(comparisons[name], method, name), []).append(name)
        unfinished = groups.pop("", [])
        groups.setdefault(next(iter(groups), ""), []).extend(unfinished)
        for group in groups.values():
            joined = method if len(groups) == 1 else f"{method} ({', '.join(group)})"
            shown |= {(name, method): joined for name in group}
    cells = {name: _cells(each, name, shown) for name, each in comparisons.items()}
    owner_of, notes = _owners(cells)
    speeds = [
        (cell, forward)
        for name, each in comparisons.items()
        for own, forward in each.speeds
        # The speed of another checkpoint than the one whose quality counts says nothing.
        if owner_of.get(cell := replace(own, method=shown.get((name, own.method), ""))) == name
    ]
    run = Selection(
        [*_facts(comparisons, list(dict.fromkeys(shown.values()))[1:])]
        + [record for cell, name in owner_of.items() for record in cells[name][cell]],
        [*(f"{name}: {note}" for name, each in comparisons.items() for note in each.run.notes), *notes],
        list({origin.path: origin for each in comparisons.values() for origin in each.run.origins}.values()),
    )
    return Comparison(run, speeds, [origin for each in comparisons.values() for origin in each.speed_origins])


def _way(comparison: Comparison, method: str, name: str) -> str:
    """Return what rows of one name must share to be one row; empty where nothing of a row is finished."""
    sparsities = [each for each in comparison.sparsities if comparison.finished(Row(method, False), each)]
    if not sparsities:
        return ""
    settings = next(filter(None, (comparison.settings(method, sparsity) for sparsity in sparsities)), {"of": name})
    facts = {fact: comparison.run.text("run", fact) for fact in ("target", "data")}
    return json.dumps({**settings, **facts, "seed": None}, sort_keys=True)


def _cells(comparison: Comparison, name: str, shown: Mapping[tuple[str, str], str]) -> dict[Cell, list[Record]]:
    """Return the records of a comparison's cells under their rows' new names."""
    found: dict[Cell, list[Record]] = {}
    for record in comparison.run.records:
        if isinstance(record.subject, Stage) and (name, record.subject.cell.method) in shown:
            cell = replace(record.subject.cell, method=shown[name, record.subject.cell.method])
            found.setdefault(cell, []).append(replace(record, subject=Stage(cell, record.subject.recovered)))
    return found


def _owners(cells: Mapping[str, Mapping[Cell, Sequence[Record]]]) -> tuple[dict[Cell, str], list[str]]:
    """Return which comparison's records of a cell count, and in words which finished cells do not."""
    stages = {
        (cell, name): sum(record.metric == "status" and record.value == FINISHED for record in records)
        for name, found in cells.items()
        for cell, records in found.items()
    }
    owner_of: dict[Cell, str] = {}
    left_out: dict[tuple[str, str], list[str]] = {}
    for cell in dict.fromkeys(cell for cell, _ in stages):
        names = [name for name in cells if (cell, name) in stages]
        # Both stages of a cell are of one training: that with the most, and of equal ones the last.
        names.sort(key=lambda name: stages[cell, name])
        most = stages[cell, names[-1]]
        owner_of[cell] = (
            next(name for name in names if stages[cell, name] == most) if cell.method == DENSE else names[-1]
        )
        for name in names[:-1] if cell.method != DENSE else ():
            if stages[cell, name]:
                left_out.setdefault((names[-1], name), []).append(cell.title)
    told = [f"cells of {counts} count, not those of {other}: {', '.join(t)}" for (counts, other), t in left_out.items()]
    return owner_of, told


def _require_same(comparisons: Mapping[str, Comparison]) -> None:
    with_lora = {name: each for name, each in comparisons.items() if any(row.recovered for row in each.rows)}
    for facts, found in ((_SAME, comparisons), (_OF_LORA, with_lora)):
        for fact in facts:
            values = {name: each.run.text("run", fact) for name, each in found.items()}
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


def _facts(comparisons: Mapping[str, Comparison], methods: Sequence[str]) -> list[Record]:
    """Return the records of the run that the common page is of: the first one's, what they differ in joined."""
    first = [record for record in next(iter(comparisons.values())).run.records if record.subject == "run"]
    grid = {
        "grid.methods": list(methods),
        "grid.sparsities": sorted({sparsity for each in comparisons.values() for sparsity in each.sparsities}),
        "grid.recovers": float(any(row.recovered for each in comparisons.values() for row in each.rows)),
    }
    joined = {}
    for fact in _JOINED:
        said: dict[str, list[str]] = {}
        for name, each in comparisons.items():
            said.setdefault(each.run.text("run", fact), []).append(name)
        if len(said) > 1:
            joined[fact] = "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())
    changed: dict[str, Any] = grid | joined
    return [*first, *(Record(subject="run", metric=name, value=value) for name, value in changed.items())]
