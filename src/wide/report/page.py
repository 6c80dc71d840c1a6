"""The report of a run: one HTML page that needs nothing else, and one picture."""

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from wide.report.coloured_text import sample_section, text_css
from wide.report.drawing import FOLDER, save_figure, save_png
from wide.report.figure import Figure, Origin, Source
from wide.report.figures import figures_of
from wide.report.selection import MissingRecordsError, Selection, read_selection
from wide.report.table import ADAPTED, NAMES, Table, summary_table
from wide.report.writing import write_whole

PAGE, PICTURE = "report.html", "report.png"
_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: #444; } dd { margin: 0;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #bbb; } td { white-space: nowrap; }
th { border-bottom: 2px solid #111; vertical-align: bottom; }
@media (min-width: 62rem) { .wide { width: max-content; min-width: 100%; max-width: calc(100vw - 3rem);
  margin-left: 50%; transform: translateX(-50%); } }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } img { width: 100%; height: auto; }
a { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f3f3; padding: .7rem 1rem; }
.missing { border: 1px dashed #555; padding: .7rem 1rem; } figcaption { color: #444; }
figure { margin: 0; overflow-x: auto; } figure img { min-width: 40rem; }
details { font-size: .9rem; } code { overflow-wrap: anywhere; font-size: .85rem; }
@media print { figure { break-inside: avoid; } }
"""
_FACTS = ("description", "model", "data", "target", "LoRA", "held-out text", "device", "versions", "date", "command")

_NO_SPEED = MissingRecordsError(
    "the speed of this model was not measured; on a GPU, run wide profile --model M --adapter RUN --out RUN/profile, "
    "then wide report RUN"
)


_STATIC = "<p>The plan is static: it prunes the same for every token, so there is no routing to show.</p>"


def write_report(records: Path, folder: Path, *, more: str = "") -> tuple[Path, Path]:
    """Draw `report.html`, `report.png` and the folder `figures` from a run's records; return page and picture.

    Args:
        records: A file written by `wide.records.RecordFile`.
        folder: Where the files go.
        more: Further sections of the page, as HTML: the measured speed; without any, the page says how to measure it.

    Raises:
        DataError: If there are no readable records.
        MissingExtraError: If matplotlib is not installed.
    """
    run = read_selection(records)
    page, picture = folder / PAGE, folder / PICTURE
    write_whole(page, document(run_title(run), run_body(run, folder) + (more or missing_section("Speed", _NO_SPEED))))
    save_png(picture, figures_of(run), run)
    return page, picture


def run_title(run: Selection) -> str:
    """Return the title of a run's page."""
    return f"Token-wise width pruning of {run.text('run', 'model') or 'a model'}"


def run_body(run: Selection, folder: Path) -> str:
    """Return the sections of a run as HTML and write the files of its figures.

    Args:
        run: Its records.
        folder: Of the report.
    """
    subject = run.last_subject_with("routing.sample")
    try:
        sample = None if subject is None else run.json(subject, "routing.sample")
        text = sample_section(sample)
    except MissingRecordsError as missing:
        text = missing_section("Execution by token", missing)
    figures = figure_sections(figures_of(run), run, folder)
    parts = (
        facts(run),
        _table(run),
        _STATIC if run.is_static() else text,
        *figures,
        _samples(run),
        notes_section(run.notes),
    )
    return "\n".join(filter(None, parts))


def figure_sections(figures: Sequence[Figure[Source]], source: Source, folder: Path) -> list[str]:
    """Return a section of HTML for each figure, drawn or with what is missing, and write the files of those drawn.

    Args:
        figures: In their order.
        source: What they show.
        folder: Of the report.
    """
    sections = []
    for figure in figures:
        try:
            svg, description = save_figure(figure, source, folder)
        except MissingRecordsError as missing:
            sections.append(missing_section(figure.title, missing))
        else:
            sections.append(_drawn(figure.name, figure.title, svg, description, _from(figure.origins(source), folder)))
    return sections


def document(title: str, body: str) -> str:
    """Return a whole page that needs nothing else.

    Args:
        title: Of the page, as plain text.
        body: What follows the title, as HTML.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}{text_css()}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def facts(run: Selection) -> str:
    """Return what was run, on what and when, as HTML."""
    found = {name: run.text("run", name) for name in _FACTS}
    if run.records:
        last = run.records[-1]
        found["device"] = found["device"] or last.device
        versions = next((record.versions for record in reversed(run.records) if record.versions), {})
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        found["date"] = last.time
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in found.items() if value)
    return f"<dl>{rows}</dl>"


def _table(run: Selection) -> str:
    table: Table = summary_table(run)
    if not table.rows:
        return '<h2>Results</h2><p class="missing">Nothing was evaluated: no record of perplexity or sparsity.</p>'
    return (
        f"<h2>Results</h2>{table.to_html()}"
        "<p>Perplexity is per token. Sparsity is the share of skipped groups, measured on the evaluated tokens; "
        "<em>mean</em> weighs attention and FFN alike, <em>linear FLOPs</em> weighs each group by the matrix-product "
        f"work that skipping it saves.{_caution(run)}</p>"
    )


def _caution(run: Selection) -> str:
    """Return what keeps an adapted model from being compared with the dense one; empty where none was adapted."""
    if "dense + LoRA" in run.subjects():
        return " What LoRA learns of the training text the dense model with the same LoRA has learned, too."
    for subject in run.subjects():
        if subject in ADAPTED:
            name = ADAPTED[subject]
            return (
                f" {name[0].upper()}{name[1:]} adapts the weights to the training text, the dense model was not "
                f"adapted: on text of the same kind, part of what {name} gains is that."
            )
    return ""


def _from(origins: Sequence[Origin], folder: Path) -> str:
    """Return the line that says which records a figure is drawn from, and what of them is left out."""
    paths = [escape(os.path.relpath(each.path, folder)) for each in origins]
    links = [f'<a href="{path}">{path}</a>' for path in paths]
    left_out = "".join(f"<br><strong>{escape(note)}</strong>" for each in origins for note in each.notes)
    return f"Drawn from {', '.join(links)}{left_out}" if links else ""


def _drawn(name: str, title: str, svg: str, description: str, origins: str) -> str:
    # As an image the picture keeps its identifiers to itself, so that two pictures on a page cannot collide.
    source = base64.b64encode(svg.encode()).decode()
    files = ", ".join(f'<a href="{FOLDER}/{name}.{kind}">{kind.upper()}</a>' for kind in ("csv", "svg", "png"))
    return (
        f'<h2>{escape(title)}</h2><figure><img src="data:image/svg+xml;base64,{source}" '
        f'alt="{escape(description)}"><figcaption><details><summary>In words, and as files: {files}</summary>'
        f"{escape(description)}</details>{origins}</figcaption></figure>"
    )


def missing_section(title: str, missing: str | MissingRecordsError) -> str:
    """Return the section that stands for what is not drawn.

    Args:
        title: Of what is missing.
        missing: Why, and the way out: a sentence without its full stop, or an error that says so.
    """
    return f'<h2>{escape(title)}</h2><p class="missing">Not drawn: {escape(str(missing))}.</p>'


def _samples(run: Selection) -> str:
    texts = [(subject, run.text(subject, "sample")) for subject in NAMES]
    shown = [f"<h3>{escape(NAMES[subject])}</h3><pre>{escape(text)}</pre>" for subject, text in texts if text]
    return "<h2>Generated text</h2>" + "".join(shown) if shown else ""


def notes_section(notes: Sequence[str]) -> str:
    """Return what was left out, as a section of a page; empty where nothing was."""
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""
