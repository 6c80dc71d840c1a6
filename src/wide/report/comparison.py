"""What a comparison measured, by row and sparsity: means over seeds, errors, failures and deviations.

A row is a method, either after its calibration or with LoRA on top.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.errors import DataError
from wide.records import STUDY, Cell, Stage
from wide.report.bootstrap import Windows, perplexity_error, ratio_error
from wide.report.figure import Origin
from wide.report.selection import Selection, read_selection
from wide.report.speed import Forward, Profile, read_profile, read_study

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
        speeds: How fast what a cell left is, calibrated only, of each size that was timed.
        speed_origins: The files of the speeds.

    Attributes:
        sparsities: Targets, ascending.
        rows: All rows that were asked for, the dense ones first.

    Raises:
        DataError: If the records are not of a comparison.
    """

    def __init__(
        self,
        run: Selection,
        speeds: Sequence[tuple[Cell, Forward]] = (),
        speed_origins: Sequence[Origin] = (),
    ) -> None:
        """Index the cells."""
        self.speed_origins = tuple(speed_origins)
        self.run = run
        self.speeds = tuple(speeds)
        methods: list[str] = run.content("run", "grid.methods") or [0]
        sparsities: list[float] = run.content("run", "grid.sparsities") or [""]
        if not all(isinstance(each, str) for each in methods) or not all(
            isinstance(s, int | float) for s in sparsities
        ):
            raise DataError(
                "these records are not of a comparison: no usable record 'grid.methods' or 'grid.sparsities' of the run"
            )
        self.sparsities = sorted(map(float, sparsities))
        stages = (False, True) if run.number("run", "grid.recovers") else (False,)
        self.rows = [Row(method, recovered) for method in (DENSE, *methods) for recovered in stages]
        self._cells: dict[tuple[Row, float], list[Cell]] = {}
        for stage in sorted({record.subject for record in run.records if isinstance(record.subject, Stage)}):
            row = Row(stage.cell.method, stage.recovered)
            self._cells.setdefault((row, stage.cell.sparsity), []).append(stage.cell)

    def is_dense(self, row: Row) -> bool:
        """Return whether a row is the dense model, with LoRA or without."""
        return row.method == DENSE

    def value(self, row: Row, sparsity: float, metric: str) -> Value | None:
        """Return a figure of a row, None where nothing was measured.

        Args:
            row: One of `rows`.
            sparsity: One of `sparsities`; the dense rows are the same at all of them.
            metric: As in the records, or `RATIO` or `RETENTION`, which are relative to the dense model.
        """
        relative = {RATIO: PERPLEXITY, RETENTION: _ACCURACY}.get(metric)
        found = [
            (subject, self.run.number(subject, metric) if relative is None else self._over_dense(subject, relative))
            for subject in self.finished(row, sparsity)
        ]
        numbers = [(subject, number) for subject, number in found if number is not None]
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
        How its routers were trained, as far as not by default, is under 'training'; it is missing in older records.
        """
        subjects = self.finished(Row(method, False), sparsity)
        found: dict[str, Any] = next(filter(None, (self.run.content(each, "settings") for each in subjects)), {})
        training = next(filter(None, (self.run.content(each, "training") for each in subjects)), None)
        found = found if training is None else {**found, "training": training}
        own = self.run.number("run", _OWN_GROUP)
        return {**found, _GROUP: int(own)} if own is not None and found.get(_GROUP, 0) is None else found

    def seeds(self, row: Row, sparsity: float) -> list[int]:
        """Return the seeds of a row that have been measured, ascending."""
        return sorted(stage.cell.seed for stage in self.finished(row, sparsity))

    def task_labels(self) -> list[str]:
        """Return what single tasks that were measured anywhere are called; with `TASK` before it, each is a metric."""
        metrics = dict.fromkeys(r.metric for r in self.run.records if isinstance(r.subject, Stage))
        return [
            metric.removeprefix(TASK)
            for metric in metrics
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

    def finished(self, row: Row, sparsity: float) -> list[Stage]:
        """Return the stages of a row that have been measured, one for each seed."""
        cells = self._cells.get((row, 0.0 if self.is_dense(row) else sparsity), [])
        stages = [cell.subject(recovered=row.recovered) for cell in cells]
        return [stage for stage in stages if self.run.text(stage, "status") == FINISHED]

    def _dense(self) -> Stage | None:
        return next(iter(self.finished(Row(DENSE, False), 0.0)), None)

    def _over_dense(self, subject: Stage, metric: str) -> float | None:
        dense = self._dense()
        value, reference = self.run.number(subject, metric), dense and self.run.number(dense, metric)
        return value / reference if value is not None and reference else None

    def _error(self, subject: Stage, metric: str) -> float | None:
        dense, windows = self._dense(), self._windows(subject)
        if metric == PERPLEXITY and windows:
            return perplexity_error(windows)
        if metric == RATIO and windows and dense is not None and dense != subject:
            return ratio_error(windows, self._windows(dense))
        # A study keeps the errors instead of the windows.
        return self.run.number(subject, f"{metric}{_STDERR}")

    def _windows(self, subject: Stage) -> Windows:
        return [(float(loss), int(tokens)) for loss, tokens in self.run.content(subject, _WINDOWS) or ()]

    @property
    def origins(self) -> list[Origin]:
        """The files of the records, and of the speeds."""
        return [*self.run.origins, *self.speed_origins]

    @property
    def notes(self) -> list[str]:
        """What was left out of the records and of the speeds, in words."""
        return [*self.run.notes, *(note for origin in self.speed_origins for note in origin.notes)]


def read_comparison(records: Path, run: str = "") -> Comparison:
    """Return the comparison that a file of records describes, with the speeds of its cells.

    Args:
        records: Beside it, in `cells`, lies a folder for each cell; a study's file holds the speeds itself.
        run: Which comparison, in a file that holds several.

    Raises:
        DataError: If there are no readable records, or not those of a comparison.
    """
    profiles: dict[Cell, Profile] = {}
    if records.name == STUDY:
        profiles = {cell: profile for (name, cell), profile in read_study(records).items() if cell and name == run}
    else:
        for folder in sorted((records.parent / "cells").glob("*")):
            cell = Cell.from_folder(folder.name)
            if cell is not None:
                profiles[cell] = read_profile(folder)
    speeds = [(cell, forward) for cell, profile in profiles.items() for forward in profile.forwards() if forward.is_own]
    origins = [origin for profile in profiles.values() for origin in profile.origins]
    return Comparison(read_selection(records, run), speeds, origins)
