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
    """Where the page is written.

    Args:
        output: Folder of the page, where one folder is named; null writes each page into its own folder.
    """

    output: str | None = None


def arguments() -> Arguments:
    flags = Arguments(
        "report",
        "Draw the report of each folder into it, from its records alone. A run that was profiled (wide profile --model "
        "M --adapter RUN --output RUN/profile) shows its quality against its measured speed.",
        usage="FOLDER [FOLDER ...] [--output DIR]",
    )
    flags.add_folders(
        "The --output of wide prune, recover, compare, bench or profile; or a run in the record file of a study, "
        "STUDY/NAME."
    )
    flags.add_fields(PageOptions)
    return flags


def run(given: Sequence[str]) -> None:
    values = arguments().parse(given)
    page, folders = build(PageOptions, values), [Path(folder) for folder in values["folders"]]
    if not folders:
        raise UsageError("name at least one folder: wide report FOLDER")
    if page.output == "":
        raise UsageError("--output needs a folder")
    if page.output is not None and len(folders) > 1:
        raise UsageError(
            f"--output {page.output} takes the page of one folder, got {len(folders)}; draw each by itself"
        )
    from wide.report.drawing import require_matplotlib
    from wide.report.folders import draw_folder

    require_matplotlib()
    for folder in folders:
        say(f"drawing  {folder}")
        paths, notes = draw_folder(folder, None if page.output is None else Path(page.output))
        for path in paths:
            say(f"drawn    {path}")
        for note in dict.fromkeys(notes):
            say(f"note     {note}")
