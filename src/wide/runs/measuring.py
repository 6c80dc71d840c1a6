"""What a run measured, as records: the course of training, quality and sparsity."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wide.data.documents import Document
from wide.evaluation.report import Scores
from wide.evaluation.routing_stats import routing_records, routing_stats
from wide.evaluation.tasks import PER_WORD
from wide.models.cost import Sparsity
from wide.records import Record, Subject, read_records
from wide.runs.settings import EvalOptions

ROUTING_TOKENS = 8192
_SHARES = [field.name for field in fields(Sparsity) if field.name not in ("layers", "tokens")]
_METRICS_FILE, _MOST_POINTS = "metrics.jsonl", 200
_UNITS = {"tokens_per_second": "token/s", "seconds": "s", "steps": "step", "tokens": "token", "peak_memory_bytes": "B"}


def evaluation_records(subject: Subject, scores: Scores, sparsity: Sparsity | None, data: str) -> Iterator[Record]:
    """Yield the records of one evaluated model."""
    where = data
    if (found := scores.perplexity) is not None:
        where = f"{data}, {found.tokens} tokens, window {found.window}, stride {found.stride}"
        yield Record(subject=subject, metric="token_perplexity", value=found.perplexity, unit="", where=where)
        windows = [[round(loss, 4), tokens] for loss, tokens in found.windows]
        yield Record(subject=subject, metric="token_perplexity.windows", value=windows, unit="nats, tokens")
    if sparsity is not None:
        yield from sparsity_records(subject, sparsity, where)
    if scores.tasks is None:
        return
    for task in scores.tasks.tasks:
        is_perplexity = task.metric == PER_WORD
        metric = task.metric if is_perplexity else f"accuracy.{task.label}"
        unit = "" if is_perplexity else "share"
        where = f"{task.label}, {task.metric}"
        yield Record(subject=subject, metric=metric, value=task.value, unit=unit, where=where)
        if task.stderr is not None:
            yield Record(subject=subject, metric=f"{metric}.stderr", value=task.stderr, unit=unit, where=where)
        per_token = f"{task.task}.token_perplexity"
        for name, number in ((per_token, task.token_perplexity), (f"{per_token}.stderr", task.token_stderr)):
            if number is not None:
                yield Record(subject=subject, metric=name, value=number, where=task.label)
    for name, value in (("average", scores.tasks.average), ("average.stderr", scores.tasks.average_stderr)):
        if value is not None:
            yield Record(subject=subject, metric=f"accuracy.{name}", value=value, unit="share", where="tasks")


def routing_of(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document] | None,
    name: str,
    scoring: EvalOptions,
    subject: str,
    *,
    blocks: int | None = None,
) -> Iterator[Record]:
    """Return the records of how an attached model routes the beginning of a text, of which `name` says what it is."""
    found = routing_stats(
        model,
        [document.text for document in documents or []],
        tokenizer=tokenizer,
        sequence_length=scoring.window,
        batch_size=scoring.batch_size,
        max_blocks=blocks or max(1, ROUTING_TOKENS // scoring.window),
    )
    return routing_records(subject, found, name, tokenizer)


def sparsity_records(subject: Subject, sparsity: Sparsity, where: str) -> Iterator[Record]:
    """Yield the skip rates of a model and of each of its layers.

    Where some layers have a rate of a half, the others are dense there and have 0; a half that is dense in all layers,
    or that the model lacks, has no records.
    """
    for name in _SHARES:
        value = getattr(sparsity, name)
        yield Record(subject=subject, metric=f"sparsity.{name}", value=value, unit="share", where=where)
    halves = zip(("attention", "ffn"), zip(*sparsity.layers, strict=True), strict=False)
    known = {half: rates for half, rates in halves if set(rates) != {None}}
    for layer in range(len(sparsity.layers)):
        for half, rates in known.items():
            value, metric = rates[layer] or 0.0, f"sparsity.{half}"
            yield Record(subject=subject, metric=metric, value=value, unit="share", where=where, layer=layer)


def training_records(subject: str, summary: Mapping[str, Any], folder: Path) -> Iterator[Record]:
    """Yield the course of a stage, thinned to what a figure can show, and its summary."""
    metrics = folder / _METRICS_FILE
    points = read_records(metrics)[0] if metrics.is_file() else []
    steps = sorted({record.step for record in points if record.step is not None})
    shown = {*steps[:: max(1, len(steps) // _MOST_POINTS)], *steps[-1:]}
    yield from (replace(record, subject=subject) for record in points if record.step in shown)
    for name, unit in _UNITS.items():
        if isinstance(value := summary.get(name), int | float):
            yield Record(subject=subject, metric=f"training.{name}", value=value, unit=unit, where="training")
