"""What folders and the record files of studies hold: the records of a run or a comparison, and what was timed of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wide.errors import DataError
from wide.records import CELLS, COMPARISON, GRID, RECORDS, STUDY, Cell, read_lines, read_records
from wide.report.selection import Selection
from wide.report.speed import BENCH_FILES, Profile, bench_file
from wide.writing import write_whole

BENCHES = [f"{place}/{name}" for place in (".", "coarse", "profile", "bench", "bench/coarse") for name in BENCH_FILES]
"""Where files of benches lie in the folder of a run or a bench."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """What a folder holds, or a run in the record file of a study, which is named as if it were a folder beside it.

    `records` are those of its run or comparison, empty of benches alone. `profile` is what was timed, but for the cells
    of a comparison, which `cells` has.
    """

    records: Selection
    is_comparison: bool
    profile: Profile
    cells: Mapping[Cell, Profile]

    @property
    def notes(self) -> list[str]:
        """What was left out of the records and of the benches, in words."""
        profiles = (self.profile, *self.cells.values())
        return [*self.records.notes, *(note for profile in profiles for note in profile.notes)]


def read_folder(path: Path) -> Folder:
    """Return what the folder of a run, a comparison or a bench holds, or a run in the file of a study, STUDY/NAME.

    Records of a comparison's cells are collected into one file first. Raises DataError if there is nothing of these, or
    a file cannot be read.
    """
    study = _study_of(path)
    file: Path | None
    if study is not None:
        file, name = study
        profiles = _kept_profiles(file, name)
    elif not path.is_dir():
        study_folder = next((parent for parent in path.parents if (parent / STUDY).is_file()), None)
        way = "name the output of a run, a comparison or a bench" if study_folder is None else _nothing_in(study_folder)
        raise DataError(f"there is no folder {path}; {way}")
    else:
        if (path / GRID).is_file():
            _collect(path)
        file, name = next((path / each for each in (COMPARISON, RECORDS) if (path / each).is_file()), None), ""
        cells = {Cell.from_folder(folder.name): folder for folder in sorted((path / CELLS).glob("*"))}
        profiles = {cell: read_profile(folder) for cell, folder in cells.items() if cell is not None}
        profiles[None] = read_profile(path)
    profile = profiles.pop(None, Profile())
    records, notes = ([], []) if file is None else read_records(file, name)
    if not records and not profile.files:
        raise DataError(_nothing_in(path, file))
    run = Selection(records, notes)
    is_comparison = file is not None and (file.name == COMPARISON or run.content("run", "grid.methods") is not None)
    return Folder(
        records=run,
        is_comparison=is_comparison,
        profile=profile,
        cells={cell: found for cell, found in profiles.items() if cell is not None},
    )


def _nothing_in(path: Path, file: Path | None = None) -> str:
    if (path / STUDY).is_file():
        return (
            f"{path} holds several runs; name one of them: {', '.join(f'{path}/{n}' for n in _runs_of(path / STUDY))}"
        )
    benches = f"{', '.join(BENCH_FILES[:-1])} or {BENCH_FILES[-1]}"
    nothing = f"{path} holds neither {RECORDS} of a run nor {benches} of a bench"
    holds = nothing if file is None else f"{file} holds no record of a run"
    return f"{holds}; name the --output of wide prune, compare, bench or profile"


def read_profile(path: Path) -> Profile:
    """Return what benches left in a folder, in those that they make in it, or in the file of a study there.

    Raises DataError if a file is not one of a bench.
    """
    kept = _kept_profiles(path / STUDY).get(None, Profile()) if (path / STUDY).is_file() else Profile()
    files = [*kept.files]
    for file in (path / place for place in BENCHES):
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{file} is not JSON, perhaps cut while being written; measure again") from error
            if not isinstance(content, dict) or not isinstance(content.get("records"), list):
                raise DataError(f"{file} holds no list of records; wanted what wide bench or wide profile writes")
            files.append(bench_file(file.name, content, str(file)))
    return Profile(tuple(files))


def _collect(folder: Path) -> None:
    """Write the records of a comparison's grid and of all its cells, as far as they are there, into one file."""
    files = [folder / GRID, *sorted((folder / CELLS).glob(f"*/{RECORDS}"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    # A process that was killed while it wrote leaves a line without an end.
    write_whole(folder / COMPARISON, "".join(text if text.endswith("\n") else f"{text}\n" for text in texts))


def _study_of(path: Path) -> tuple[Path, str] | None:
    """Return the record file of a study and the run in it that a path names; None for other folders."""
    for parent in path.parents:
        if (parent / STUDY).is_file():
            name = path.relative_to(parent).as_posix()
            return (parent / STUDY, name) if name in _runs_of(parent / STUDY) else None
    return None


def _runs_of(file: Path) -> list[str]:
    return list(dict.fromkeys(str(line.get("run", "")) for line in read_lines(file)[0]))


def _kept_profiles(file: Path, run: str | None = None) -> dict[Cell | None, Profile]:
    """Return the profiles in the record file of a study, of one run or of all, by cell where they are of one."""
    found: dict[Cell | None, Profile] = {}
    for line in read_lines(file)[0]:
        if isinstance(line, dict) and line.get("bench") in BENCH_FILES and run in (None, str(line.get("run", ""))):
            cell = Cell(**line["cell"]) if line.get("cell") else None
            bench = bench_file(line["bench"], line, str(file))
            found[cell] = Profile((*found.get(cell, Profile()).files, bench))
    return found
