"""`wide report`: what folders hold of runs, comparisons and benches, drawn each by itself or on one page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from wide.errors import DataError
from wide.records import STUDY, read_records
from wide.report.comparison import Comparison, read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES, layer_rows, layers_figure
from wide.report.comparison_tables import comparison_title, to_csv, to_html, to_markdown
from wide.report.drawing import FOLDER, has_matplotlib
from wide.report.figure import Figure, MissingRecordsError, Origin, Row
from wide.report.page import PAGE, document, facts, figure_sections, missing_section, notes_section, write_report
from wide.report.selection import NAMES, SUBLAYERS, Selection, in_study, read_selection, runs_of
from wide.report.speed import BENCH_FILES, SPEED_FIGURES, Forward, Profile, other_tables, read_profile, read_study
from wide.report.table import Table
from wide.report.writing import write_whole

RECORDS, COMPARED = "records.jsonl", "compare.jsonl"
TABLE, SHEET = "table.md", "table.csv"
_EARLIER = {"stage 1+2": "stage 1", "pruned + LoRA": "pruned"}
_LATER = (
    "figures are not drawn while cells are left to other processes; the process that ends last draws them, and wide "
    "report FOLDER does so now"
)
_NO_MATPLOTLIB = "figures need matplotlib: pip install 'wide[report]', then wide report FOLDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: its name to tell it from others, its folder, its records, and its speed if `wide profile` timed it."""

    name: str
    folder: Path
    records: Selection
    profile: Profile

    def speeds(self, subject: str, what: str) -> list[float]:
        """Return the speed-ups of one of its models, of each size that was timed; never those of random masks."""
        subjects = self.records.subjects()
        last = subjects[-1] if subjects else ""

        def is_its(forward: Forward) -> bool:
            timed = _EARLIER.get(last, last) if "stage1" in Path(forward.adapter).parts else last
            is_own = forward.is_own and forward.model == self.records.text("run", "model")
            return is_own and (timed, forward.what) == (subject, what)

        return [forward.speedup or 0.0 for forward in self.profile.forwards() if is_its(forward)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What several folders hold: runs, and the benches of all of them."""

    runs: tuple[Run, ...]
    profile: Profile

    @property
    def origins(self) -> list[Origin]:
        """The files of the runs and of the benches."""
        return [*(origin for run in self.runs for origin in run.records.origins), *self.profile.origins]

    @property
    def notes(self) -> list[str]:
        """What was left out of them, in words."""
        return [note for origin in self.origins for note in origin.notes]


def _layers(evidence: Evidence) -> list[Row]:
    shares: dict[str, dict[str, dict[int, float]]] = {}
    for run in evidence.runs:
        subject = run.records.last_subject_with_layers() or ""
        found = {key: dict(run.records.by_layer(subject, f"sparsity.{key}")) for key in SUBLAYERS}
        if any(found.values()):
            shares[run.name] = {key: layers for key, layers in found.items() if layers}
    if len(shares) < 2:
        raise MissingRecordsError(f"it takes two runs whose layers were measured, there are {len(shares)}")
    return layer_rows(shares)


LAYERS_OF_RUNS: Figure[Evidence] = layers_figure(_layers, "by the last model of each run")


def expand(folder: Path) -> list[Path]:
    """Return the runs in the record file of a study as FOLDER/NAME each; any other folder as it is.

    Raises:
        DataError: If there is neither a folder nor a run of a study.
    """
    found = in_study(folder)
    if not folder.is_dir() and (found is None or found[1] not in runs_of(found[0])):
        raise DataError(f"there is no folder {folder}; name the output of a run, a comparison or a bench")
    if (folder / STUDY).is_file() and read_records(folder / STUDY)[0]:
        return [folder / name for name in runs_of(folder / STUDY)]
    return [folder]


def is_comparison(folder: Path) -> bool:
    """Return whether a folder, or a run in the file of a study, holds the collected records of a comparison."""
    found = in_study(folder)
    if found is None:
        return (folder / COMPARED).is_file()
    return read_selection(*found).content("run", "grid.methods") is not None


def comparison_in(folder: Path) -> Comparison:
    """Return the comparison whose collected records lie in a folder, or in the record file of a study, FOLDER/NAME.

    Raises:
        DataError: If there are no readable records, or not those of a comparison.
    """
    found = in_study(folder)
    return read_comparison(folder / COMPARED) if found is None else read_comparison(*found)


def read_evidence(folders: Sequence[Path]) -> Evidence:
    """Return what folders of runs and benches hold.

    Args:
        folders: Each with the records of a run, JSON files of benches, or both; or a run in a study, FOLDER/NAME.

    Raises:
        DataError: If a folder holds neither, or a file cannot be read.
    """
    runs, profiles = [], []
    for folder, name in zip(folders, _short_names(folders), strict=True):
        kept = in_study(folder)
        profile = read_profile(folder) if kept is None else read_study(kept[0]).get((kept[1], None), Profile())
        if kept is not None or (folder / RECORDS).is_file():
            records = read_selection(folder / RECORDS) if kept is None else read_selection(*kept)
            runs.append(Run(name=name, folder=folder, records=records, profile=profile))
        elif not profile.files:
            raise DataError(
                f"{folder} holds neither {RECORDS} of a run nor {', '.join(BENCH_FILES[:-1])} or {BENCH_FILES[-1]} of "
                "a bench; name the --output of wide prune or the --out of wide bench or wide profile"
            )
        profiles.append(profile)
    return Evidence(tuple(runs), Profile(tuple(file for profile in profiles for file in profile.files)))


def write_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the report of one folder into it; return the files, and what of the records was left out.

    Args:
        folder: With the records of a run, JSON files of benches, or both; or a run in a study, FOLDER/NAME.

    Raises:
        DataError: If there is nothing to draw.
        MissingExtraError: If matplotlib is not installed.
    """
    evidence = read_evidence([folder])
    if not evidence.runs:
        return [_write(f"Measured speed, {folder.resolve().name}", evidence, folder)], evidence.notes
    more = ""
    if evidence.profile.files:
        table = f"<h2>Quality and speed</h2>{evidence_table(evidence).to_html()}"
        more = "".join([table, *_speed_sections(evidence.profile, folder), notes_section(evidence.profile.notes)])
    records, name = in_study(folder) or (folder / RECORDS, "")
    return list(write_report(records, folder, more=more, run=name)), evidence.notes


def write_evidence(folders: Sequence[Path], output: Path) -> tuple[Path, list[str]]:
    """Draw one page of several folders; return it, and what of the records was left out.

    Args:
        folders: Each with the records of a run, JSON files of benches, or both.
        output: Where `report.html` and its figures go.

    Raises:
        DataError: If there is nothing to draw, or the page would replace that of one of the folders.
        MissingExtraError: If matplotlib is not installed.
    """
    if output.resolve() in [folder.resolve() for folder in folders]:
        raise DataError(f"{output} holds a report of its own; choose another --output for the common page")
    evidence = read_evidence(folders)
    title = f"Evidence from {f'{len(folders)} folders' if len(folders) > 1 else folders[0].resolve().name}"
    return _write(title, evidence, output), evidence.notes


def evidence_table(evidence: Evidence) -> Table:
    """Return one line for each trained model of each run."""
    lines = []
    for run in evidence.runs:
        dense = run.records.number("dense", "token_perplexity")
        for subject in run.records.subjects():
            value = run.records.number(subject, "token_perplexity")
            skipped = [run.records.number(subject, f"sparsity.{key}") for key in SUBLAYERS]
            speeds = (sorted(run.speeds(subject, what)) for what in ("prefill", "decode"))
            lines.append(
                (
                    run.name,
                    NAMES[subject],
                    "-" if value is None else f"{value:z.2f}",
                    "-" if value is None or not dense else f"{value / dense:.2f}",
                    *("-" if rate is None else f"{100 * rate:z.1f}" for rate in skipped),
                    *("-".join(dict.fromkeys(f"{s:.2f}x" for s in (f[0], f[-1]))) if f else "-" for f in speeds),
                )
            )
    header = ("run", "model", "perplexity", "x dense", "attention %", "FFN %", "prefill", "decode")
    return Table(header=header, rows=tuple(lines))


def draw_comparison(comparison: Comparison, folder: Path, *, later: bool = False) -> tuple[list[Path], list[str]]:
    """Write `table.md`, `table.csv`, `report.html` and figures of a comparison; return the paths and all notes.

    Each file is replaced whole, so that several processes that draw the same comparison do not mix their halves. Where
    figures are not drawn, the page and a note say why.

    Args:
        comparison: What was measured.
        folder: Where the files go.
        later: Leave the figures to a process that goes on measuring.
    """
    reason = _LATER if later else "" if has_matplotlib() else _NO_MATPLOTLIB
    sections = [] if reason else figure_sections(COMPARISON_FIGURES, comparison, folder)
    more = missing_section("Figures", reason) if reason else "".join(sections)
    body = facts(comparison.run) + to_html(comparison) + more + notes_section(comparison.notes)
    page = document(comparison_title(comparison), body)
    texts = {TABLE: to_markdown(comparison), SHEET: to_csv(comparison), PAGE: page}
    for name, text in texts.items():
        write_whole(folder / name, text)
    paths = [folder / name for name in texts]
    if not reason and (folder / FOLDER).is_dir():
        paths.append(folder / FOLDER)
    return paths, [*comparison.notes, *filter(None, [reason])]


def _write(title: str, evidence: Evidence, output: Path) -> Path:
    sections = [f"<h2>Runs</h2>{evidence_table(evidence).to_html()}"] if evidence.runs else []
    for run in evidence.runs:
        page = os.path.relpath(run.folder / PAGE, output)
        link = f' <a href="{escape(page)}">its own report</a>' if (run.folder / PAGE).is_file() else ""
        sections.append(f"<details><summary>{escape(run.name)}</summary>{facts(run.records)}{link}</details>")
    sections += figure_sections([LAYERS_OF_RUNS], evidence, output) if len(evidence.runs) > 1 else []
    sections += _speed_sections(evidence.profile, output) if evidence.profile.files else []
    write_whole(output / PAGE, document(title, "".join([*sections, notes_section(evidence.notes)])))
    return output / PAGE


def _speed_sections(profile: Profile, output: Path) -> list[str]:
    """Return what was timed, and at the end each file with the command that measured it."""
    figures = [
        figure for figure, found in zip(SPEED_FIGURES, (profile.forwards(), profile.operators()), strict=True) if found
    ]
    sections = figure_sections(figures, profile, output)
    for name, table in other_tables(profile).items():
        sections.append(
            f"<h2>Records of {escape(name)}</h2><details><summary>Values</summary>{table.to_html()}</details>"
        )
    items = dict.fromkeys(
        f'<li><a href="{path}">{path}</a>: {escape(origin.about)}'
        f"{f'<br><code>{escape(origin.command)}</code>' if origin.command else ''}</li>"
        for origin in profile.origins
        for path in [escape(os.path.relpath(origin.path, output))]
    )
    return [*sections, f"<h2>Where the speed comes from</h2><ul>{''.join(items)}</ul>"]


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return short names that tell the folders apart."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise DataError("the same folder is named twice; name each once")
