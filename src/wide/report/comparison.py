"""What a comparison measured, by row and sparsity: means over seeds, errors, failures and deviations.

A row is a method, either after its calibration or with LoRA on top.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wide.errors import DataError
from wide.report.bootstrap import Windows, perplexity_error, ratio_error
from wide.report.cell_speeds import CellSpeed
from wide.report.cells import Cell, read_subject
from wide.report.figure import Origin
from wide.report.selection import Selection

DENSE = "dense"
FINISHED = "finished"
PERPLEXITY, RATIO, RETENTION = "token_perplexity", "token_perplexity.ratio", "accuracy.retention"
_ACCURACY, _WINDOWS = "accuracy.average", "token_perplexity.windows"
_STDERR = ".stderr"
_GROUP, _OWN_GROUP = "attention_group_size", "model.attention_group_size"
TASK = "accuracy."
"""Before the label of a single task in the name of its metric."""


@dataclass(frozen=True, slots=True)
class Row:
    """A method, calibrated only or with LoRA."""

    method: str
    recovered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A figure over the seeds of a cell.

    Args:
        mean: Over seeds.
        error: With one seed the standard error by bootstrap over windows of text, where there is one; with several the
            standard deviation between seeds.
        seeds: Number of seeds.
    """

    mean: float
    error: float | None
    seeds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A cell that could not be measured."""

    cell: Cell
    recovered: bool
    reason: str


class Comparison:
    """The records of one comparison.

    Args:
        run: Its records: those of all cells, and under the subject 'run' the grid that was asked for.
        speeds: Of its cells, where they were measured.
        speed_origins: The files of the speeds.
        adapted: What the dense model with LoRA is called, once for each LoRA that rows have.

    Attributes:
        sparsities: Targets, ascending.
        rows: All rows that were asked for, the dense ones first.

    Raises:
        DataError: If the records are not of a comparison.
    """

    def __init__(
        self,
        run: Selection,
        speeds: Sequence[CellSpeed] = (),
        speed_origins: Sequence[Origin] = (),
        adapted: Sequence[str] = (DENSE,),
    ) -> None:
        """Index the cells."""
        self.speed_origins = tuple(speed_origins)
        self.run = run
        self.speeds = tuple(speeds)
        methods: list[str] | None = run.content("run", "grid.methods")
        sparsities: list[float] | None = run.content("run", "grid.sparsities")
        if methods is None or sparsities is None:
            raise DataError(
                "these records are not of a comparison: no usable record 'grid.methods' or 'grid.sparsities' of the run"
            )
        self.sparsities = sorted(map(float, sparsities))
        stages = (False, True) if run.number("run", "grid.recovers") else (False,)
        self._dense_names = frozenset((DENSE, *adapted))
        self.rows = [Row(DENSE, False), *(Row(name, True) for name in adapted if True in stages)]
        self.rows += [Row(method, recovered) for method in methods for recovered in stages]
        self._cells: dict[tuple[Row, float], list[Cell]] = {}
        found = {record.subject: read_subject(record.subject) for record in run.records}
        for cell, recovered in sorted(key for key in found.values() if key is not None):
            self._cells.setdefault((Row(cell.method, recovered), cell.sparsity), []).append(cell)

    def is_dense(self, row: Row) -> bool:
        """Return whether a row is the dense model, with LoRA or without."""
        return row.method in self._dense_names

    def value(self, row: Row, sparsity: float, metric: str) -> Value | None:
        """Return a figure of a row, None where nothing was measured.

        Args:
            row: One of `rows`.
            sparsity: One of `sparsities`; the dense rows are the same at all of them.
            metric: As in the records, or `RATIO` or `RETENTION`, which are relative to the dense model.
        """
        subjects = self._finished(row, sparsity)
        one: Callable[[str], float | None] = {RATIO: self._ratio, RETENTION: self._retention}.get(
            metric, lambda subject: self.run.number(subject, metric)
        )
        numbers = [(subject, number) for subject in subjects if (number := one(subject)) is not None]
        if not numbers:
            return None
        values = [number for _, number in numbers]
        if len(values) > 1:
            finite = all(map(math.isfinite, values))
            return Value(
                mean=statistics.fmean(values), error=statistics.stdev(values) if finite else None, seeds=len(values)
            )
        return Value(mean=values[0], error=self._error(numbers[0][0], metric), seeds=1)

    def settings(self, method: str, sparsity: float) -> Mapping[str, Any]:
        """Return what a method was set to in its first cell at a sparsity, empty where no record says.

        A size of groups that is left to the model is the model's, if the run's 'model.attention_group_size' says it.
        """
        found: dict[str, Any] = next(filter(None, self._settings(method, sparsity)), {})
        own = self.run.number("run", _OWN_GROUP)
        if own is not None and _GROUP in found and found[_GROUP] is None:
            return {**found, _GROUP: int(own)}
        return found

    def _settings(self, method: str, sparsity: float) -> Iterator[dict[str, Any]]:
        for subject in self._finished(Row(method, False), sparsity):
            yield self.run.content(subject, "settings")

    def training(self, method: str, sparsity: float) -> Mapping[str, Any] | None:
        """Return how the routers of a method's first cell at a sparsity were trained, as far as not by default.

        None where no record says it: of methods without routers, and of older records.
        """
        subjects = self._finished(Row(method, False), sparsity)
        found = (self.run.content(subject, "training") for subject in subjects)
        return next((content for content in found if content is not None), None)

    def seeds(self, row: Row, sparsity: float) -> list[int]:
        """Return the seeds of a row that have been measured, ascending."""
        found = [read_subject(subject) for subject in self._finished(row, sparsity)]
        return sorted(key[0].seed for key in found if key is not None)

    def task_labels(self) -> list[str]:
        """Return what single tasks that were measured anywhere are called; with `TASK` before it, each is a metric."""
        found = {record.metric: None for record in self.run.records if read_subject(record.subject) is not None}
        return [
            metric.removeprefix(TASK)
            for metric in found
            if metric.startswith(TASK) and metric != _ACCURACY and not metric.endswith(_STDERR)
        ]

    def failures(self, row: Row | None = None, sparsity: float | None = None) -> list[Failure]:
        """Return the cells that failed, of one row and sparsity or of all."""
        found = []
        for (its_row, its_sparsity), cells in self._cells.items():
            if row is not None and (its_row, its_sparsity) != (row, 0.0 if self.is_dense(row) else sparsity):
                continue
            for cell in cells:
                status = self.run.text(cell.subject(recovered=its_row.recovered), "status")
                if status not in ("", FINISHED):
                    found.append(Failure(cell=cell, recovered=its_row.recovered, reason=status))
        return found

    def deviations(self, row: Row) -> list[str]:
        """Return where a row differs from the method's original, each sentence once.

        What holds at some of the measured sparsities only says at which.
        """
        where: dict[str, set[float]] = {}
        measured = set()
        for (its_row, sparsity), cells in self._cells.items():
            if its_row != row:
                continue
            measured.add(sparsity)
            for cell in cells:
                text = self.run.text(cell.subject(recovered=row.recovered), "deviations")
                for line in filter(None, text.split("\n")):
                    where.setdefault(line, set()).add(sparsity)
        return [
            line if found == measured else f"{line} (at {', '.join(f'{100 * s:.4g} %' for s in sorted(found))})"
            for line, found in where.items()
        ]

    def _finished(self, row: Row, sparsity: float) -> list[str]:
        cells = self._cells.get((row, 0.0 if self.is_dense(row) else sparsity), [])
        subjects = [cell.subject(recovered=row.recovered) for cell in cells]
        return [subject for subject in subjects if self.run.text(subject, "status") == FINISHED]

    def _dense(self) -> str | None:
        return next(iter(self._finished(Row(DENSE, False), 0.0)), None)

    def _ratio(self, subject: str) -> float | None:
        return self._relative_to_dense(subject, PERPLEXITY)

    def _retention(self, subject: str) -> float | None:
        return self._relative_to_dense(subject, _ACCURACY)

    def _relative_to_dense(self, subject: str, metric: str) -> float | None:
        dense = self._dense()
        value, reference = self.run.number(subject, metric), dense and self.run.number(dense, metric)
        return value / reference if value is not None and reference else None

    def _error(self, subject: str, metric: str) -> float | None:
        dense = self._dense()
        if metric == PERPLEXITY:
            return perplexity_error(self._windows(subject))
        if metric == RATIO and dense is not None and dense != subject:
            return ratio_error(self._windows(subject), self._windows(dense))
        return self.run.number(subject, f"{metric}{_STDERR}")

    def _windows(self, subject: str) -> Windows:
        return [(float(loss), int(tokens)) for loss, tokens in self.run.content(subject, _WINDOWS) or ()]

    @property
    def origins(self) -> list[Origin]:
        """The files of the records, and of the speeds."""
        return [*self.run.origins, *self.speed_origins]

    @property
    def notes(self) -> list[str]:
        """What was left out of the records and of the speeds, in words."""
        return [*self.run.notes, *(note for origin in self.speed_origins for note in origin.notes)]


def record_files(comparison: Comparison) -> list[str]:
    """Return the files that figures of quality alone are drawn from."""
    return [origin.path for origin in comparison.run.origins]
