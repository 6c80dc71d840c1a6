"""`wide report`: what folders hold of runs, comparisons and benches, drawn each by itself or on one page."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wide.errors import DataError, MissingExtraError, UsageError
from wide.report.comparison import Comparison, read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES, layer_rows
from wide.report.comparison_merge import merge
from wide.report.comparison_tables import comparison_sections, comparison_title, to_markdown, to_sheet
from wide.report.drawing import FOLDER, save_png
from wide.report.figure import Row, figures
from wide.report.page import Section, facts, facts_section, figure_sections, notes_section, render, run_sections
from wide.report.reading import Folder, read_folder
from wide.report.run_figures import figures_of
from wide.report.selection import SUBLAYERS, Selection
from wide.report.speed import SPEED_FIGURES, Profile, is_own
from wide.report.table import Table, summary_table
from wide.writing import write_whole

PAGE, PICTURE, TABLE, SHEET = "report.html", "report.png", "table.md", "table.csv"
_EARLIER = {"stage 1+2": "stage 1", "pruned + LoRA": "pruned"}
_LATER = (
    "figures are not drawn while cells are left to other processes; the process that ends last draws them, and wide "
    "report FOLDER does so now"
)
_NO_MATPLOTLIB = "figures need matplotlib: pip install 'wide[report]', then wide report FOLDER"
_NO_SPEED = (
    "the speed of this model was not measured; on a GPU, run wide profile --model M --adapter RUN --output "
    "RUN/profile, then wide report RUN"
)
Drawn = tuple[list[Path], list[str]]
"""The files that were written, and what of the records was left out."""


def draw_folder(path: Path) -> Drawn:
    """Draw the report of a run, a comparison or a bench into its folder, which may be a run of a study, STUDY/NAME.

    Raises DataError if there is nothing to draw, and MissingExtraError if matplotlib is not installed.
    """
    folder = read_folder(path)
    if folder.is_comparison:
        return draw_comparison(read_comparison(folder), path)
    run, profile, notes = folder.records, folder.profile, _notes([folder])
    if run is None:
        return [_write(f"Measured speed, {path.resolve().name}", list(_evidence({"": folder}, path)), path)], notes
    no_speed = Section(title="Speed", missing=_NO_SPEED)
    more = [*_speed(profile, path), *notes_section(profile.notes)] if profile.files else [no_speed]
    title = f"Token-wise width pruning of {run.text('run', 'model') or 'a model'}"
    page = _write(title, [*run_sections(run, runs_table({"": folder}), path, _speed_in_words(folder)), *more], path)
    save_png(path / PICTURE, figures_of(run), run)
    return [page, path / PICTURE], notes


def draw_together(paths: Sequence[Path], output: Path, rows: Sequence[str] = ()) -> Drawn:
    """Draw one page of several folders: runs and benches side by side, or comparisons as one, of which `rows` are kept.

    Raises DataError if there is nothing to draw, or the folders do not fit on one page or would lose their own;
    UsageError if rows are named and there is no comparison; and MissingExtraError if matplotlib is not installed.
    """
    if output.resolve() in [path.resolve() for path in paths]:
        raise DataError(f"{output} holds a report of its own; choose another --output for the common page")
    folders = read_folders(paths)
    compared = {name: folder for name, folder in folders.items() if folder.is_comparison}
    if compared:
        others = [str(folder.path) for folder in folders.values() if not folder.is_comparison]
        if others:
            raise DataError(
                f"{', '.join(others)} cannot share a page with comparisons; draw them with another --output"
            )
        return draw_comparison(merge({name: read_comparison(each) for name, each in compared.items()}, rows), output)
    if rows:
        raise UsageError("--rows chooses rows of comparisons; these folders hold runs and benches")
    title = f"Evidence from {f'{len(paths)} folders' if len(paths) > 1 else paths[0].resolve().name}"
    return [_write(title, list(_evidence(folders, output)), output)], _notes(list(folders.values()))


def read_folders(paths: Sequence[Path]) -> dict[str, Folder]:
    """Return what folders hold, by short names that tell them apart; raises DataError if one is named twice."""
    resolved = [path.resolve() for path in paths]
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            return {name: read_folder(path) for name, path in zip(names, paths, strict=True)}
    raise DataError("the same folder is named twice; name each once")


def runs_table(folders: Mapping[str, Folder]) -> Table:
    """Return quality and measured speed of each trained model of runs, by their names."""

    def speeds(name: str, subject: str) -> dict[str, str | None]:
        found = ((what, sorted(_speeds(folders[name], subject, what))) for what in ("prefill", "decode"))
        return {what: _span(speeds) if speeds else None for what, speeds in found}

    return summary_table({name: each.records for name, each in folders.items() if each.records}, speeds)


def draw_comparison(comparison: Comparison, folder: Path, *, later: bool = False) -> Drawn:
    """Write `table.md`, `table.csv`, `report.html` and figures of a comparison.

    Each file is replaced whole, so that several processes that draw the same comparison do not mix their halves. Where
    figures are not drawn (with `later`, they are left to a process that goes on measuring), the page and a note say
    why.
    """
    reason, shown = (_LATER, ()) if later else ("", COMPARISON_FIGURES)
    try:
        drawn = [*figure_sections(shown, comparison, folder, comparison.origins)]
    except MissingExtraError:
        reason, drawn = _NO_MATPLOTLIB, []
    drawn = drawn or [Section(title="Figures", missing=reason)]
    write_whole(folder / TABLE, to_markdown(comparison))
    write_whole(folder / SHEET, to_sheet(comparison))
    parts = [facts_section(comparison.run), *comparison_sections(comparison), *drawn, *notes_section(comparison.notes)]
    page = _write(comparison_title(comparison), parts, folder)
    pictures = [folder / FOLDER] if not reason and (folder / FOLDER).is_dir() else []
    return [folder / TABLE, folder / SHEET, page, *pictures], [*comparison.notes, *filter(None, [reason])]


def _write(title: str, parts: Sequence[Section], output: Path) -> Path:
    write_whole(output / PAGE, render(title, parts))
    return output / PAGE


def _notes(folders: Sequence[Folder]) -> list[str]:
    return [note for folder in folders for origin in folder.origins for note in origin.notes]


def _evidence(folders: Mapping[str, Folder], output: Path) -> Iterator[Section]:
    runs = {name: folder for name, folder in folders.items() if folder.records is not None}
    if runs:
        shown = []
        for name, folder in runs.items():
            page = folder.path / PAGE
            link = os.path.relpath(page, output) if page.is_file() else ""
            shown.append((name, link, facts(folder.records or Selection([]))))
        yield Section(title="Runs", tables=[runs_table(runs)], runs=shown)
    if len(runs) > 1:
        origins = [origin for folder in runs.values() for origin in folder.origins]
        yield from figure_sections(RUNS_FIGURES, runs, output, origins)
    profile = Profile(tuple(file for folder in folders.values() for file in folder.profile.files))
    if profile.files:
        yield from _speed(profile, output)
    yield from notes_section(_notes(list(folders.values())))


def _layers(runs: Mapping[str, Folder]) -> list[Row]:
    shares = {}
    for name, folder in runs.items():
        run = folder.records or Selection([])
        subject = run.last_subject_with_layers()
        if subject is not None:
            shares[name] = {key: run.by_layer(subject, f"sparsity.{key}") for key in SUBLAYERS}
    return layer_rows(shares) if len(shares) > 1 else []


RUNS_FIGURES = figures("runs", {"layers-compared": _layers})
"""Figures of several runs, by their names."""


def _speeds(folder: Folder, subject: str, what: str) -> list[float]:
    """Return the speed-ups of one model of a run, of each size that was timed; never those of random masks."""
    run = folder.records or Selection([])
    last, name = run.subjects()[-1], run.text("run", "model")
    own = [row for row in folder.profile.forwards() if is_own(row) and (row["model"], row["what"]) == (name, what)]
    # An adapter in this folder is the one of the stage before LoRA.
    places = {True: _EARLIER.get(last, last), False: last}
    return [row["speedup"] for row in own if places["stage1" in Path(row["adapter"]).parts] == subject]


def _speed_in_words(folder: Folder) -> str:
    last = (folder.records or Selection([])).subjects()[-1:]
    found = {what: _speeds(folder, subject, what) for subject in last for what in ("prefill", "decode")}
    known = {what: sorted(speeds) for what, speeds in found.items() if speeds}
    if not known:
        return "Whether it saves time was not measured; small models save none."
    told = ", ".join(f"{what} {_span(speeds)} as fast as dense" for what, speeds in known.items())
    return f"{'' if max(map(max, known.values())) > 1.02 else 'No time is saved: '}{told}."


def _span(speeds: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(f"{speed:.2f}x" for speed in (speeds[0], speeds[-1])))


def _speed(profile: Profile, output: Path) -> Iterator[Section]:
    """Yield what was timed, and at the end each file with the command that measured it."""
    found = (profile.forwards(), profile.operators())
    figures = [figure for figure, rows in zip(SPEED_FIGURES, found, strict=True) if rows]
    yield from figure_sections(figures, profile, output, profile.origins)
    for name, table in profile.others().items():
        yield Section(title=f"Records of {name}", tables=[table], folded=True)
    files = [(os.path.relpath(origin.path, output), origin.about, origin.command) for origin in profile.origins]
    yield Section(title="Where the speed comes from", files=list(dict.fromkeys(files)))
