"""Find values among the records of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wide.errors import DataError, WideError
from wide.records import Record, read_records
from wide.report.figure import Origin
from wide.report.run_records import check, key_of

SUBJECTS = ("dense", "dense + LoRA", "untrained", "stage 1", "stage 1+2", "pruned", "pruned + LoRA")
"""What a run may have measured, in the order in which it is shown."""
_OF_METHODS = ("pruned", "pruned + LoRA")


class MissingRecordsError(WideError, LookupError):
    """A table or figure cannot be drawn because records are missing; the message names them."""


class Selection:
    """The records of one run, by subject and metric; of repeated measurements the latest counts.

    Args:
        records: In the order in which they were written; what cannot be drawn is left out, and `notes` says so.
        notes: What was left out while reading them.
        origins: The files that they lie in.
    """

    def __init__(self, records: Sequence[Record], notes: Sequence[str] = (), origins: Sequence[Origin] = ()) -> None:
        """Check and index the records."""
        checked = check(records)
        self.records = checked.records
        self.notes = (*notes, *checked.notes)
        self.origins = tuple(origins)
        self._values = {key_of(record): record for record in checked.records}
        self._contents, self._damaged = checked.contents, checked.damaged

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
            MissingRecordsError: If the record is damaged.
        """
        self._require_whole(subject, metric)
        return self.content(subject, metric)

    def content(self, subject: str, metric: str) -> Any:
        """Return what `json` does, but None for a damaged record, too."""
        return self._contents.get((subject, metric, None, None))

    def json_by_layer(self, subject: str, metric: str) -> list[tuple[int, Any]]:
        """Return (layer, content) pairs of records that hold JSON, first layer first.

        Raises:
            MissingRecordsError: If a record is damaged.
        """
        self._require_whole(subject, metric)
        found = {
            layer: content
            for (whose, which, layer, _), content in self._contents.items()
            if (whose, which) == (subject, metric) and layer is not None
        }
        return sorted(found.items())

    def by_layer(self, subject: str, metric: str) -> list[tuple[int, float]]:
        """Return (layer, value) pairs, first layer first."""
        return sorted((r.layer, float(r.value)) for r in self._of(subject, metric) if r.layer is not None)

    def by_step(self, subject: str, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) pairs, first step first."""
        return sorted((r.step, float(r.value)) for r in self._of(subject, metric) if r.step is not None)

    def last_subject_with(self, *metrics: str) -> str | None:
        """Return the last subject, in the order of `SUBJECTS`, of which any of the metrics was measured."""
        measured = {subject for subject, metric, *_ in (*self._values, *self._damaged) if metric in metrics}
        found = [subject for subject in SUBJECTS if subject in measured]
        return found[-1] if found else None

    def last_subject_with_layers(self) -> str | None:
        """Return the last trained subject whose layers were measured."""
        found = [
            s for s in self.subjects() if self.by_layer(s, "sparsity.ffn") or self.by_layer(s, "sparsity.attention")
        ]
        return found[-1] if found else None

    def is_static(self) -> bool:
        """Return whether all that was measured beside the dense model has a plan without routers."""
        models = [subject for subject in self.subjects() if subject not in ("dense", "dense + LoRA")]
        routed = any(metric.startswith("routing.") for _, metric, *_ in (*self._values, *self._damaged))
        if routed or not models:
            return False
        tokens = [self.number(subject, "sparsity.tokens") for subject in models]
        known = [number for number in tokens if number is not None]
        if known:
            # Of a static plan no token need be watched to know its sparsity.
            return not any(known)
        # Older records: a run of a method measures the routing before the quality, if there are routers.
        decided = self.number("pruned", "training.seconds") is not None
        return decided and all(subject in _OF_METHODS for subject in models)

    def _of(self, subject: str, metric: str) -> list[Record]:
        return [r for r in self._values.values() if r.subject == subject and r.metric == metric]

    def _require_whole(self, subject: str, metric: str) -> None:
        for whose, which, layer, _ in self._damaged:
            if (whose, which) == (subject, metric):
                place = "" if layer is None else f" of layer {layer}"
                raise MissingRecordsError(
                    f"record {metric!r}{place} of {subject!r} is damaged, not what it should hold; measure it again"
                )


def read_selection(path: Path) -> Selection:
    """Return the records of a file.

    Args:
        path: Written by `wide.records.RecordFile`.

    Raises:
        DataError: If it is missing, or none of its lines is a record.
    """
    records, notes = read_records(path)
    if notes and not records:
        raise DataError(f"{path} holds no record, only damaged lines; wanted the records of a wide prune or compare")
    found = Selection(records, notes)
    found.origins = (Origin(path=str(path), notes=found.notes),)
    return found
