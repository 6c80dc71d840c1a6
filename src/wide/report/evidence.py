"""Several runs and benches together: one table, and quality against measured speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.report.figure import Figure, Origin, Sheet
from wide.report.profiles import OWN, Forward, Profile
from wide.report.selection import MissingRecordsError, Selection
from wide.report.style import CYCLE, MARKERS
from wide.report.table import NAMES, Table

_EARLIER = {"stage 1+2": "stage 1", "pruned + LoRA": "pruned"}
_MARKERS = tuple(zip(MARKERS, CYCLE, strict=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run.

    Args:
        name: To tell it from the others.
        folder: Where it lies.
        records: What it measured.
        profile: What the benches left in its folder.
    """

    name: str
    folder: Path
    records: Selection
    profile: Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Quality and measured speed of the same adapter.

    Args:
        run: Name of the run.
        subject: Which of its models.
        what: 'prefill' or 'decode'.
        shape: The shape that was timed, in words.
        ratio: Token perplexity divided by the dense model's.
        speedup: Time of the dense model divided by that of the run's own: its routers deciding, or what is left of it.
        method: Which method made it.
        file: Where the speed is recorded.
    """

    run: str
    subject: str
    what: str
    shape: str
    ratio: float
    speedup: float
    method: str = ""
    file: str = ""


class Evidence:
    """What several folders hold.

    Args:
        runs: Folders with records of a run.
        profile: Benches of all folders.
    """

    def __init__(self, runs: Sequence[Run], profile: Profile) -> None:
        """Keep them."""
        self.runs = tuple(runs)
        self.profile = profile

    @property
    def origins(self) -> list[Origin]:
        """The files of the runs and of the benches."""
        return [*(origin for run in self.runs for origin in run.records.origins), *self.profile.origins]

    @property
    def notes(self) -> list[str]:
        """What was left out of them, in words."""
        return [note for origin in self.origins for note in origin.notes]

    def points(self) -> list[Point]:
        """Return the models whose quality and speed are both known, of each shape that was timed."""
        everywhere = self.profile.forwards()
        points = []
        for run in self.runs:
            named = [forward for forward in everywhere if _names(forward, run)]
            points += _points(run, _distinct([*run.profile.forwards(), *named]))
        return points


def _distinct(forwards: Sequence[Forward]) -> list[Forward]:
    found: list[Forward] = []
    for forward in forwards:
        if forward not in found:
            found.append(forward)
    return found


def _points(run: Run, forwards: Sequence[Forward]) -> list[Point]:
    points = []
    for forward in forwards:
        if forward.candidate not in OWN or forward.model != run.records.text("run", "model"):
            continue
        subject = _subject(forward, run)
        dense, value = (run.records.number(name, "token_perplexity") for name in ("dense", subject))
        if dense and value is not None:
            points.append(
                Point(
                    run=run.name,
                    subject=subject,
                    what=forward.what,
                    shape=forward.shape,
                    ratio=value / dense,
                    speedup=forward.speedup,
                    method=forward.method,
                    file=forward.file,
                )
            )
    return points


def _names(forward: Forward, run: Run) -> bool:
    places = [place for place in (forward.adapter, forward.checkpoint) if place]
    return any(Path(place).resolve().is_relative_to(run.folder.resolve()) for place in places)


def _subject(forward: Forward, run: Run) -> str:
    """Return which model of a run an adapter is: the last one, or that of the stage whose folder it lies in."""
    subjects = run.records.subjects()
    last = subjects[-1] if subjects else ""
    return _EARLIER.get(last, last) if "stage1" in Path(forward.adapter).parts else last


def evidence_table(evidence: Evidence) -> Table:
    """Return one line for each trained model of each run."""
    header = ("run", "model", "perplexity", "x dense", "attention %", "FFN %", "prefill", "decode")
    lines = []
    for run in evidence.runs:
        dense = run.records.number("dense", "token_perplexity")
        for subject in run.records.subjects():
            value = run.records.number(subject, "token_perplexity")
            skipped = [run.records.number(subject, f"sparsity.{half}") for half in ("attention", "ffn")]
            lines.append(
                (
                    run.name,
                    NAMES[subject],
                    "-" if value is None else f"{value:z.2f}",
                    "-" if value is None or not dense else f"{value / dense:.2f}",
                    *("-" if rate is None else f"{100 * rate:z.1f}" for rate in skipped),
                    *(_speed(evidence, run.name, subject, what) for what in ("prefill", "decode")),
                )
            )
    return Table(header=header, rows=tuple(lines))


def _speed(evidence: Evidence, run: str, subject: str, what: str) -> str:
    found = [p.speedup for p in evidence.points() if (p.run, p.subject, p.what) == (run, subject, what)]
    if not found:
        return "-"
    low, high = min(found), max(found)
    return f"{low:.2f}x" if high - low < 0.005 else f"{low:.2f}x-{high:.2f}x"


def _known(evidence: Evidence) -> list[Point]:
    points = evidence.points()
    if not points:
        raise MissingRecordsError(
            "no run whose quality and whose speed with its own routing are both measured; time one on a GPU with wide "
            "profile --model M --adapter RUN --out RUN/profile"
        )
    return points


def _draw_pareto(figure: Any, evidence: Evidence) -> str:
    points = _known(evidence)
    kinds = [what for what in ("prefill", "decode") if any(point.what == what for point in points)]
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    runs = list(dict.fromkeys((point.run, point.subject) for point in points))
    sentences = []
    for axes, kind in zip(panels, kinds, strict=True):
        for (run, subject), (marker, colour) in zip(runs, _MARKERS * len(runs), strict=False):
            chosen = [p for p in points if (p.what, p.run, p.subject) == (kind, run, subject)]
            chosen.sort(key=lambda point: point.speedup)
            for number, point in enumerate(chosen):
                # Later stages are filled, stage 1 alone is hollow.
                fill = "none" if subject in _EARLIER.values() else "full"
                label = _label(point) if point is chosen[0] else None
                axes.plot(point.speedup, point.ratio, marker, color=colour, fillstyle=fill, markersize=7, label=label)
                _name_shape(axes, point, above=number % 2 == 0)
                sentences.append(f"{run}, {subject}, {point.shape}: {point.speedup:.2f}x at {point.ratio:.2f}x dense")
        axes.plot(1, 1, "*", color="black", markersize=10)
        axes.annotate("dense", (1, 1), xytext=(6, -10), textcoords="offset points", fontsize="x-small")
        axes.set_title(kind, fontsize="medium", loc="left")
        axes.set_xlabel("measured speed-up over its dense peer")
        axes.margins(x=0.3, y=0.3)
    panels[0].set_ylabel("perplexity, x dense")
    found = [pair for axes in panels for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True)]
    lines = dict(found)
    figure.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=3, frameon=False, fontsize="small"
    )
    return "Perplexity against measured speed; lower right is better. " + "; ".join(sentences) + "."


def _name_shape(axes: Any, point: Point, *, above: bool) -> None:
    """Write the shape beside a point: aslant, and every other one below, because a run's points lie at one height."""
    axes.annotate(
        point.shape.partition(", ")[2],
        (point.speedup, point.ratio),
        xytext=(4, 5 if above else -5),
        textcoords="offset points",
        rotation=30 if above else -30,
        rotation_mode="anchor",
        va="bottom" if above else "top",
        fontsize="x-small",
    )


def _label(point: Point) -> str:
    method = f" ({point.method})" if point.method and point.method not in point.run else ""
    return f"{point.run}{method}, {NAMES[point.subject]}"


def _pareto_sheet(evidence: Evidence) -> Sheet:
    header = ("run", "method", "subject", "what", "shape", "ratio", "speedup")
    return Sheet(header, tuple(tuple(getattr(point, name) for name in header) for point in _known(evidence)))


def _pareto_files(evidence: Evidence) -> list[str]:
    points = _known(evidence)
    drawn = {point.run for point in points}
    records = [origin.path for run in evidence.runs if run.name in drawn for origin in run.records.origins]
    return [*records, *(point.file for point in points)]


EVIDENCE_FIGURES: tuple[Figure[Evidence], ...] = (
    Figure(
        name="quality-speed",
        title="Quality against measured speed",
        size=(9.0, 4.2),
        draw=_draw_pareto,
        sheet=_pareto_sheet,
        files=_pareto_files,
    ),
)
"""Figures of several folders together."""
