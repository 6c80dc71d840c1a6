"""`wide report`: the page of a run, a comparison or a bench, with its tables and figures."""

import os
from collections.abc import Iterator
from pathlib import Path

from wide.errors import MissingExtraError
from wide.report.comparison import Comparison, read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_tables import comparison_sections, comparison_title, to_markdown, to_sheet
from wide.report.drawing import FOLDER
from wide.report.figure import Row
from wide.report.page import Section, facts, figure_sections, notes_section, render, run_sections
from wide.report.reading import Folder, read_folder
from wide.report.speed import SPEED_FIGURES, Profile, is_own
from wide.report.table import Table, summary_table
from wide.writing import write_whole

PAGE, TABLE, SHEET = "report.html", "table.md", "table.csv"
_EARLIER = {"stage 1+2": "stage 1", "pruned + LoRA": "pruned"}
_NO_MATPLOTLIB = "figures are not drawn without matplotlib: pip install 'wide[report]', then wide report FOLDER"
_NO_SPEED = (
    "The speed of this model was not measured; on a GPU, run wide profile --model M --adapter RUN --output "
    "RUN/profile, then wide report RUN."
)
Drawn = tuple[list[Path], list[str]]
"""The files that were written, and what of the records was left out."""


def draw_folder(path: Path, output: Path | None = None) -> Drawn:
    """Draw the report of a run, a comparison or a bench, or a run of a study, STUDY/NAME, into it or `output`.

    Raises DataError if there is nothing to draw, and MissingExtraError if matplotlib is not installed.
    """
    folder, output = read_folder(path), output or path
    if folder.is_comparison:
        return draw_comparison(read_comparison(folder), output)
    run = folder.records
    title, parts = f"Measured speed, {path.resolve().name}", list[Section]()
    if run.records or run.notes:
        title = f"Token-wise width pruning of {run.text('run', 'model') or 'a model'}"
        parts += run_sections(run, run_table(folder), output, _speed_in_words(folder))
    parts += _speed(folder.profile, output) if folder.profile.files else [Section(title="Speed", texts=[_NO_SPEED])]
    return [_write(title, [*parts, *notes_section(folder.notes)], output)], folder.notes


def run_table(folder: Folder) -> Table:
    """Return quality and measured speed of each trained model of a run."""

    def speeds(subject: str) -> Row:
        return {what: _span(each) if each else None for what, each in _speeds(folder, subject).items()}

    return summary_table(folder.records, speeds)


def draw_comparison(comparison: Comparison, folder: Path) -> Drawn:
    """Write `table.md`, `table.csv`, `report.html` and figures of a comparison.

    Each file is replaced whole, so that several processes that draw the same comparison do not mix their halves.
    Without matplotlib there are no figures, and the page and a note say so.
    """
    notes = list(comparison.notes)
    try:
        drawn = [*figure_sections(COMPARISON_FIGURES, comparison, folder)]
    except MissingExtraError:
        notes, drawn = [*notes, _NO_MATPLOTLIB], []
    write_whole(folder / TABLE, to_markdown(comparison))
    write_whole(folder / SHEET, to_sheet(comparison))
    parts = [Section(facts=facts(comparison.run)), *comparison_sections(comparison), *drawn, *notes_section(notes)]
    page = _write(comparison_title(comparison), parts, folder)
    pictures = [folder / FOLDER] if drawn and (folder / FOLDER).is_dir() else []
    return [folder / TABLE, folder / SHEET, page, *pictures], notes


def _write(title: str, parts: list[Section], output: Path) -> Path:
    write_whole(output / PAGE, render(title, parts))
    return output / PAGE


def _speeds(folder: Folder, subject: str) -> dict[str, list[float]]:
    """Return the speed-ups of one model of a run, of each size that was timed, ascending; never of random masks."""
    run = folder.records
    last, name = run.subjects()[-1], run.text("run", "model")
    own = [row for row in folder.profile.forwards() if is_own(row) and row["model"] == name]
    # An adapter in this folder is the one of the stage before LoRA.
    places = {True: _EARLIER.get(last, last), False: last}
    own = [row for row in own if places["stage1" in Path(row["adapter"]).parts] == subject]
    return {what: sorted(row["speedup"] for row in own if row["what"] == what) for what in ("prefill", "decode")}


def _speed_in_words(folder: Folder) -> str:
    last = folder.records.subjects()[-1:]
    known = {what: speeds for subject in last for what, speeds in _speeds(folder, subject).items() if speeds}
    if not known:
        return "Whether it saves time was not measured; small models save none."
    told = ", ".join(f"{what} {_span(speeds)} as fast as dense" for what, speeds in known.items())
    return f"{'' if max(map(max, known.values())) > 1.02 else 'No time is saved: '}{told}."


def _span(speeds: list[float]) -> str:
    return "-".join(dict.fromkeys(f"{speed:.2f}x" for speed in (speeds[0], speeds[-1])))


def _speed(profile: Profile, output: Path) -> Iterator[Section]:
    """Yield what was timed, and at the end each file with the command that measured it."""
    yield from figure_sections([figure for figure in SPEED_FIGURES if figure.rows(profile)], profile, output)
    for name, table in profile.others().items():
        yield Section(title=f"Records of {name}", tables=[table], folded=True)
    files = [(os.path.relpath(file.path, output), file.about, file.command) for file in profile.files]
    yield Section(title="Where the speed comes from", files=list(dict.fromkeys(files)))
