"""The page of a report: one HTML file that needs nothing else."""

import base64
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from wide.report.drawing import FOLDER, ink, save_figure, shade
from wide.report.figure import Figure, MissingRecordsError
from wide.report.run_figures import figures_of
from wide.report.selection import NAMES, SUBLAYERS, Origin, Selection
from wide.report.table import Table, verdict

_STEPS, _TITLE_LAYERS, _MOST_ROWS = 9, 48, 400
_FACTS = (
    *("description", "model", "data", "target", "LoRA", "held-out text", "window", "device", "versions", "date"),
    "command",
)
_STATIC = "The plan is static: it prunes the same for every token, so there is no routing to show."


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page, in the order in which its parts are shown; what is empty is not.

    Args:
        verdict: What a run came to, the first sentence in large letters.
        missing: Why nothing is drawn, and the way out: a sentence without its full stop.
        coloured: Texts whose tokens have a colour each, as `_coloured` makes them.
        folded: Whether tables are to be opened.
        runs: Name, place of its own page and facts of each run; one without a name is shown unfolded.
        figure: A drawn figure, as `figure_sections` makes it.
        files: Place of each file of records, what it says of its measurement, and the command that measured.
    """

    title: str = ""
    verdict: Sequence[str] = ()
    missing: str = ""
    coloured: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    runs: Sequence[tuple[str, str, Mapping[str, str]]] = ()
    figure: Mapping[str, Any] | None = None
    texts: Sequence[str] = ()
    samples: Sequence[tuple[str, str]] = ()
    items: Sequence[str] = ()
    files: Sequence[tuple[str, str, str]] = ()

    def to_markdown(self) -> str:
        """Return title, tables, paragraphs and list as Markdown."""
        parts = [f"## {self.title}", *(table.to_markdown() for table in self.tables), *self.texts]
        return "\n\n".join([*parts, *(["\n".join(f"- {item}" for item in self.items)] if self.items else [])])


def render(title: str, sections: Sequence[Section]) -> str:
    """Return a whole page that needs nothing else."""
    text = (resources.files("wide.report") / "page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    shares = [step / (_STEPS - 1) for step in range(_STEPS)]
    return template.render(title=title, sections=sections, scale=[(shade(share), ink(share)) for share in shares])


def run_sections(run: Selection, table: Table, folder: Path, speed: str) -> list[Section]:
    """Return the sections of a run, beginning with what it came to, and write the files of its figures."""
    samples = [(name, text) for subject, name in NAMES.items() if (text := run.text(subject, "sample"))]
    return [
        Section(verdict=[*verdict(run), speed]),
        _results(run, table),
        Section(title="The run", runs=facts_section(run).runs),
        *([Section(texts=[_STATIC])] if run.is_static() else _sample(run)),
        *figure_sections(figures_of(run), run, folder, run.origins),
        *([Section(title="Generated text", samples=samples)] if samples else []),
        *notes_section(run.notes),
    ]


def figure_sections(
    figures: Sequence[Figure], source: Any, folder: Path, origins: Sequence[Origin]
) -> Iterator[Section]:
    """Yield a section for each figure, drawn or with what is missing, and write the files of those drawn.

    `origins` are the files that they are drawn from, and say what of these is left out.
    """
    for figure in figures:
        try:
            svg, rows = save_figure(figure, source, folder)
        except MissingRecordsError as missing:
            yield Section(title=figure.title, missing=str(missing))
            continue
        drawn = {
            # As an image the picture keeps its identifiers to itself, so that two pictures on a page cannot collide.
            "svg": base64.b64encode(svg.encode()).decode(),
            "about": figure.about,
            "files": f"{FOLDER}/{figure.name}",
            "table": Table.of_rows(rows) if len(rows) <= _MOST_ROWS else None,
            "origins": {os.path.relpath(origin.path, folder): origin.notes for origin in origins},
        }
        yield Section(title=figure.title, figure=drawn)


def facts(run: Selection) -> dict[str, str]:
    """Return what was run, on what and when."""
    found = {name: run.text("run", name) for name in _FACTS}
    if run.records:
        last = run.records[-1]
        found["device"] = found["device"] or last.device
        versions = next((record.versions for record in reversed(run.records) if record.versions), {})
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        found["date"] = last.time
    return found


def facts_section(run: Selection) -> Section:
    """Return what a page is of."""
    return Section(runs=[("", "", facts(run))])


def notes_section(notes: Sequence[str]) -> list[Section]:
    """Return what was left out as a section; none where nothing was."""
    return [Section(title="Notes", items=list(dict.fromkeys(notes)))] if notes else []


def _results(run: Selection, table: Table) -> Section:
    if not table.rows:
        return Section(title="Results", missing="no record of perplexity or sparsity, because nothing was evaluated")
    text = (
        f"Skipped is the share {run.measure()[1]}, as the target counts. Attention and FFN: of their groups; layers' "
        "work: of all matrix products of the decoder layers, K and V included. All of it on the evaluated tokens."
    )
    return Section(title="Results", tables=[table], texts=[text])


def _sample(run: Selection) -> list[Section]:
    title, subject = "Execution by token", run.last_subject_with("routing.sample")
    try:
        sample = run.content(subject, "routing.sample") if subject else {}
        texts = [_coloured(sample["tokens"], sample[key], name) for key, name in SUBLAYERS.items() if sample.get(key)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return [Section(title=title, missing=f"record 'routing.sample' is damaged ({error!r}); measure it again")]
    about = (
        "Darker tokens execute more groups. Point at a token to see its layers; the values of the first ones are in "
        "figures/tokens.csv."
    )
    return [Section(title=title, coloured=texts, texts=[about])] if texts else []


def _coloured(tokens: Sequence[str], percents: Sequence[Sequence[float | None]], name: str) -> dict[str, Any]:
    """Return a text in which the background of each token shows how much of the model it executes.

    The scale runs from the token that executes least to the one that executes most, and a legend names both. Of each
    token, `percents` has the percentage of groups that each layer executes; None where not routed.
    """
    known = [{layer: value for layer, value in enumerate(row) if value is not None} for row in percents]
    means = [statistics.fmean(row.values()) if row else 0.0 for row in known]
    low, high = min(means), max(means)
    shown = []
    for token, mean, row in zip(tokens, means, known, strict=True):
        step = round((mean - low) / (high - low) * (_STEPS - 1)) if high > low else _STEPS // 2
        layers = [f"layer {layer}: {value:.0f} %" for layer, value in row.items()]
        more = [f"{len(layers) - _TITLE_LAYERS} layers more"] if len(layers) > _TITLE_LAYERS else []
        words = [f"{token.strip() or repr(token)}: {mean:.0f} %", *layers[:_TITLE_LAYERS], *more]
        # A line break keeps its sign, so that it can be pointed at; a token without text of its own shows as a dot.
        shown.append((step, words, token.replace("\n", "↵\n") or "·"))
    summary = (
        f"{len(tokens)} tokens coloured by the share of {name} groups that they execute, mean over layers: "
        f"{low:.0f} to {high:.0f} percent"
    )
    scale = [f"{low + (high - low) * step / (_STEPS - 1):.0f}" for step in range(_STEPS)]
    return {"name": name, "summary": summary, "scale": scale, "tokens": shown}
