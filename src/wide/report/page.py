"""The page of a report: one HTML file that needs nothing else."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from wide.report.drawing import FOLDER, save_figure
from wide.report.figure import Figure, MissingRecordsError
from wide.report.run_figures import FIGURES
from wide.report.selection import NAMES, Selection
from wide.report.table import Table, verdict

_MOST_ROWS = 400
_FACTS = (
    *("description", "model", "data", "target", "LoRA", "held-out text", "window", "device", "versions", "date"),
    "command",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page, in the order in which its parts are shown; what is empty is not.

    Args:
        verdict: What a run came to, the first sentence in large letters.
        folded: Whether tables are to be opened.
        facts: What was run, on what and when, by name.
        figure: A drawn figure, as `figure_sections` makes it.
        samples: Titles and texts as they were generated.
        files: Place of each file of records, what it says of its measurement, and the command that measured.
    """

    title: str = ""
    verdict: Sequence[str] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    facts: Mapping[str, str] | None = None
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
    return template.render(title=title, sections=sections)


def run_sections(run: Selection, table: Table, folder: Path, speed: str) -> list[Section]:
    """Return the sections of a run, beginning with what it came to, and write the files of its figures."""
    samples = [(name, text) for subject, name in NAMES.items() if (text := run.text(subject, "sample"))]
    return [
        Section(verdict=[*verdict(run), speed]),
        _results(run, table),
        Section(title="The run", facts=facts(run)),
        *figure_sections(FIGURES, run, folder),
        *([Section(title="Generated text", samples=samples)] if samples else []),
    ]


def figure_sections(figures: Sequence[Figure], source: Any, folder: Path) -> Iterator[Section]:
    """Yield a section for each figure that can be drawn, whose files are written, and one with what others lack."""
    missing = []
    for figure in figures:
        try:
            svg, rows = save_figure(figure, source, folder)
        except MissingRecordsError as error:
            missing.append(f"{figure.title}: {error}.")
            continue
        drawn = {
            # As an image the picture keeps its identifiers to itself, so that two pictures on a page cannot collide.
            "svg": base64.b64encode(svg.encode()).decode(),
            "about": figure.about,
            "files": f"{FOLDER}/{figure.name}",
            "table": Table.of_rows(rows) if len(rows) <= _MOST_ROWS else None,
        }
        yield Section(title=figure.title, figure=drawn)
    if missing:
        yield Section(title="Not drawn", items=missing)


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


def notes_section(notes: Sequence[str]) -> list[Section]:
    """Return what was left out as a section; none where nothing was."""
    return [Section(title="Notes", items=list(dict.fromkeys(notes)))] if notes else []


def _results(run: Selection, table: Table) -> Section:
    if not table.rows:
        return Section(title="Results", texts=["No record of perplexity or sparsity: nothing was evaluated."])
    text = (
        f"Skipped is the share {run.measure()[1]}, as the target counts. Attention and FFN: of their groups; layers' "
        "work: of all matrix products of the decoder layers, K and V included. All of it on the evaluated tokens."
    )
    return Section(title="Results", tables=[table], texts=[text])
