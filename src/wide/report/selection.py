"""Find values among the records of a run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from wide.records import Record, Subject
from wide.report.figure import LOOKS, grouped
from wide.standard_error import perplexity_stderr

NAMES: dict[str, str] = LOOKS["names"]
"""What a run may have measured, in the order in which it is shown, and its name."""
SUBLAYERS = {"attention": "attention", "ffn": "FFN"}
"""Key of a sublayer in the names of metrics, and its name."""


# What the record 'target' says -> what is counted, and in words; the first that fits.
_MEASURES: dict[str, list[str]] = LOOKS["measures"]

_KINDS: dict[str, type] = {
    **dict.fromkeys(("settings", "routing.sample"), dict),
    **dict.fromkeys(("grid.methods", "grid.sparsities", "token_perplexity.windows"), list),
    **dict.fromkeys(("status", "deviations", "model"), str),
}
_NUMBERS = ("token_perplexity", "word_perplexity", "wikitext.", "accuracy.", "sparsity.", "training.", "method.")


def _is_usable(record: Record) -> bool:
    kind = _KINDS.get(record.metric, int | float if record.metric.startswith(_NUMBERS) else object)
    return record.value is not None and isinstance(record.value, kind)


def measure_of(target: str) -> tuple[str, str]:
    """Return the field of `Sparsity` that a target in words counts, and what it is a share of."""
    field, words = next(found for text, found in _MEASURES.items() if text in target)
    return field, words


class Selection:
    """The records of one run, by subject and metric; of repeated measurements the latest counts.

    They come in the order in which they were written, with notes on what was left out while reading them, in words.
    """

    def __init__(self, records: Sequence[Record], notes: Sequence[str] = ()) -> None:
        damaged = Counter(repr(record.metric) for record in records if not _is_usable(record))
        told = [f"left out {count} of {len(records)} records: {name} is damaged" for name, count in damaged.items()]
        self.records = tuple(record for record in records if _is_usable(record))
        self.notes = (*notes, *told)
        self._values = {(r.subject, r.metric, r.layer, r.step): r for r in self.records}
        self._by_metric = grouped(self._values.values(), lambda record: (record.subject, record.metric))

    def subjects(self) -> list[str]:
        """Return the subjects whose quality or sparsity was measured, in the order of `NAMES`."""
        measured = {r.subject for r in self.records if r.metric.startswith(("token_perplexity", "sparsity."))}
        return [subject for subject in NAMES if subject in measured]

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

    def windows(self, subject: Subject) -> tuple[list[float], list[int]]:
        """Return the summed losses, nats, and the numbers of scored tokens of the windows of text; empty if unknown."""
        found = self.content(subject, "token_perplexity.windows") or ()
        return [float(loss) for loss, _ in found], [int(tokens) for _, tokens in found]

    def ratio_stderr(self, subject: Subject, peer: Subject) -> float | None:
        """Return the standard error of the ratio of two perplexities; None where they are not of the same windows."""
        (losses, tokens), (theirs, their_tokens) = self.windows(subject), self.windows(peer)
        if tokens != their_tokens:
            return None
        return perplexity_stderr([ours - other for ours, other in zip(losses, theirs, strict=True)], tokens)

    def by_layer(self, subject: Subject, metric: str) -> list[tuple[int, Any]]:
        """Return (layer, value) pairs, first layer first."""
        found = {r.layer: r.value for r in self._by_metric.get((subject, metric), ()) if r.layer is not None}
        return sorted(found.items())

    def by_step(self, subject: Subject, metric: str) -> list[tuple[int, Any]]:
        """Return (step, value) pairs, first step first."""
        found = {r.step: r.value for r in self._by_metric.get((subject, metric), ()) if r.step is not None}
        return sorted(found.items())

    def last_subject_with(self, *metrics: str) -> str | None:
        """Return the last subject, in the order of `NAMES`, of which any of the metrics was measured."""
        found = [s for s in NAMES if any((s, metric) in self._by_metric for metric in metrics)]
        return found[-1] if found else None

    def measure(self) -> tuple[str, str]:
        """Return the metric of the sparsity that the run was to reach, and what it is a share of, in words."""
        name, words = measure_of(self.text("run", "target"))
        return f"sparsity.{name}", words
