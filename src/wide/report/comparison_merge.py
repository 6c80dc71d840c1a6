"""Several comparisons of one model, one text and one LoRA as one, for a common table and common figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wide.errors import DataError
from wide.records import Cell, Record, Stage
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, Comparison, Row
from wide.report.figure import grouped
from wide.report.selection import Selection

_SAME, _OF_LORA = ("model", "held-out text"), ("LoRA", "data")
_JOINED = ("description", "data", "target", "LoRA", "command")
# Of the same model on the same text, on GPUs of one kind.
_TOLERANCE = 2e-3


def merge(comparisons: Mapping[str, Comparison], rows: Sequence[str] = ()) -> Comparison:
    """Return one comparison of all rows, or of those named.

    Rows of one name are one row where settings, training and target are the same, seeds aside; others get the
    comparison's name added. Of equal cells the last comparison's counts, of dense ones the first's that has all stages;
    notes say which cells do not count. Raises DataError if they are not of one model, text and LoRA, their dense models
    disagree, or a row is in none.
    """
    _require_same(comparisons)
    shown = _row_names(comparisons, rows)
    cells: dict[Cell, dict[str, list[Record]]] = {}
    for name, each in comparisons.items():
        for record in each.run.records:
            stage = record.subject
            if isinstance(stage, Stage) and (name, stage.cell.method) in shown:
                cell = replace(stage.cell, method=shown[name, stage.cell.method])
                renamed = replace(record, subject=Stage(cell, stage.recovered))
                cells.setdefault(cell, {}).setdefault(name, []).append(renamed)
    owner_of: dict[Cell, str] = {}
    left_out: dict[tuple[str, str], list[str]] = {}
    for cell, found in cells.items():
        # Both stages of a cell are of one training: that with the most, and of equal ones the last.
        stages = {name: sum((r.metric, r.value) == ("status", FINISHED) for r in each) for name, each in found.items()}
        owner = max(found if cell.method == DENSE else reversed(found), key=stages.__getitem__)
        owner_of[cell] = owner
        for name in found if cell.method != DENSE else ():
            if name != owner and stages[name]:
                left_out.setdefault((owner, name), []).append(cell.title)
    speeds = [
        (cell, forward)
        for name, each in comparisons.items()
        for own, forward in each.speeds
        # The speed of another checkpoint than the one whose quality counts says nothing.
        if owner_of.get(cell := replace(own, method=shown.get((name, own.method), ""))) == name
    ]
    run = Selection(
        [*_facts(comparisons, list(dict.fromkeys(shown.values()))[1:])]
        + [record for cell, name in owner_of.items() for record in cells[cell][name]],
        [f"cells of {counts} count, not those of {name}: {', '.join(t)}" for (counts, name), t in left_out.items()],
    )
    origins = {
        origin.path: replace(origin, notes=[f"{name}: {note}" for note in origin.notes])
        for name, each in comparisons.items()
        for origin in each.origins
    }
    return Comparison(run, speeds, list(origins.values()))


def _row_names(comparisons: Mapping[str, Comparison], rows: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the common name of each comparison's rows, by comparison and method; the dense ones first."""
    methods = {name: dict.fromkeys(row.method for row in each.rows) for name, each in comparisons.items()}
    known = dict.fromkeys(method for found in methods.values() for method in found if method != DENSE)
    lacking = [row for row in rows if row not in known]
    if lacking:
        raise DataError(f"no row {', '.join(lacking)}; there are {', '.join(known)}")
    shown = {(name, DENSE): DENSE for name in comparisons}
    for method in rows or known:
        ways = {name: _way(comparisons[name], method, name) for name, found in methods.items() if method in found}
        groups = grouped(ways, ways.__getitem__)
        unfinished = groups.pop("", [])
        groups.setdefault(next(iter(groups), ""), []).extend(unfinished)
        for group in groups.values():
            joined = method if len(groups) == 1 else f"{method} ({', '.join(group)})"
            shown |= {(name, method): joined for name in group}
    return shown


def _way(comparison: Comparison, method: str, name: str) -> str:
    """Return what rows of one name must share to be one row; empty where nothing of a row is finished."""
    sparsities = [each for each in comparison.sparsities if comparison.finished(Row(method, False), each)]
    if not sparsities:
        return ""
    settings = next(filter(None, (comparison.settings(method, sparsity) for sparsity in sparsities)), {"of": name})
    facts = {fact: comparison.run.text("run", fact) for fact in ("target", "data")}
    return json.dumps({**settings, **facts, "seed": None}, sort_keys=True)


def _require_same(comparisons: Mapping[str, Comparison]) -> None:
    with_lora = {name: each for name, each in comparisons.items() if any(row.recovered for row in each.rows)}
    for facts, found in ((_SAME, comparisons), (_OF_LORA, with_lora)):
        for fact in facts:
            texts = _texts(found, fact)
            if len(set(texts.values())) > 1:
                told = "; ".join(f"{name}: {text or 'unknown'}" for name, text in texts.items())
                raise DataError(f"comparisons of different {fact} cannot share tables ({told}); draw each by itself")
    values = {name: each.value(Row(DENSE, False), 0.0, PERPLEXITY) for name, each in comparisons.items()}
    dense = {name: value.mean for name, value in values.items() if value is not None}
    if dense and max(dense.values()) > (1.0 + _TOLERANCE) * min(dense.values()):
        told = ", ".join(f"{name} {value:.4f}" for name, value in dense.items())
        raise DataError(f"the dense models' perplexities differ ({told}), so the comparisons are not of one text")


def _facts(comparisons: Mapping[str, Comparison], methods: Sequence[str]) -> list[Record]:
    """Return the records of the run that the common page is of: the first one's, what they differ in joined."""
    first = [record for record in next(iter(comparisons.values())).run.records if record.subject == "run"]
    changed: dict[str, Any] = {
        "grid.methods": list(methods),
        "grid.sparsities": sorted({sparsity for each in comparisons.values() for sparsity in each.sparsities}),
        "grid.recovers": float(any(row.recovered for each in comparisons.values() for row in each.rows)),
    }
    for fact in _JOINED:
        texts = _texts(comparisons, fact)
        said = grouped(texts, texts.__getitem__)
        if len(said) > 1:
            changed[fact] = "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())
    return [*first, *(Record(subject="run", metric=name, value=value) for name, value in changed.items())]


def _texts(comparisons: Mapping[str, Comparison], fact: str) -> dict[str, str]:
    return {name: each.run.text("run", fact) for name, each in comparisons.items()}
