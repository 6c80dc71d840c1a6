"""The report of a run: one HTML page that needs nothing else, and one picture."""

import base64
from html import escape
from pathlib import Path

from wide.records import read_records
from wide.report.drawing import draw_svg, save_png
from wide.report.figures import FIGURES
from wide.report.selection import MissingRecordsError, Selection
from wide.report.table import NAMES, Table, summary_table

_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: #444; } dd { margin: 0;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: right;
  border-bottom: 1px solid #bbb; } th { border-bottom: 2px solid #111; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } img { width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f3f3; padding: .7rem 1rem; }
.missing { border: 1px dashed #555; padding: .7rem 1rem; } figure { margin: 0; } figcaption { color: #444; }
"""
_FACTS = ("description", "model", "data", "target", "held-out text", "device", "versions", "date", "command")


def write_report(records: Path, folder: Path) -> tuple[Path, Path]:
    """Draw `report.html` and `report.png` from a run's records and return both paths.

    Args:
        records: A file written by `wide.records.RecordFile`.
        folder: Where the two files go.

    Raises:
        DataError: If there are no readable records.
        MissingExtraError: If matplotlib is not installed.
    """
    run = Selection(*read_records(records))
    page, picture = folder / "report.html", folder / "report.png"
    page.write_text(_html(run), encoding="utf-8")
    save_png(picture, run)
    return page, picture


def _html(run: Selection) -> str:
    title = f"Token-wise width pruning of {run.text('run', 'model') or 'a model'}"
    sections = [_header(run), _table(run)]
    sections += [_figure(run, *entry) for entry in FIGURES]
    sections += [_samples(run), _notes(run)]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _header(run: Selection) -> str:
    facts = {name: run.text("run", name) for name in _FACTS}
    if run.records:
        last = run.records[-1]
        facts["device"] = facts["device"] or last.device
        versions = next((record.versions for record in reversed(run.records) if record.versions), {})
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        facts["date"] = last.time
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


def _table(run: Selection) -> str:
    table: Table = summary_table(run)
    if not table.rows:
        return '<h2>Results</h2><p class="missing">Nothing was evaluated: no record of perplexity or sparsity.</p>'
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<h2>Results</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "<p>Perplexity is per token. Sparsity is the share of skipped groups, measured on the evaluated tokens; "
        "<em>mean</em> weighs attention and FFN alike, <em>linear FLOPs</em> weighs each group by the matrix-product "
        "work that skipping it saves. Stage 2 adapts the weights to the training text, the dense model was not "
        "adapted: on text of the same kind, part of what stage 2 gains is that.</p>"
    )


def _figure(run: Selection, title: str, draw: object, size: tuple[float, float]) -> str:
    try:
        svg, description = draw_svg(draw, size, run)  # type: ignore[arg-type]
    except MissingRecordsError as missing:
        return f'<h2>{escape(title)}</h2><p class="missing">Not drawn: {escape(str(missing))}.</p>'
    # As an image the picture keeps its identifiers to itself, so that two pictures on a page cannot collide.
    source = base64.b64encode(svg.encode()).decode()
    return (
        f'<h2>{escape(title)}</h2><figure><img src="data:image/svg+xml;base64,{source}" '
        f'alt="{escape(description)}"></figure>'
    )


def _samples(run: Selection) -> str:
    texts = [(subject, run.text(subject, "sample")) for subject in NAMES]
    shown = [f"<h3>{escape(NAMES[subject])}</h3><pre>{escape(text)}</pre>" for subject, text in texts if text]
    return "<h2>Generated text</h2>" + "".join(shown) if shown else ""


def _notes(run: Selection) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""
