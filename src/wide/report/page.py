"""The page of a report: one HTML file that needs nothing else."""

import base64
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from wide.report.drawing import FOLDER, ink, save_figure, save_png, shade
from wide.report.figure import Figure, MissingRecordsError, Row, Source
from wide.report.run_figures import figures_of
from wide.report.selection import NAMES, SUBLAYERS, Selection, read_selection
from wide.report.table import ADAPTED, Table, summary_table
from wide.report.writing import write_whole

PAGE, PICTURE = "report.html", "report.png"
_STEPS, _TITLE_LAYERS, _MOST_ROWS = 9, 48, 400
_FACTS = ("description", "model", "data", "target", "LoRA", "held-out text", "device", "versions", "date", "command")
_NO_SPEED = (
    "the speed of this model was not measured; on a GPU, run wide profile --model M --adapter RUN --out RUN/profile, "
    "then wide report RUN"
)
_STATIC = "<p>The plan is static: it prunes the same for every token, so there is no routing to show.</p>"


def write_report(records: Path, folder: Path, *, more: str = "", run: str = "") -> tuple[Path, Path]:
    """Draw `report.html`, `report.png` and the folder `figures` from a run's records; return page and picture.

    Args:
        records: A file written by `wide.records.RecordFile`.
        folder: Where the files go.
        more: Further sections of the page, as HTML: the measured speed; without any, the page says how to measure it.
        run: Which run, in a file that holds several.

    Raises:
        DataError: If there are no readable records.
        MissingExtraError: If matplotlib is not installed.
    """
    found = read_selection(records, run)
    title = f"Token-wise width pruning of {found.text('run', 'model') or 'a model'}"
    body = run_body(found, folder) + (more or missing_section("Speed", _NO_SPEED))
    write_whole(folder / PAGE, document(title, body))
    save_png(folder / PICTURE, figures_of(found), found)
    return folder / PAGE, folder / PICTURE


def run_body(run: Selection, folder: Path) -> str:
    """Return the sections of a run as HTML and write the files of its figures.

    Args:
        run: Its records.
        folder: Of the report.
    """
    texts = [(subject, run.text(subject, "sample")) for subject in NAMES]
    samples = [f"<h3>{escape(NAMES[subject])}</h3><pre>{escape(text)}</pre>" for subject, text in texts if text]
    parts = (
        facts(run),
        _table(run),
        _STATIC if run.is_static() else _sample(run),
        *figure_sections(figures_of(run), run, folder),
        "<h2>Generated text</h2>" + "".join(samples) if samples else "",
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
            svg = save_figure(figure, source, folder)
        except MissingRecordsError as missing:
            sections.append(missing_section(figure.title, str(missing)))
        else:
            sections.append(_drawn(figure, svg, figure.table(source), _from(source, folder)))
    return sections


def document(title: str, body: str) -> str:
    """Return a whole page that needs nothing else.

    Args:
        title: Of the page, as plain text.
        body: What follows the title, as HTML.
    """
    template = Template((resources.files("wide.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), scale=text_css(), body=body)


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


def missing_section(title: str, missing: str) -> str:
    """Return the section that stands for what is not drawn.

    Args:
        title: Of what is missing.
        missing: Why, and the way out: a sentence without its full stop.
    """
    return f'<h2>{escape(title)}</h2><p class="missing">Not drawn: {escape(missing)}.</p>'


def notes_section(notes: Sequence[str]) -> str:
    """Return what was left out, as a section of a page; empty where nothing was."""
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def _table(run: Selection) -> str:
    table = summary_table(run)
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
    name = next((ADAPTED[subject] for subject in run.subjects() if subject in ADAPTED), "")
    return name and (
        f" {name[0].upper()}{name[1:]} adapts the weights to the training text, the dense model was not adapted: on "
        f"text of the same kind, part of what {name} gains is that."
    )


def _from(source: Source, folder: Path) -> str:
    """Return the line that says which records a figure is drawn from, and what of them is left out."""
    origins = {origin.path: origin.notes for origin in source.origins}
    paths = [escape(os.path.relpath(path, folder)) for path in origins]
    links = [f'<a href="{path}">{path}</a>' for path in paths]
    left_out = "".join(f"<br><strong>{escape(note)}</strong>" for notes in origins.values() for note in notes)
    return f"Drawn from {', '.join(links)}{left_out}" if links else ""


def _drawn(figure: Figure[Any], svg: str, rows: Sequence[Row], origins: str) -> str:
    # As an image the picture keeps its identifiers to itself, so that two pictures on a page cannot collide.
    source = base64.b64encode(svg.encode()).decode()
    files = ", ".join(f'<a href="{FOLDER}/{figure.name}.{kind}">{kind.upper()}</a>' for kind in ("csv", "svg", "png"))
    values = Table.of_rows(rows).to_html() if len(rows) <= _MOST_ROWS else "<p>The values are in the CSV file.</p>"
    return (
        f'<h2>{escape(figure.title)}</h2><figure><img src="data:image/svg+xml;base64,{source}" '
        f'alt="{escape(figure.about)}"><figcaption>{escape(figure.about)}.<details><summary>Values, and as files: '
        f"{files}</summary>{values}</details>{origins}</figcaption></figure>"
    )


def text_css() -> str:
    """Return the style of `coloured_text`'s scale, for the head of a page."""
    shares = [step / (_STEPS - 1) for step in range(_STEPS)]
    return "".join(
        f".s{step} {{ background: {shade(share)}; color: {ink(share)}; }}\n" for step, share in enumerate(shares)
    )


def coloured_text(tokens: Sequence[str], shares: Sequence[Sequence[float | None]], sublayer: str) -> str:
    """Return one text as HTML, in which the background of each token shows how much of the model it executes.

    The scale runs from the token that executes least to the one that executes most, and a legend names both.

    Args:
        tokens: Texts of the tokens, which join to the whole.
        shares: For each token the share of groups that each layer executes, in [0, 1]; None where not routed.
        sublayer: 'attention' or 'ffn'.
    """
    known = [[share for share in row if share is not None] for row in shares]
    means = [sum(row) / len(row) if row else 0.0 for row in known]
    low, high = min(means), max(means)
    steps = [round((mean - low) / (high - low) * (_STEPS - 1)) if high > low else _STEPS // 2 for mean in means]
    spans = "".join(
        f'<span class="s{step}" title="{_title(token, mean, row)}">{_shown(token)}</span>'
        for token, mean, row, step in zip(tokens, means, shares, steps, strict=True)
    )
    legend = "".join(
        f'<span class="s{step}">{100 * (low + (high - low) * step / (_STEPS - 1)):.0f} %</span>'
        for step in range(_STEPS)
    )
    name = SUBLAYERS[sublayer]
    summary = (
        f"{len(tokens)} tokens coloured by the share of {name} groups that they execute, mean over layers: "
        f"{100 * low:.0f} to {100 * high:.0f} percent"
    )
    return (
        f'<figure aria-label="{escape(summary)}"><figcaption>{escape(name)}, executed groups: '
        f'<span class="scale">{legend}</span></figcaption><pre class="tokens">{spans}</pre></figure>'
    )


def _sample(run: Selection) -> str:
    """Return the section with the sample of a text, coloured; empty where none was measured."""
    subject = run.last_subject_with("routing.sample")
    try:
        sample = run.content(subject, "routing.sample") if subject else {}
        texts = [
            coloured_text(
                sample["tokens"],
                [[None if share is None else share / 100 for share in row] for row in sample[sublayer]],
                sublayer,
            )
            for sublayer in SUBLAYERS
            if sample.get(sublayer)
        ]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return missing_section(
            "Execution by token", f"record 'routing.sample' is damaged ({error!r}); measure it again"
        )
    if not texts:
        return ""
    return (
        f"<h2>Execution by token</h2>{''.join(texts)}<p>Darker tokens execute more groups. Point at a token to see its "
        "layers; the values of the first ones are in figures/tokens.csv.</p>"
    )


def _title(token: str, mean: float, row: Sequence[float | None]) -> str:
    layers = [f"layer {layer}: {100 * share:.0f} %" for layer, share in enumerate(row) if share is not None]
    more = [f"{len(layers) - _TITLE_LAYERS} layers more"] if len(layers) > _TITLE_LAYERS else []
    lines = [f"{token.strip() or repr(token)}: {100 * mean:.0f} %", *layers[:_TITLE_LAYERS], *more]
    return "&#10;".join(escape(line) for line in lines)


def _shown(token: str) -> str:
    # A line break keeps its sign, so that it can be pointed at; a token without text of its own shows as a dot.
    return escape(token).replace("\n", "↵\n") if token else "·"
