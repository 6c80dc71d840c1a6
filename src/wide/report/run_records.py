"""The records of a run or a comparison as figures rely on them: each is checked once; what does not fit is said."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wide.records import Record
from wide.report.bench_files import is_finite, is_number

_NUMBERS = (
    "token_perplexity",
    "word_perplexity",
    "wikitext.",
    "accuracy.",
    "sparsity.",
    "training.",
    "method.",
    "routing.",
    "target.sparsity",
    "grid.recovers",
    "model.attention_group_size",
)
Key = tuple[str, str, int | None, int | None]
"""Subject, metric, layer and step of a record."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What there is to draw.

    Args:
        records: Those that fit, in their order.
        contents: Of those that hold JSON.
        damaged: Those that should hold JSON of a form that they do not have.
        notes: What was left out, in words.
    """

    records: tuple[Record, ...]
    contents: dict[Key, Any]
    damaged: frozenset[Key]
    notes: tuple[str, ...]


def key_of(record: Record) -> Key:
    """Return what tells a record from others; of two with the same key the later counts."""
    return record.subject, record.metric, record.layer, record.step


def check(records: Sequence[Record]) -> Checked:
    """Return the records that can be drawn, and in words what cannot.

    Args:
        records: As they were read: any field may be of any type.
    """
    kept: list[Record] = []
    contents: dict[Key, Any] = {}
    damaged: set[Key] = set()
    faults: Counter[str] = Counter()
    for record in map(_with_plain_facts, records):
        fault = _fault(record)
        if fault:
            faults[fault] += 1
            continue
        fits = _fitting(record.metric)
        if fits is not None:
            content = _content(record.value)
            contents.pop(key_of(record), None)
            if not fits(content):
                damaged.add(key_of(record))
                faults[f"{record.metric!r} is damaged"] += 1
                continue
            contents[key_of(record)] = content
            damaged.discard(key_of(record))
        kept.append(record)
    notes = tuple(f"left out {count} of {len(records)} records: {fault}" for fault, count in faults.items())
    return Checked(tuple(kept), contents, frozenset(damaged), notes)


def _with_plain_facts(record: Record) -> Record:
    """Return a record without what is said of its circumstances in a form that cannot be shown."""
    facts = (record.device, record.time, record.versions)
    if isinstance(facts[0], str) and isinstance(facts[1], str) and (facts[2] is None or _is_texts(facts[2])):
        return record
    device, time = (fact if isinstance(fact, str) else "" for fact in facts[:2])
    return replace(record, device=device, time=time, versions=record.versions if _is_texts(record.versions) else None)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _fault(record: Record) -> str:
    """Return what keeps a record from being drawn, empty where nothing does."""
    for name in ("subject", "metric"):
        if not isinstance(getattr(record, name), str):
            return f"their {name!r} is no text"
    for name in ("layer", "step"):
        if not isinstance(getattr(record, name), int | None) or isinstance(getattr(record, name), bool):
            return f"the {name!r} of {record.metric!r} is no whole number"
    if _fitting(record.metric) is None:
        if record.metric.startswith(_NUMBERS):
            return "" if is_number(record.value) else f"{record.metric!r} is no number"
        if not isinstance(record.value, str) and not is_number(record.value):
            return f"{record.metric!r} has no value"
    return ""


def _content(value: object) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_known(value: object) -> bool:
    return value is None or is_number(value)


def _is_window(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_number(value[0]) and is_finite(value[1])


def _is_settings(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    sizes = [size for name, size in value.items() if name.endswith("group_size")]
    return all(size is None or is_finite(size) for size in sizes)


def _is_shares(value: object) -> bool:
    if not isinstance(value, dict) or not is_number(value.get("groups")):
        return False
    return bool(value.get("shares")) and _is_list(value["shares"], is_number)


def _is_series(value: object) -> bool:
    return _is_list(value, _is_known)


def _is_matrix(value: object) -> bool:
    if not isinstance(value, dict) or not _is_list(value.get("groups"), is_number) or not value["groups"]:
        return False
    width = len(value["groups"])
    return _is_list(value.get("phi"), lambda row: _is_series(row) and len(row) == width) and len(value["phi"]) == width


def _is_sample(value: object) -> bool:
    if not isinstance(value, dict) or not _is_list(value.get("tokens"), lambda token: isinstance(token, str)):
        return False
    halves = [value[half] for half in ("attention", "ffn") if half in value]
    return bool(halves and value["tokens"]) and all(_is_table(rows, len(value["tokens"])) for rows in halves)


def _is_table(value: object, rows: int) -> bool:
    """Return whether a value is a table of so many rows of one length, at least one column each."""
    if not isinstance(value, list) or len(value) != rows or not all(map(_is_series, value)):
        return False
    return len(value[0]) > 0 and len({len(row) for row in value}) == 1


def _is_names(value: object) -> bool:
    return _is_list(value, lambda name: isinstance(name, str))


_JSON: dict[str, Callable[[Any], bool]] = {
    "settings": _is_settings,
    "training": lambda value: isinstance(value, dict),
    "grid.methods": _is_names,
    "grid.sparsities": lambda value: _is_list(value, is_finite),
    "windows": lambda value: _is_list(value, _is_window),
    "by_group": _is_shares,
    "group_matrix": _is_matrix,
    "group_correlation": _is_series,
    "token_correlation": _is_series,
    "routing.sample": _is_sample,
}


def _fitting(metric: str) -> Callable[[Any], bool] | None:
    """Return what the content of a metric must fit, None where it holds no JSON."""
    return _JSON.get(metric) or (_JSON.get(metric.rpartition(".")[2]) if "." in metric else None)
