"""Routing behaviour as records: figures as numbers, series and tables as compact JSON of bounded size."""

from collections.abc import Iterator, Sequence
from typing import Any

from wide.evaluation.inference import HALVES
from wide.evaluation.routing_behaviour import HalfBehaviour, RoutingBehaviour
from wide.records import Record

_RATE_DIGITS, _PHI_DIGITS = 4, 3


def behaviour_records(subject: str, found: RoutingBehaviour, where: str) -> Iterator[Record]:
    """Yield the records of a model's routing.

    Correlation matrices are kept of two layers of each half, the one that skips least and the one that skips most.

    Args:
        subject: What was measured.
        found: How it routes.
        where: Name of the text.
    """
    where = f"{where}, {found.tokens} tokens"
    yield Record(subject=subject, metric="routing.tokens", value=found.tokens, unit="token", where=where)
    for half in HALVES:
        entries = found.of(half)
        if entries:
            yield from _of_half(subject, half, entries, where)
    for half, share in found.flips.items():
        yield Record(subject=subject, metric=f"routing.{half}.flips_bfloat16", value=share, unit="share", where=where)
    sample = {"tokens": found.sample.tokens} | {half: _percent(rows) for half, rows in found.sample.shares.items()}
    words = f"beginning of the text, {len(found.sample.tokens)} tokens; percent of groups by token and layer"
    yield _json(subject, "routing.sample", sample, words)


def _of_half(subject: str, half: str, entries: Sequence[HalfBehaviour], where: str) -> Iterator[Record]:
    for entry in entries:
        for name in ("same_as_previous", "same_by_chance"):
            value = getattr(entry, name)
            if value is not None:
                yield Record(
                    subject=subject,
                    metric=f"routing.{half}.{name}",
                    value=value,
                    unit="share",
                    where=where,
                    layer=entry.layer,
                )
        rates = {"groups": entry.num_groups, "shares": _rounded(entry.by_group, _RATE_DIGITS)}
        yield _json(subject, f"routing.{half}.by_group", rates, where, layer=entry.layer)
    for name in ("same_as_previous", "same_by_chance"):
        values = [value for entry in entries if (value := getattr(entry, name)) is not None]
        if values:
            mean = sum(values) / len(values)
            yield Record(subject=subject, metric=f"routing.{half}.{name}", value=mean, unit="share", where=where)
    for name in ("token_correlation", "group_correlation"):
        series = _mean_series([getattr(entry, name) for entry in entries])
        yield _json(subject, f"routing.{half}.{name}", _rounded(series, _PHI_DIGITS), where)
    for chosen in _extremes(entries):
        matrix = {"groups": chosen.matrix_groups, "phi": [_rounded(row, _PHI_DIGITS) for row in chosen.matrix]}
        yield _json(subject, f"routing.{half}.group_matrix", matrix, where, layer=chosen.layer)


def _extremes(entries: Sequence[HalfBehaviour]) -> list[HalfBehaviour]:
    """Return the layers that execute most and least, once if they are the same."""
    ordered = sorted(entries, key=lambda entry: entry.execute_rate)
    return [ordered[-1], ordered[0]] if len(ordered) > 1 else ordered


def _mean_series(series: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean over layers at each place; layers may be of different lengths."""
    means: list[float | None] = []
    for place in range(max(map(len, series))):
        values = [value for row in series if place < len(row) and (value := row[place]) is not None]
        means.append(sum(values) / len(values) if values else None)
    return means


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]


def _percent(rows: Sequence[Sequence[float | None]]) -> list[list[int | None]]:
    return [[None if share is None else round(100 * share) for share in row] for row in rows]


def _json(subject: str, metric: str, value: Any, where: str, *, layer: int | None = None) -> Record:
    return Record(subject=subject, metric=metric, value=value, unit="json", where=where, layer=layer)
