"""What a comparison measured, by row and sparsity: means over seeds, errors, failures and deviations.

A row is a method, either after its calibration or with LoRA on top.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from wide.errors import DataError
from wide.records import Cell, Stage
from wide.report.figure import Row as Point
from wide.report.figure import grouped
from wide.report.reading import Folder, read_folder
from wide.report.selection import Selection
from wide.report.speed import is_own
from wide.standard_error import perplexity_stderr

DENSE = "dense"
FINISHED = "finished"
PERPLEXITY, RATIO, RETENTION = "token_perplexity", "token_perplexity.ratio", "accuracy.retention"
_ACCURACY, _STDERR = "accuracy.average", ".stderr"
_RELATIVE = {RATIO: PERPLEXITY, RETENTION: _ACCURACY}
TASK = "accuracy."
"""Before the label of a single task in the name of its metric."""


@dataclass(frozen=True, slots=True)
class Row:
    """A method, calibrated only or with LoRA."""

    method: str
    recovered: bool

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.method} + LoRA" if self.recovered else self.method

    @property
    def is_dense(self) -> bool:
        """Whether it is the dense model, with LoRA or without."""
        return self.method == DENSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A figure over the seeds of a cell, and its error.

    With one seed that is the standard error over windows of text, where there is one; with several the standard
    deviation between seeds.
    """

    mean: float
    error: float | None
    seeds: int


class Comparison:
    """The records of one comparison: those of all cells, and under the subject 'run' the grid that was asked for.

    `speeds` say how fast what a cell left is, calibrated only, at each size, as `Profile.forwards` says it.
    `sparsities` are the targets, ascending, `methods` the names of all but the dense one, `rows` all rows that were
    asked for, the dense ones first. Raises DataError if the records are not of a comparison.
    """

    def __init__(self, run: Selection, speeds: Sequence[tuple[Cell, Point]] = (), notes: Sequence[str] = ()) -> None:
        self.run, self.speeds = run, tuple(speeds)
        # What was left out of the records and of the speeds, in words.
        self.notes = list(dict.fromkeys([*run.notes, *notes]))
        methods, sparsities = (run.content("run", f"grid.{name}") or [None] for name in ("methods", "sparsities"))
        if not all(isinstance(each, str) for each in methods) or not all(
            isinstance(each, int | float) for each in sparsities
        ):
            raise DataError(
                "these records are not of a comparison: no usable record 'grid.methods' or 'grid.sparsities' of the run"
            )
        self.sparsities = sorted(map(float, sparsities))
        kinds = (False, True) if run.number("run", "grid.recovers") else (False,)
        self.methods = list(dict.fromkeys(methods))
        self.rows = [Row(method, recovered) for method in (DENSE, *methods) for recovered in kinds]
        stages = sorted({record.subject for record in run.records if isinstance(record.subject, Stage)})
        self._stages = grouped(stages, lambda each: (Row(each.cell.method, each.recovered), each.cell.sparsity))

    def points(self) -> Iterator[tuple[Row, float]]:
        """Yield each row and sparsity: the dense rows once, at 0, then the others sparsity by sparsity."""
        yield from ((row, 0.0) for row in self.rows if row.is_dense)
        for sparsity in self.sparsities:
            yield from ((row, sparsity) for row in self.rows if not row.is_dense)

    def value(self, row: Row, sparsity: float, metric: str) -> Value | None:
        """Return a figure of a row, None where nothing was measured; the dense rows are the same at all sparsities.

        `metric` is as in the records, or `RATIO` or `RETENTION`, which are relative to the dense model.
        """
        numbers = {stage: self._number(stage, metric) for stage in self.finished(row, sparsity)}
        found = {stage: number for stage, number in numbers.items() if number is not None}
        if not found:
            return None
        if len(found) == 1:
            ((stage, mean),) = found.items()
            return Value(mean=mean, error=self._error(stage, metric), seeds=1)
        values = list(found.values())
        error = statistics.stdev(values) if all(map(math.isfinite, values)) else None
        return Value(mean=statistics.fmean(values), error=error, seeds=len(values))

    def seeds(self, row: Row, sparsity: float) -> list[int]:
        """Return the seeds of a row that have been measured, ascending."""
        return sorted(stage.cell.seed for stage in self.finished(row, sparsity))

    def task_metrics(self) -> list[str]:
        """Return the metrics of single tasks that were measured anywhere, `TASK` and what the task is called."""
        metrics = dict.fromkeys(r.metric for r in self.run.records if isinstance(r.subject, Stage))
        return [m for m in metrics if m.startswith(TASK) and m != _ACCURACY and not m.endswith(_STDERR)]

    def failures(self, row: Row | None = None, sparsity: float = 0.0) -> dict[Stage, str]:
        """Return the stages that failed, and why: of one row and sparsity, or of all."""
        stages = chain.from_iterable(self._stages.values()) if row is None else self._stages_at(row, sparsity)
        status = {stage: self.run.text(stage, "status") for stage in stages}
        return {stage: reason for stage, reason in status.items() if reason not in ("", FINISHED)}

    def deviations(self, row: Row) -> list[str]:
        """Return where a row differs from the method's original, each sentence once.

        What holds at some of the measured sparsities or seeds only says at which.
        """
        measured = {s: self.finished(row, s) for its_row, s in self._stages if its_row == row}
        lines = {stage: self.run.text(stage, "deviations").split("\n") for stage in chain(*measured.values())}
        told = []
        for line in filter(None, dict.fromkeys(chain(*lines.values()))):
            places = []
            for sparsity, stages in measured.items():
                seeds = [str(stage.cell.seed) for stage in stages if line in lines[stage]]
                of = "" if len(seeds) == len(stages) else f" with seed {'/'.join(seeds)}"
                places += [f"{100 * sparsity:.4g} %{of}"] if seeds else []
            is_all = all(line in found for found in lines.values())
            told.append(line if is_all else f"{line} (at {', '.join(places)})")
        return told

    def finished(self, row: Row, sparsity: float) -> list[Stage]:
        """Return the stages of a row that have been measured, one for each seed."""
        return [stage for stage in self._stages_at(row, sparsity) if self.run.text(stage, "status") == FINISHED]

    def _stages_at(self, row: Row, sparsity: float) -> list[Stage]:
        return self._stages.get((row, 0.0 if row.is_dense else sparsity), [])

    def _dense(self) -> Stage | None:
        return next(iter(self.finished(Row(DENSE, False), 0.0)), None)

    def _number(self, stage: Stage, metric: str) -> float | None:
        if metric not in _RELATIVE:
            return self.run.number(stage, metric)
        dense, metric = self._dense(), _RELATIVE[metric]
        value, reference = self.run.number(stage, metric), dense and self.run.number(dense, metric)
        return value / reference if value is not None and reference else None

    def _error(self, stage: Stage, metric: str) -> float | None:
        dense, (losses, tokens) = self._dense(), self.run.windows(stage)
        if metric == PERPLEXITY and losses:
            return perplexity_stderr(losses, tokens)
        if metric == RATIO and losses and dense is not None and dense != stage:
            return self.run.ratio_stderr(stage, dense)
        # A study keeps the errors instead of the windows.
        return self.run.number(stage, f"{metric}{_STDERR}")


def read_comparison(folder: Path | Folder) -> Comparison:
    """Return the comparison in a folder, or in what `read_folder` found there, with the speeds of its cells.

    Raises DataError if there are no readable records, or not those of a comparison.
    """
    found = read_folder(folder) if isinstance(folder, Path) else folder
    speeds = [(cell, row) for cell, profile in found.cells.items() for row in profile.forwards() if is_own(row)]
    return Comparison(found.records, speeds, found.notes)
