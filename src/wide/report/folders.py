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
from wide.report.figure import Figure, MissingRecordsError, Origin, Row, required
from wide.report.page import PAGE, document, facts, figure_sections, missing_section, notes_section, write_report
from wide.report.profiles import DEPTH, NAIVE, OWN, Forward, Profile, read_profile, read_study
from wide.report.selection import NAMES, SUBLAYERS, Selection, in_study, read_selection, runs_of
from wide.report.speed_figures import DEPTH_FIGURES, NAIVE_FIGURES, SPEED_FIGURES, traffic_table
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
    """One run: its name to tell it from others, its folder, its records, and what the benches left in its folder."""

    name: str
    folder: Path
    records: Selection
    profile: Profile


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

    def points(self) -> list[Row]:
        """Return the models whose quality and speed are both known, of each shape that was timed."""
        points: list[Row] = []
        for run in self.runs:
            elsewhere = [forward for forward in self.profile.forwards() if _names(forward, run)]
            own = run.profile.forwards()
            for forward in [*own, *(each for each in elsewhere if each not in own)]:
                subject = _subject(forward, run)
                dense, value = (run.records.number(name, "token_perplexity") for name in ("dense", subject))
                is_its = forward.candidate in OWN and forward.model == run.records.text("run", "model")
                if is_its and dense and value is not None:
                    points.append(
                        {
                            "run": run.name,
                            "method": forward.method,
                            "subject": subject,
                            "name": f"{run.name}, {NAMES[subject]}",
                            "what": forward.what,
                            "shape": forward.shape,
                            "words": forward.shape.partition(", ")[2],
                            "ratio": value / dense,
                            "speedup": forward.speedup,
                        }
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


QUALITY_SPEED: Figure[Evidence] = Figure(
    name="quality-speed",
    title="Quality against measured speed",
    rows=lambda evidence: required(
        evidence.points(),
        "no run whose quality and whose speed with its own routing are both measured; time one on a GPU with wide "
        "profile --model M --adapter RUN --out RUN/profile",
    ),
    panel="what",
    x="speedup",
    y="ratio",
    by="name",
    words="words",
    line_at=1.0,
    x_label="measured speed-up over its dense peer",
    y_label="perplexity, x dense",
    about="Perplexity against measured speed; lower right is better",
    columns=2,
    height=4.2,
)
LAYERS_OF_RUNS: Figure[Evidence] = layers_figure(_layers, "by the last model of each run")


def exists(folder: Path) -> bool:
    """Return whether there is a folder, or a run in the record file of a study, FOLDER/NAME."""
    found = in_study(folder)
    return folder.is_dir() or (found is not None and found[1] in runs_of(found[0]))


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
    runs, profile = [], Profile(())
    for folder, name in zip(folders, _short_names(folders), strict=True):
        if (folder / STUDY).is_file() and read_records(folder / STUDY)[0]:
            several = ", ".join(runs_of(folder / STUDY))
            raise DataError(f"{folder} holds several runs; name those to draw as {folder}/NAME, with one of {several}")
        kept = in_study(folder)
        found = read_profile(folder) if kept is None else read_study(kept[0]).get((kept[1], None), Profile(()))
        if kept is not None or (folder / RECORDS).is_file():
            records = read_selection(folder / RECORDS) if kept is None else read_selection(*kept)
            runs.append(Run(name=name, folder=folder, records=records, profile=found))
        elif not found:
            raise DataError(
                f"{folder} holds neither {RECORDS} of a run nor operators.json, attention.json, endtoend.json, "
                "naive.json or depth.json of a bench; name the --output of wide prune or the --out of wide bench or "
                "wide profile"
            )
        profile += found
    return Evidence(runs, profile)


def write_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the report of one folder into it; return the files, and what of the records was left out.

    Args:
        folder: With the records of a run, JSON files of benches, or both.

    Raises:
        DataError: If there is nothing to draw.
        MissingExtraError: If matplotlib is not installed.
    """
    evidence = read_evidence([folder])
    if not evidence.runs:
        return [_write(f"Measured speed, {folder.resolve().name}", "", evidence, folder)], evidence.notes
    more = "".join((*_sections(evidence, folder), notes_section(evidence.profile.notes))) if evidence.profile else ""
    return list(write_report(folder / RECORDS, folder, more=more)), evidence.notes


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
    runs = "".join(_about(run, output) for run in evidence.runs)
    table = f"<h2>Runs</h2>{evidence_table(evidence).to_html()}{runs}" if evidence.runs else ""
    one = folders[0].resolve().name
    title = f"Evidence from {len(folders)} folders" if len(folders) > 1 else f"Evidence from {one}"
    return _write(title, table, evidence, output), evidence.notes


def evidence_table(evidence: Evidence) -> Table:
    """Return one line for each trained model of each run."""
    header = ("run", "model", "perplexity", "x dense", "attention %", "FFN %", "prefill", "decode")
    points = evidence.points()
    lines = []
    for run in evidence.runs:
        dense = run.records.number("dense", "token_perplexity")
        for subject in run.records.subjects():
            value = run.records.number(subject, "token_perplexity")
            skipped = [run.records.number(subject, f"sparsity.{key}") for key in SUBLAYERS]
            own = [point for point in points if (point["run"], point["subject"]) == (run.name, subject)]
            speeds = ([float(p["speedup"] or 0) for p in own if p["what"] == what] for what in ("prefill", "decode"))
            lines.append(
                (
                    run.name,
                    NAMES[subject],
                    "-" if value is None else f"{value:z.2f}",
                    "-" if value is None or not dense else f"{value / dense:.2f}",
                    *("-" if rate is None else f"{100 * rate:z.1f}" for rate in skipped),
                    *("-".join(dict.fromkeys(f"{s:.2f}x" for s in (min(f), max(f)))) if f else "-" for f in speeds),
                )
            )
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


def _write(title: str, first: str, evidence: Evidence, output: Path) -> Path:
    devices = escape(", ".join(evidence.profile.devices()))
    first += f"<dl><dt>measured on</dt><dd>{devices}</dd></dl>" if devices else ""
    body = "".join((first, *_sections(evidence, output), notes_section(evidence.notes)))
    write_whole(output / PAGE, document(title, body))
    return output / PAGE


def _sections(evidence: Evidence, output: Path) -> list[str]:
    profile = evidence.profile
    sections = figure_sections([QUALITY_SPEED], evidence, output) if evidence.runs else []
    sections += figure_sections([LAYERS_OF_RUNS], evidence, output) if len(evidence.runs) > 1 else []
    if any(file.name not in (NAIVE, DEPTH) for file in profile.files):
        sections += figure_sections(SPEED_FIGURES, profile, output)
    if profile.holds(NAIVE):
        table = traffic_table(profile).to_html()
        words = "Traffic and storage of intermediates by the paper's accounting, MiB"
        sections += [
            *figure_sections(NAIVE_FIGURES, profile, output),
            f"<details><summary>{escape(words)}</summary>{table}</details>",
        ]
    sections += figure_sections(DEPTH_FIGURES, profile, output) if profile.holds(DEPTH) else []
    return [*sections, _sources(profile, output)] if profile else sections


def _sources(profile: Profile, output: Path) -> str:
    """Return what the figures of speed are drawn from: each file, and the command that measured it."""
    items = dict.fromkeys(
        f'<li><a href="{path}">{path}</a>: {escape(origin.about)}'
        f"{f'<br><code>{escape(origin.command)}</code>' if origin.command else ''}</li>"
        for origin in profile.origins
        for path in [escape(os.path.relpath(origin.path, output))]
    )
    return (
        "<h2>Where the figures of speed come from</h2><p>Of equal measurements the later file counts. Files without a "
        f"command were measured before benches noted it.</p><ul>{''.join(items)}</ul>"
    )


def _about(run: Run, output: Path) -> str:
    page = run.folder / PAGE
    link = f' <a href="{escape(os.path.relpath(page, output))}">its own report</a>' if page.is_file() else ""
    return f"<details><summary>{escape(run.name)}</summary>{facts(run.records)}{link}</details>"


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return short names that tell the folders apart."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise DataError("the same folder is named twice; name each once")
