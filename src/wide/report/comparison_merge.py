"""Several comparisons of one model on one text as one, for a common table and common figures."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from wide.errors import DataError
from wide.records import Cell, Record, Stage
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, TASK, CellSpeed, Comparison, Row
from wide.report.selection import Selection

_SAME = ("model", "held-out text")
_DECISIVE = ("target", "data")
_OF_LORA = ("LoRA", "data")
_JOINED = ("description", "data", "target", "LoRA", "command")
_OWN_GROUP = "model.attention_group_size"
# Of the same model on the same text, on GPUs of one kind.
_TOLERANCE = 2e-3
_Names = Mapping[tuple[str, str], str]


def merge(comparisons: Mapping[str, Comparison], rows: Sequence[str] = ()) -> Comparison:
    """Return one comparison of all rows.

    Rows of one name, settings, training, target, LoRA and training tokens are one row; of equal cells the last
    comparison's counts that has all their finished stages, of dense ones that with the most tasks, or the first of
    several, and notes say which others do not. Other rows of one name get the comparison's name added. The dense model
    with LoRA is a row for each LoRA, with a note which rows it belongs to.

    Args:
        comparisons: By name, in their order.
        rows: Names of the rows that are kept; none means all.

    Raises:
        DataError: If they are not of one model and text, their dense models disagree, or a row is in none of them.
    """
    _require_same(comparisons)
    owners = [(name, method) for name, each in comparisons.items() for method in _methods(each)]
    lacking = [row for row in rows if row not in {method for _, method in owners}]
    if lacking:
        raise DataError(f"no row {', '.join(lacking)}; there are {', '.join(dict.fromkeys(m for _, m in owners))}")
    shown = _shown(comparisons, [owner for owner in owners if not rows or owner[1] in rows])
    adapted = _adapted(comparisons)
    cells = {
        name: [moved for record in each.run.records if (moved := _renamed(record, name, shown, adapted)) is not None]
        for name, each in comparisons.items()
    }
    owner_of, notes = _choose(cells, {DENSE, *adapted.values()})
    kept = [record for name, records in cells.items() for record in records if owner_of[record.subject] == name]
    speeds = []
    for name, each in comparisons.items():
        for speed in each.speeds:
            cell = replace(speed.cell, method=shown.get((name, speed.cell.method), ""))
            # The speed of another checkpoint than the one whose quality counts says nothing.
            if owner_of.get(cell.subject(recovered=False)) == name:
                speeds.append(CellSpeed(cell, speed.forward))
    earlier = [f"{name}: {note}" for name, each in comparisons.items() for note in each.run.notes]
    run = Selection(
        [*_grid(comparisons, list(dict.fromkeys(shown.values()))), *kept],
        [*earlier, *notes, *_partners(shown, adapted)],
        list({origin.path: origin for each in comparisons.values() for origin in each.run.origins}.values()),
    )
    speed_origins = [origin for each in comparisons.values() for origin in each.speed_origins]
    return Comparison(run, speeds, speed_origins, list(dict.fromkeys(adapted.values())) or [DENSE])


def _methods(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(row.method for row in comparison.rows if not comparison.is_dense(row)))


def _adapted(comparisons: Mapping[str, Comparison]) -> dict[str, str]:
    """Return what the dense model with LoRA is called on the common page, by comparison with LoRA: equal LoRA alike."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, each in comparisons.items():
        if any(row.recovered for row in each.rows):
            groups.setdefault(tuple(each.run.text("run", fact) for fact in _OF_LORA), []).append(name)
    return {
        name: DENSE if len(groups) == 1 else f"{DENSE} ({', '.join(group)})"
        for group in groups.values()
        for name in group
    }


def _partners(shown: _Names, adapted: Mapping[str, str]) -> Iterator[str]:
    """Yield a note which rows each dense model with LoRA belongs to, where there are several."""
    if len(set(adapted.values())) < 2:
        return
    parts = []
    for dense in dict.fromkeys(adapted.values()):
        rows = dict.fromkeys(row for (name, _), row in shown.items() if adapted.get(name) == dense)
        parts.append(f"{dense} + LoRA has that of {', '.join(rows) or 'no other row'}")
    yield f"rows differ in LoRA: {'; '.join(parts)}; 'x dense' and retention are over dense without LoRA in every row"


def _shown(comparisons: Mapping[str, Comparison], owners: Sequence[tuple[str, str]]) -> _Names:
    """Return what each row is called on the common page, by the comparison's name and its own: alike rows alike."""
    groups: dict[str, list[list[str]]] = {}
    for name, method in owners:
        for group in groups.setdefault(method, []):
            if all(_is_alike(comparisons[one], comparisons[name], method) for one in group):
                group.append(name)
                break
        else:
            groups[method].append([name])
    return {
        (name, method): method if len(groups[method]) == 1 else f"{method} ({', '.join(group)})"
        for name, method in owners
        for group in groups[method]
        if name in group
    }


def _is_alike(one: Comparison, other: Comparison, method: str) -> bool:
    """Return whether rows of one name are of the same settings, seeds aside; False where records do not say.

    A row without finished cells is like any other of the same target. How routers were trained tells rows apart where
    both say it, which older records do not.
    """
    loras = {each.run.text("run", "LoRA") for each in (one, other) if any(row.recovered for row in each.rows)}
    if len(loras) > 1 or any(one.run.text("run", fact) != other.run.text("run", fact) for fact in _DECISIVE):
        return False
    settings, training = ([_set_to(each, method)[part] for each in (one, other)] for part in (0, 1))
    if any("null" in found for found in settings) or (all(training) and training[0] != training[1]):
        return False
    return not all(settings) or settings[0] == settings[1]


def _set_to(comparison: Comparison, method: str) -> tuple[set[str], set[str]]:
    """Return settings with training tokens, and ways of training, of a row's finished cells; 'null' is not known."""
    settings, training = set(), set()
    for sparsity in comparison.sparsities:
        for stage in comparison.finished(Row(method, False), sparsity):
            found = comparison.run.content(stage, "settings")
            plain = found and {name: value for name, value in found.items() if name != "seed"}
            trained = comparison.run.number(stage, "method.tokens_backward")
            settings.add("null" if found is None else json.dumps([plain, trained], sort_keys=True))
        way = comparison.training(method, sparsity)
        training |= set() if way is None else {json.dumps(way, sort_keys=True)}
    return settings, training


def _choose(cells: Mapping[str, Sequence[Record]], dense: Collection[str]) -> tuple[dict[object, str], list[str]]:
    """Return which comparison's records count, by subject, and in words which finished cells do not.

    One comparison is chosen for both stages of a cell, so that they are of one training, where one has both. Of several
    it is the last, for cells of these dense rows that with the most tasks, without which no row has a retention, or the
    first of those.
    """
    finished: dict[Cell, dict[str, dict[bool, set[str]]]] = {}
    for name, records in cells.items():
        for record in records:
            assert isinstance(record.subject, Stage)
            stages = finished.setdefault(record.subject.cell, {}).setdefault(name, {})
            # A later status of the same stage replaces the earlier one.
            if record.metric == "status" and record.value != FINISHED:
                stages.pop(record.subject.recovered, None)
            elif record.metric == "status":
                own = [r.metric for r in records if r.subject == record.subject and r.metric.startswith(TASK)]
                stages[record.subject.recovered] = set(own)
    owner_of: dict[object, str] = {}
    replaced: dict[tuple[str, str], list[Cell]] = {}
    remarks: list[str] = []
    for cell, by_name in finished.items():
        tasks = {name: sum(map(len, stages.values())) for name, stages in by_name.items()}
        if cell.method in dense:
            names = sorted(by_name, key=lambda name: -tasks[name])
        else:
            # Where nothing is finished, the first says why.
            names = list(reversed(by_name)) if any(by_name.values()) else list(by_name)
        every = {stage for stages in by_name.values() for stage in stages}
        whole = next((name for name in names if set(by_name[name]) == every), None)
        for stage in (False, True):
            owner_of[cell.subject(recovered=stage)] = whole or next((n for n in names if stage in by_name[n]), names[0])
        if whole is None:
            calibrated, lora = (owner_of[cell.subject(recovered=stage)] for stage in (False, True))
            remarks.append(f"{cell.title}: calibrated of {calibrated}, LoRA of {lora}, because none has both")
        elif cell.method not in dense:
            for name in names:
                if name != whole and by_name[name]:
                    replaced.setdefault((whole, name), []).append(cell)
        elif tasks[whole] < tasks[names[0]]:
            remarks.append(f"{cell.title}: of {whole}, without tasks that {names[0]} has, which lacks a stage")
    order = list(cells)
    told = [
        f"cells of {counts} count, not those of {left_out}"
        f"{'' if order.index(counts) > order.index(left_out) else ', which lacks a stage of them'}: "
        f"{', '.join(cell.title for cell in several)}"
        for (counts, left_out), several in replaced.items()
    ]
    return owner_of, [*told, *remarks]


def _renamed(record: Record, name: str, shown: _Names, adapted: Mapping[str, str]) -> Record | None:
    """Return a cell's record under its row's new name, None for records of other things and of rows not shown."""
    if not isinstance(record.subject, Stage):
        return None
    cell, recovered = record.subject.cell, record.subject.recovered
    if cell.method == DENSE:
        method: str | None = adapted.get(name, DENSE) if recovered else DENSE
    else:
        method = shown.get((name, cell.method))
    return None if method is None else replace(record, subject=Stage(replace(cell, method=method), recovered))


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
    """Return the records of the run that the common page is of."""
    first = next(iter(comparisons.values())).run
    facts = {fact: first.text("run", fact) for fact in _SAME}
    for fact in _JOINED:
        said: dict[str, list[str]] = {}
        for name, each in comparisons.items():
            said.setdefault(each.run.text("run", fact), []).append(name)
        facts[fact] = (
            next(iter(said)) if len(said) == 1 else "; ".join(f"{', '.join(of)}: {text}" for text, of in said.items())
        )
    versions = next((record.versions for record in first.records if record.versions), None)
    groups = {each.run.number("run", _OWN_GROUP) for each in comparisons.values()}
    recovers = any(row.recovered for each in comparisons.values() for row in each.rows)
    numbers = [(_OWN_GROUP, size) for size in groups if size is not None] + [("grid.recovers", float(recovers))]
    sparsities = sorted({sparsity for each in comparisons.values() for sparsity in each.sparsities})
    return [
        *(Record(subject="run", metric=name, value=text, versions=versions) for name, text in facts.items() if text),
        *(Record(subject="run", metric=name, value=number) for name, number in numbers),
        Record(subject="run", metric="grid.methods", value=list(methods), versions=versions),
        Record(subject="run", metric="grid.sparsities", value=sparsities),
    ]
