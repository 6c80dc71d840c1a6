"""`wide report`: read what folders hold and draw it again, each by itself or all on one page."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from wide.errors import DataError
from wide.report.bench_files import ATTENTION, DEPTH, END_TO_END, NAIVE, NAIVE_BYTES, OPERATORS
from wide.report.depth_figures import DEPTH_FIGURES, depth_table
from wide.report.evidence import EVIDENCE_FIGURES, Evidence, Run, evidence_table
from wide.report.layer_lines import LAYERS_OF_RUNS
from wide.report.naive_figures import NAIVE_FIGURES, traffic_table
from wide.report.page import PAGE, document, facts, figure_sections, notes_section, write_report
from wide.report.profiles import Profile, read_profile
from wide.report.selection import MissingRecordsError, read_selection
from wide.report.speed_figures import SPEED_FIGURES
from wide.report.sweep_figures import SWEEP_FIGURES
from wide.report.writing import write_whole

RECORDS = "records.jsonl"


def read_evidence(folders: Sequence[Path]) -> Evidence:
    """Return what folders of runs and benches hold.

    Args:
        folders: Each with the records of a run, JSON files of benches, or both.

    Raises:
        DataError: If a folder holds neither, or a file cannot be read.
    """
    runs, profile = [], Profile(())
    for folder, name in zip(folders, _names(folders), strict=True):
        found = read_profile(folder)
        path = folder / RECORDS
        if path.is_file():
            runs.append(Run(name=name, folder=folder, records=read_selection(path), profile=found))
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
    title = (
        f"Evidence from {len(folders)} folders" if len(folders) > 1 else f"Evidence from {folders[0].resolve().name}"
    )
    return _write(title, table, evidence, output), evidence.notes


def _write(title: str, first: str, evidence: Evidence, output: Path) -> Path:
    page = output / PAGE
    devices = escape(", ".join(evidence.profile.devices()))
    first += f"<dl><dt>measured on</dt><dd>{devices}</dd></dl>" if devices else ""
    body = "".join((first, *_sections(evidence, output), notes_section(evidence.notes)))
    write_whole(page, document(title, body))
    return page


def _sources(profile: Profile, output: Path) -> str:
    """Return what the figures of speed are drawn from: each file, and the command that measured it."""
    items = []
    for origin in profile.origins:
        path = escape(os.path.relpath(origin.path, output))
        command = f"<br><code>{escape(origin.command)}</code>" if origin.command else ""
        items.append(f'<li><a href="{path}">{path}</a>: {escape(origin.about)}{command}</li>')
    return (
        "<h2>Where the figures of speed come from</h2><p>Of equal measurements the later file counts. Files without a "
        f"command were measured before benches noted it.</p><ul>{''.join(items)}</ul>"
    )


def _sections(evidence: Evidence, output: Path) -> list[str]:
    profile = evidence.profile
    sections = figure_sections(EVIDENCE_FIGURES, evidence, output) if evidence.runs else []
    sections += figure_sections((LAYERS_OF_RUNS,), evidence, output) if len(evidence.runs) > 1 else []
    if profile.holds(OPERATORS, ATTENTION, END_TO_END):
        sections += figure_sections(SPEED_FIGURES, profile, output)
        sections += figure_sections(SWEEP_FIGURES, profile, output)
    if profile.holds(NAIVE, NAIVE_BYTES):
        sections += [*figure_sections(NAIVE_FIGURES, profile, output), _traffic(profile)]
    if profile.holds(DEPTH):
        sections += [*figure_sections(DEPTH_FIGURES, profile, output), _depth(profile)]
    return [*sections, _sources(profile, output)] if profile else sections


def _depth(profile: Profile) -> str:
    """Return the values of the figure above as a table, or nothing where it says what is missing."""
    try:
        table = depth_table(profile).to_html()
    except MissingRecordsError:
        return ""
    return (
        f"{table}<p>Microseconds. Each stage was timed by itself, so that parts and whole may differ by what lies in "
        "the cache; <em>indices</em> are the time until the host knows which rows execute.</p>"
    )


def _traffic(profile: Profile) -> str:
    """Return accounted and measured traffic as a table, or nothing where the figure above says what is missing."""
    try:
        table = traffic_table(profile).to_html()
    except MissingRecordsError:
        return ""
    return (
        f"<details><summary>Traffic and storage by the paper's accounting, and measured traffic</summary>{table}"
        "<p>MiB; <em>storage</em> is that of intermediates. <em>read</em>, <em>written</em> and <em>both</em>: from "
        "and to memory by the profiler's counters, of all kernels of a way, sorting included, each with cold caches; "
        "<em>x traffic</em>: both over the accounted traffic; <em>L2</em>: what the kernels ask of the second-level "
        "cache. -: not measured.</p></details>"
    )


def _about(run: Run, output: Path) -> str:
    page = run.folder / PAGE
    link = ""
    if page.is_file():
        path = escape(os.path.relpath(page, output))
        link = f' <a href="{path}">its own report</a>'
    return f"<details><summary>{escape(run.name)}</summary>{facts(run.records)}{link}</details>"


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short names that tell the folders apart."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise DataError("the same folder is named twice; name each once")
