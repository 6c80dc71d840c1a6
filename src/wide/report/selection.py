"""Find values among the records of a run."""

import json
from collections.abc import Sequence
from typing import Any

from wide.errors import WideError
from wide.records import Record

SUBJECTS = ("dense", "untrained", "stage 1", "stage 1+2", "pruned", "pruned + LoRA")
"""What a run may have measured, in the order in which it is shown."""


class MissingRecordsError(WideError, LookupError):
    """A table or figure cannot be drawn because records are missing; the message names them."""


class Selection:
    """The records of one run, by subject and metric; of repeated measurements the latest counts.

    Args:
        records: In the order in which they were written.
        notes: What was left out while reading them.
    """

    def __init__(self, records: Sequence[Record], notes: Sequence[str] = ()) -> None:
        """Index the records."""
        self.records = tuple(records)
        self.notes = tuple(notes)
        self._values = {(r.subject, r.metric, r.layer, r.step): r for r in records}

    def subjects(self) -> list[str]:
        """Return the subjects whose quality or sparsity was measured, in the order of `SUBJECTS`."""
        measured = {r.subject for r in self.records if r.metric.startswith(("token_perplexity", "sparsity."))}
        return [subject for subject in SUBJECTS if subject in measured]

    def record(self, subject: str, metric: str) -> Record | None:
        """Return the record of a whole-model value, None where it was not measured."""
        return self._values.get((subject, metric, None, None))

    def number(self, subject: str, metric: str) -> float | None:
        """Return a whole-model number, None where it was not measured."""
        found = self.record(subject, metric)
        return None if found is None or isinstance(found.value, str) else float(found.value)

    def text(self, subject: str, metric: str) -> str:
        """Return a text, empty where there is none."""
        found = self.record(subject, metric)
        return "" if found is None else str(found.value)

    def json(self, subject: str, metric: str) -> Any:
        """Return the content of a whole-model record that holds JSON, None where it was not measured.

        Raises:
            MissingRecordsError: If the record is not JSON.
        """
        found = self.record(subject, metric)
        return None if found is None else _content(found)

    def json_by_layer(self, subject: str, metric: str) -> list[tuple[int, Any]]:
        """Return (layer, content) pairs of records that hold JSON, first layer first.

        Raises:
            MissingRecordsError: If a record is not JSON.
        """
        found = [record for record in self._of(subject, metric) if record.layer is not None]
        return sorted(((record.layer or 0, _content(record)) for record in found), key=lambda pair: pair[0])

    def by_layer(self, subject: str, metric: str) -> list[tuple[int, float]]:
        """Return (layer, value) pairs, first layer first."""
        return sorted((r.layer, float(r.value)) for r in self._of(subject, metric) if r.layer is not None)

    def by_step(self, subject: str, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) pairs, first step first."""
        return sorted((r.step, float(r.value)) for r in self._of(subject, metric) if r.step is not None)

    def last_subject_with(self, *metrics: str) -> str | None:
        """Return the last subject, in the order of `SUBJECTS`, of which any of the metrics was measured."""
        measured = {record.subject for record in self._values.values() if record.metric in metrics}
        found = [subject for subject in SUBJECTS if subject in measured]
        return found[-1] if found else None

    def last_subject_with_layers(self) -> str | None:
        """Return the last trained subject whose layers were measured."""
        found = [
            s for s in self.subjects() if self.by_layer(s, "sparsity.ffn") or self.by_layer(s, "sparsity.attention")
        ]
        return found[-1] if found else None

    def _of(self, subject: str, metric: str) -> list[Record]:
        return [r for r in self._values.values() if r.subject == subject and r.metric == metric]


def _content(record: Record) -> Any:
    try:
        return json.loads(str(record.value))
    except json.JSONDecodeError as error:
        place = "" if record.layer is None else f" of layer {record.layer}"
        raise MissingRecordsError(
            f"record '{record.metric}'{place} of {record.subject!r} is damaged, not JSON; measure it again"
        ) from error
