"""Several comparisons of one model on one text as one, for a common table and common figures."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from wide.errors import DataError
from wide.records import Record
from wide.report.cell_speeds import CellSpeed
from wide.report.cells import Cell, read_subject
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, TASK, Comparison, Row
from wide.report.selection import Selection

_SAME = ("model", "held-out text")
_DECISIVE = ("target", "data")
_OF_LORA = ("LoRA", "data")
_JOINED = ("description", "data", "target", "LoRA", "command")
# Of the same model on the same text, on GPUs of one kind.
_TOLERANCE = 2e-3


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
    renamed = {
        name: [moved for record in each.run.records if (moved := _renamed(record, name, shown, adapted)) is not None]
        for name, each in comparisons.items()
    }
    chosen = _choose(renamed, {DENSE, *adapted.values()})
    owners_of = chosen.by_subject
    cells = [record for name, records in renamed.items() for record in records if owners_of[record.subject] == name]
    speeds: list[CellSpeed] = []
    for name, each in comparisons.items():
        for speed in each.speeds:
            cell = replace(speed.cell, method=shown.get((name, speed.cell.method), ""))
            # The speed of another checkpoint than the one whose quality counts says nothing.
            if owners_of.get(cell.subject(recovered=False)) == name:
                speeds.append(CellSpeed(cell, speed.forward))
    notes = [*(f"{name}: {note}" for name, each in comparisons.items() for note in each.run.notes), *chosen.notes]
    notes += _partners(shown, adapted)
    origins = [origin for each in comparisons.values() for origin in each.run.origins]
    run = Selection([*_grid(comparisons, list(dict.fromkeys(shown.values()))), *cells], notes, origins)
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


def _partners(shown: Mapping[tuple[str, str], str], adapted: Mapping[str, str]) -> Iterator[str]:
    """Yield a note which rows each dense model with LoRA belongs to, where there are several."""
    if len(set(adapted.values())) < 2:
        return
    parts = []
    for dense in dict.fromkeys(adapted.values()):
        rows = dict.fromkeys(row for (name, _), row in shown.items() if adapted.get(name) == dense)
        parts.append(f"{dense} + LoRA has that of {', '.join(rows) or 'no other row'}")
    yield f"rows differ in LoRA: {'; '.join(parts)}; 'x dense' and retention are over dense without LoRA in every row"


def _shown(comparisons: Mapping[str, Comparison], owners: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return what each row is called on the common page, by the comparison's name and its own: alike rows alike."""
    groups: dict[str, list[list[str]]] = {}
    for name, method in owners:
        alike = next(
            (
                group
                for group in groups.setdefault(method, [])
                if all(_is_alike(comparisons[one], comparisons[name], method) for one in group)
            ),
            None,
        )
        if alike is None:
            groups[method].append([name])
        else:
            alike.append(name)
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
    settings = [_settings(each, method) for each in (one, other)]
    facts = [[each.run.text("run", fact) for fact in _DECISIVE] for each in (one, other)]
    loras = {each.run.text("run", "LoRA") for each in (one, other) if any(row.recovered for row in each.rows)}
    if None in settings or facts[0] != facts[1] or len(loras) > 1:
        return False
    training = [_training(each, method) for each in (one, other)]
    if all(training) and training[0] != training[1]:
        return False
    return not all(settings) or settings[0] == settings[1]


def _training(comparison: Comparison, method: str) -> set[str]:
    found = [comparison.training(method, sparsity) for sparsity in comparison.sparsities]
    return {json.dumps(each, sort_keys=True) for each in found if each is not None}


def _settings(comparison: Comparison, method: str) -> set[str] | None:
    """Return settings and training tokens of a row's finished cells, None where they are not known."""
    found = set()
    for sparsity in comparison.sparsities:
        for seed in comparison.seeds(Row(method, False), sparsity):
            subject = Cell(method, sparsity, seed).subject(recovered=False)
            settings = comparison.run.content(subject, "settings")
            if settings is None:
                return None
            plain = {name: value for name, value in settings.items() if name != "seed"}
            trained = comparison.run.number(subject, "method.tokens_backward")
            found.add(json.dumps([plain, trained], sort_keys=True))
    return found


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which comparison's records count, by their subject, and in words which finished cells do not."""

    by_subject: dict[str, str]
    notes: list[str]


def _choose(renamed: Mapping[str, Sequence[Record]], dense: Collection[str]) -> _Choice:
    """Choose for each cell one comparison, so that both its stages are of one training, where one has both.

    Of several it is the last, for cells of these dense rows that with the most tasks, without which no row has a
    retention, or the first of those.
    """
    finished = _finished(renamed)
    tasks = _tasks(renamed, finished)
    by_subject: dict[str, str] = {}
    replaced: dict[tuple[str, str], list[Cell]] = {}
    remarks: list[str] = []
    for cell, by_name in finished.items():
        if cell.method in dense:
            names = sorted(by_name, key=lambda name: -tasks[cell, name])
        else:
            # Where nothing is finished, the first says why.
            names = list(reversed(by_name)) if any(by_name.values()) else list(by_name)
        every = set().union(*by_name.values())
        whole = next((name for name in names if by_name[name] == every), None)
        owners = {
            stage: whole or next((name for name in names if stage in by_name[name]), names[0])
            for stage in (False, True)
        }
        by_subject |= {cell.subject(recovered=stage): name for stage, name in owners.items()}
        if whole is None:
            calibrated, adapted = owners[False], owners[True]
            remarks.append(f"{cell.title}: calibrated of {calibrated}, LoRA of {adapted}, because none has both")
        elif cell.method in dense:
            if tasks[cell, whole] < tasks[cell, names[0]]:
                remarks.append(f"{cell.title}: of {whole}, without tasks that {names[0]} has, which lacks a stage")
        else:
            for name in names:
                if name != whole and by_name[name]:
                    replaced.setdefault((whole, name), []).append(cell)
    order = list(renamed)
    return _Choice(by_subject, [*_told(replaced, order), *remarks])


def _finished(renamed: Mapping[str, Sequence[Record]]) -> dict[Cell, dict[str, set[bool]]]:
    """Return which stages of each cell each comparison that knows it has finished; True is LoRA."""
    found: dict[Cell, dict[str, set[bool]]] = {}
    for name, records in renamed.items():
        for record in records:
            key = read_subject(record.subject)
            assert key is not None
            cell, recovered = key
            stages = found.setdefault(cell, {}).setdefault(name, set())
            # A later status of the same stage replaces the earlier one.
            if record.metric == "status":
                (stages.add if record.value == FINISHED else stages.discard)(recovered)
    return found


def _tasks(
    renamed: Mapping[str, Sequence[Record]], finished: Mapping[Cell, Mapping[str, Collection[bool]]]
) -> Counter[tuple[Cell, str]]:
    """Return how many accuracies each comparison has of the finished stages of each cell."""
    found: set[tuple[Cell, str, bool, str]] = set()
    for name, records in renamed.items():
        for record in records:
            key = read_subject(record.subject)
            if key is not None and record.metric.startswith(TASK) and key[1] in finished[key[0]][name]:
                found.add((key[0], name, key[1], record.metric))
    return Counter((cell, name) for cell, name, *_ in found)


def _told(replaced: Mapping[tuple[str, str], Sequence[Cell]], order: Sequence[str]) -> Iterator[str]:
    for (counts, left_out), cells in replaced.items():
        why = "" if order.index(counts) > order.index(left_out) else ", which lacks a stage of them"
        yield f"cells of {counts} count, not those of {left_out}{why}: {', '.join(cell.title for cell in cells)}"


def _renamed(
    record: Record, name: str, shown: Mapping[tuple[str, str], str], adapted: Mapping[str, str]
) -> Record | None:
    """Return a cell's record under its row's new name, None for records of other things and of rows not shown."""
    found = read_subject(record.subject)
    if found is None:
        return None
    cell, recovered = found
    if cell.method == DENSE:
        method: str | None = adapted.get(name, DENSE) if recovered else DENSE
    else:
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
    groups = {each.run.number("run", "model.attention_group_size") for each in comparisons.values()} - {None}
    return [
        *(
            Record(subject="run", metric="model.attention_group_size", value=size)
            for size in groups
            if size is not None
        ),
        *(
            Record(subject="run", metric=metric, value=value, unit="text", versions=versions)
            for metric, value in facts.items()
            if value
        ),
        Record(subject="run", metric="grid.recovers", value=float(recovers)),
    ]
