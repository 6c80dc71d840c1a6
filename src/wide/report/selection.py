"""Find values among the records of a run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wide.errors import DataError
from wide.records import STUDY, Record, Subject, read_lines, read_records
from wide.report.figure import Origin

NAMES = {
    "dense": "dense",
    "dense + LoRA": "dense, with the same LoRA",
    "untrained": "untrained routers",
    "stage 1": "stage 1 (routers)",
    "stage 1+2": "stage 1+2 (routers, LoRA)",
    "pruned": "pruned",
    "pruned + LoRA": "pruned, with LoRA",
}
"""What a run may have measured, in the order in which it is shown, and its name."""
SUBJECTS = tuple(NAMES)
SUBLAYERS = {"attention": "attention", "ffn": "FFN"}
"""Key of a sublayer in the names of metrics, and its name."""


_KINDS: dict[str, type] = {
    **dict.fromkeys(("settings", "training", "routing.sample"), dict),
    **dict.fromkeys(("grid.methods", "grid.sparsities", "token_perplexity.windows"), list),
    **dict.fromkeys(("status", "deviations", "model"), str),
}
_NUMBERS = ("token_perplexity", "word_perplexity", "wikitext.", "accuracy.", "sparsity.", "training.", "method.")


def _is_usable(record: Record) -> bool:
    """Return whether a record has a value of the kind that its metric wants."""
    kind = _KINDS.get(record.metric, int | float if record.metric.startswith(_NUMBERS) else object)
    return record.value is not None and isinstance(record.value, kind)


class Selection:
    """The records of one run, by subject and metric; of repeated measurements the latest counts.

    Args:
        records: In the order in which they were written.
        notes: What was left out while reading them, in words.
        origins: The files that they lie in.
    """

    def __init__(self, records: Sequence[Record], notes: Sequence[str] = (), origins: Sequence[Origin] = ()) -> None:
        """Index the records."""
        damaged = Counter(repr(record.metric) for record in records if not _is_usable(record))
        told = [f"left out {count} of {len(records)} records: {name} is damaged" for name, count in damaged.items()]
        self.records = tuple(record for record in records if _is_usable(record))
        self.notes = (*notes, *told)
        self.origins = tuple(origins)
        self._values = {(r.subject, r.metric, r.layer, r.step): r for r in self.records}
        self._by_metric: dict[tuple[Subject, str], list[Record]] = {}
        for record in self._values.values():
            self._by_metric.setdefault((record.subject, record.metric), []).append(record)

    def subjects(self) -> list[str]:
        """Return the subjects whose quality or sparsity was measured, in the order of `SUBJECTS`."""
        measured = {r.subject for r in self.records if r.metric.startswith(("token_perplexity", "sparsity."))}
        return [subject for subject in SUBJECTS if subject in measured]

    def record(self, subject: Subject, metric: str) -> Record | None:
        """Return the record of a whole-model value, None where it was not measured."""
        return self._values.get((subject, metric, None, None))

    def number(self, subject: Subject, metric: str) -> float | None:
        """Return a whole-model number, None where it was not measured."""
        found = self.content(subject, metric)
        return float(found) if isinstance(found, int | float) else None

    def text(self, subject: Subject, metric: str) -> str:
        """Return a text, empty where there is none."""
        found = self.record(subject, metric)
        return "" if found is None else str(found.value)

    def content(self, subject: Subject, metric: str) -> Any:
        """Return a whole-model value of any kind, None where it was not measured."""
        found = self.record(subject, metric)
        return None if found is None else found.value

    def content_by_layer(self, subject: Subject, metric: str) -> list[tuple[int, Any]]:
        """Return (layer, value) pairs of any kind, first layer first."""
        found = [(r.layer, r.value) for r in self._by_metric.get((subject, metric), ()) if r.layer is not None]
        return sorted(found, key=lambda pair: pair[0])

    def by_layer(self, subject: Subject, metric: str) -> list[tuple[int, float]]:
        """Return (layer, number) pairs, first layer first."""
        return [(layer, float(value)) for layer, value in self.content_by_layer(subject, metric)]

    def by_step(self, subject: Subject, metric: str) -> list[tuple[int, float]]:
        """Return (step, number) pairs, first step first."""
        found = self._by_metric.get((subject, metric), ())
        return sorted(
            (r.step, float(r.value)) for r in found if r.step is not None and isinstance(r.value, int | float)
        )

    def last_subject_with(self, *metrics: str) -> str | None:
        """Return the last subject, in the order of `SUBJECTS`, of which any of the metrics was measured."""
        found = [s for s in SUBJECTS if any((s, metric) in self._by_metric for metric in metrics)]
        return found[-1] if found else None

    def last_subject_with_layers(self) -> str | None:
        """Return the last trained subject whose layers were measured."""
        found = [s for s in self.subjects() if any(self.by_layer(s, f"sparsity.{name}") for name in SUBLAYERS)]
        return found[-1] if found else None

    def is_static(self) -> bool:
        """Return whether all that was measured beside the dense model has a plan without routers."""
        models = [subject for subject in self.subjects() if subject not in ("dense", "dense + LoRA")]
        if not models or any(metric.startswith("routing.") for _, metric in self._by_metric):
            return False
        tokens = [self.number(subject, "sparsity.tokens") for subject in models]
        # Of a static plan no token need be watched to know its sparsity.
        return any(number is not None for number in tokens) and not any(tokens)


def read_selection(path: Path, run: str = "") -> Selection:
    """Return the records of a file.

    Args:
        path: Written by `wide.records.RecordFile`.
        run: Only those of this run, in a file that holds several.

    Raises:
        DataError: If it is missing, or none of its lines is a record.
    """
    records, notes = read_records(path, run)
    if not records:
        raise DataError(f"{path} holds no record of a run; wanted the records of a wide prune or compare")
    found = Selection(records, notes)
    return Selection(found.records, found.notes, [Origin(path=str(path), notes=found.notes)])


def in_study(folder: Path) -> tuple[Path, str] | None:
    """Return the record file of a study and the run in it that a path names, FOLDER/NAME; None for other folders."""
    for parent in folder.parents:
        if (parent / STUDY).is_file():
            name = folder.relative_to(parent).as_posix()
            # The page of a run makes a folder of its name.
            return (parent / STUDY, name) if not folder.is_dir() or name in runs_of(parent / STUDY) else None
    return None


def runs_of(path: Path) -> list[str]:
    """Return the names of the runs in the record file of a study, in their order."""
    return list(dict.fromkeys(str(line.get("run", "")) for line in read_lines(path)[0]))
