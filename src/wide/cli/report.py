"""`wide report`: draw reports again from the records of runs, comparisons and benches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wide.cli.arguments import Arguments, build
from wide.errors import DataError, UsageError
from wide.runs.process import say

if TYPE_CHECKING:
    from wide.report.comparison import Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """One page of several folders.

    Args:
        output: Folder of a page of all folders, which is drawn, too; comparisons of one model share tables and figures,
            but not with runs and benches.
        rows: With --output, keep only these rows of comparisons, beside the dense ones; separated by commas.
    """

    output: str | None = None
    rows: str | None = None

    @property
    def row_names(self) -> list[str]:
        """The rows by name; empty means all."""
        return [row for row in (self.rows or "").split(",") if row]


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments(
        "report",
        "Draw the report of each folder into it, from its records alone. A run that was profiled (wide profile --model "
        "M --adapter RUN --out RUN/profile) shows its quality against its measured speed.",
        usage="FOLDER [FOLDER ...] [--output DIR [--only] [--rows A,B]]",
    )
    flags.add_folders(
        "The --output of wide prune, wide recover or wide compare, or the --out of wide bench or profile; or a run in "
        "the record file of a study, STUDY/NAME; STUDY means all of them."
    )
    flags.add_fields(PageOptions)
    flags.add_switch("only", "With --output: draw that page alone and write nothing into the folders.")
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If no folder is named, or the words cannot be understood.
        DataError: If a folder holds no records.
        MissingExtraError: If matplotlib is not installed.
    """
    values = arguments().parse(given)
    page, folders, only = build(PageOptions, values), [Path(folder) for folder in values["folders"]], values["only"]
    if not folders:
        raise UsageError("name at least one folder: wide report FOLDER")
    if page.output == "" or (page.rows is not None and not page.row_names):
        raise UsageError("--output needs a folder" if page.output == "" else "--rows needs names separated by commas")
    if page.output is None and (only or page.rows):
        raise UsageError(f"--{'only' if only else 'rows'} is for the page of several folders: name it with --output")
    from wide.report.drawing import require_matplotlib
    from wide.report.folders import expand

    folders = [each for folder in folders for each in expand(folder)]
    require_matplotlib()
    for folder in () if only else folders:
        _draw(folder)
    if page.output is None:
        return
    if any(map(_is_comparison, folders)):
        _draw_merged(folders, Path(page.output), page.row_names)
        return
    if page.rows:
        raise UsageError("--rows chooses rows of comparisons; these folders hold runs and benches")
    from wide.report.folders import write_evidence

    drawn, notes = write_evidence(folders, Path(page.output))
    _say_drawn([drawn], notes)


def _is_comparison(folder: Path) -> bool:
    from wide.report.folders import is_comparison
    from wide.runs.folder import GRID

    # The records of all cells in one file stand for a comparison, too: the cells need not be at hand.
    return (folder / GRID).is_file() or is_comparison(folder)


def _draw(folder: Path) -> None:
    if _is_comparison(folder):
        _write_comparison(_comparison(folder), folder)
        return
    from wide.report.folders import write_folder

    _say_drawn(*write_folder(folder))


def _say_drawn(paths: Sequence[Path], notes: Sequence[str]) -> None:
    for path in paths:
        say(f"drawn    {path}")
    for note in dict.fromkeys(notes):
        say(f"note     {note}")


def _draw_merged(folders: Sequence[Path], output: Path, rows: Sequence[str]) -> None:
    from wide.report.comparison_merge import merge

    others = [str(folder) for folder in folders if not _is_comparison(folder)]
    if others:
        raise DataError(f"{', '.join(others)} cannot share a page with comparisons; draw them with another --output")
    if output.resolve() in [folder.resolve() for folder in folders]:
        raise DataError(f"{output} holds a report of its own; choose another --output for the common page")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise DataError(f"comparisons on one page are told apart by their folders' names, got {', '.join(names)}")
    output.mkdir(parents=True, exist_ok=True)
    _write_comparison(merge(dict(zip(names, map(_comparison, folders), strict=True)), rows), output)


def _comparison(folder: Path) -> "Comparison":
    from wide.comparison.results import collect
    from wide.report.comparison import read_comparison
    from wide.report.folders import comparison_in
    from wide.runs.folder import GRID

    return read_comparison(collect(folder)) if (folder / GRID).is_file() else comparison_in(folder)


def _write_comparison(comparison: "Comparison", folder: Path) -> None:
    from wide.report.folders import draw_comparison

    _say_drawn(*draw_comparison(comparison, folder))
