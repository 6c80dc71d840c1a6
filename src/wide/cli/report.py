"""`wide report`: draw reports again from the records of runs, comparisons and benches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wide.cli.arguments import Arguments
from wide.errors import UsageError
from wide.runs.process import say
from wide.runs.settings import build


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """One page of several folders.

    Args:
        output: Folder of a page of all folders, which is drawn, too; comparisons of one model share tables and figures,
            but not with runs and benches.
        rows: With --output, keep only these rows of comparisons, and the dense ones; separated by commas.
    """

    output: str | None = None
    rows: str | None = None

    @property
    def row_names(self) -> list[str]:
        """The rows by name; empty means all."""
        return [row for row in (self.rows or "").split(",") if row]


def arguments() -> Arguments:
    flags = Arguments(
        "report",
        "Draw the report of each folder into it, from its records alone. A run that was profiled (wide profile --model "
        "M --adapter RUN --output RUN/profile) shows its quality against its measured speed.",
        usage="FOLDER [FOLDER ...] [--output DIR [--only] [--rows A,B]]",
    )
    flags.add_folders(
        "The --output of wide prune, recover, compare, bench or profile; or a run in "
        "the record file of a study, STUDY/NAME; STUDY means all of them."
    )
    flags.add_fields(PageOptions)
    flags.add_switch("only", "With --output: draw that page alone and write nothing into the folders.")
    return flags


def run(given: Sequence[str]) -> None:
    values = arguments().parse(given)
    page, folders, only = build(PageOptions, values), [Path(folder) for folder in values["folders"]], values["only"]
    if not folders:
        raise UsageError("name at least one folder: wide report FOLDER")
    if page.output == "" or (page.rows is not None and not page.row_names):
        raise UsageError("--output needs a folder" if page.output == "" else "--rows needs names separated by commas")
    if page.output is None and (only or page.rows):
        raise UsageError(f"--{'only' if only else 'rows'} is for the page of several folders: name it with --output")
    from wide.report.drawing import require_matplotlib
    from wide.report.folders import draw_folder, draw_together
    from wide.report.reading import expand

    folders = [each for folder in folders for each in expand(folder)]
    require_matplotlib()
    for folder in () if only else folders:
        say(f"drawing  {folder}")
        _say_drawn(*draw_folder(folder))
    if page.output is not None:
        say(f"drawing  {page.output}")
        _say_drawn(*draw_together(folders, Path(page.output), page.row_names))


def _say_drawn(paths: Sequence[Path], notes: Sequence[str]) -> None:
    for path in paths:
        say(f"drawn    {path}")
    for note in dict.fromkeys(notes):
        say(f"note     {note}")
