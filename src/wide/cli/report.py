"""`wide report`: draw reports again from the records of runs, comparisons and benches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wide.cli.console import say
from wide.cli.usage import UsageError
from wide.errors import DataError

if TYPE_CHECKING:
    from wide.report.comparison import Comparison

_USAGE = """usage: wide report FOLDER [FOLDER ...] [--output DIR [--only] [--rows A,B]]

Draws the report of each folder into it, from its records alone: the --output of wide prune, wide recover or wide
compare, or the --out of wide bench or wide profile. A run that was profiled (wide profile --model M --adapter RUN --out
RUN/profile) shows its quality against its measured speed.

  --output DIR   draw one page of all folders into DIR, too; comparisons of one model share tables and figures, but not
                 with runs and benches
  --only         with --output: draw that page alone and write nothing into the folders
  --rows A,B     with --output: keep only these rows of comparisons, beside the dense ones"""


def run(arguments: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If no folder is named, or the words cannot be understood.
        DataError: If a folder holds no records.
        MissingExtraError: If matplotlib is not installed.
    """
    words = [word for word in arguments if word not in ("--debug", "--only")]
    only = "--only" in arguments
    if "-h" in words or "--help" in words:
        print(_USAGE)
        return
    folders, output, rows = _parse(words)
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise DataError(f"there is no folder {missing[0]}; name the output of a run, a comparison or a bench")
    from wide.report.drawing import require_matplotlib

    require_matplotlib()
    if only and output is None:
        raise UsageError(f"--only draws the page of --output alone: name it\n{_USAGE}")
    if rows and output is None:
        raise UsageError(f"--rows is for the page of --output: name it\n{_USAGE}")
    for folder in () if only else folders:
        _draw(folder)
    if output is None:
        return
    if any(map(_is_comparison, folders)):
        _draw_merged(folders, output, rows)
        return
    if rows:
        raise UsageError("--rows chooses rows of comparisons; these folders hold runs and benches")
    from wide.report.evidence_page import write_evidence

    page, notes = write_evidence(folders, output)
    _say_drawn([page], notes)


def _parse(words: Sequence[str]) -> tuple[list[Path], Path | None, list[str]]:
    folders: list[Path] = []
    rows: list[str] = []
    output: Path | None = None
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag == "--output":
            output = Path(value if equals else next(remaining, ""))
            if not output.parts:
                raise UsageError(f"--output needs a folder\n{_USAGE}")
        elif flag == "--rows":
            rows = [row for row in (value if equals else next(remaining, "")).split(",") if row]
            if not rows:
                raise UsageError(f"--rows needs names separated by commas\n{_USAGE}")
        elif word.startswith("-"):
            raise UsageError(f"wide report has no flag {flag}\n{_USAGE}")
        else:
            folders.append(Path(word))
    if not folders:
        raise UsageError(f"name at least one folder\n{_USAGE}")
    return folders, output, rows


def _is_comparison(folder: Path) -> bool:
    from wide.cli.run_folder import COMPARISON, GRID

    # The records of all cells in one file stand for a comparison, too: the cells need not be at hand.
    return (folder / GRID).is_file() or (folder / COMPARISON).is_file()


def _draw(folder: Path) -> None:
    if _is_comparison(folder):
        _write_comparison(_comparison(folder), folder)
        return
    from wide.report.evidence_page import write_folder

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
    from wide.cli.comparison_files import collect
    from wide.cli.run_folder import COMPARISON, GRID
    from wide.report.comparison_page import read_comparison

    return read_comparison(collect(folder) if (folder / GRID).is_file() else folder / COMPARISON)


def _write_comparison(comparison: "Comparison", folder: Path) -> None:
    from wide.report.comparison_page import draw_comparison

    _say_drawn(*draw_comparison(comparison, folder))
