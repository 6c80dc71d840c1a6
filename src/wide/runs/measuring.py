"""What a run measures, as records: the course of training, and quality and sparsity on held-out text."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wide.data.batches import TokenBlocks
from wide.data.tokenizer import check_vocabulary, length_warning
from wide.evaluation.evaluate import evaluate
from wide.evaluation.report import EvaluationReport, Scores
from wide.evaluation.routing_behaviour import routing_behaviour
from wide.evaluation.routing_records import behaviour_records
from wide.evaluation.tasks import PER_WORD
from wide.models.cost import Sparsity
from wide.records import Record, RecordFile, Subject, read_records
from wide.runs.process import say
from wide.runs.settings import EvalOptions, RunOptions, ScoredTasks
from wide.runs.sources import held_out_documents

_ROUTING_TOKENS = 8192
_SHARES = (
    "attention",
    "ffn",
    "mean",
    "linear_flops",
    "linear_flops_with_fixed",
    "linear_flops_layers",
    "parameters_removed",
    "kv_cache_kept",
)
_METRICS_FILE = "metrics.jsonl"
_MOST_POINTS = 200
_RATE = "tokens_per_second"
_SUMMARY = {
    _RATE: "token/s",
    "seconds": "s",
    "steps": "step",
    "tokens": "token",
    "peak_memory_bytes": "B",
}


class HeldOut:
    """Held-out text on which the models of a run are compared, and tasks beside it.

    Args:
        options: Where the text comes from, for a source that the evaluation does not name, and its fields.
        scoring: How much is scored, and how; with 0 tokens there is no text.
        tokenizer: Of the model.
        tasks: Tasks of lm-evaluation-harness.

    Attributes:
        documents: The text; None where only tasks are scored.
        name: What to call it.

    Raises:
        DataError: If there is no held-out text; the message says how to name some.
    """

    def __init__(
        self, options: RunOptions, scoring: EvalOptions, tokenizer: Any, tasks: ScoredTasks | None = None
    ) -> None:
        """Read the text."""
        self.documents: list[Any] | None = None
        self.name = ""
        if scoring.tokens != 0:
            self.documents, self.name = held_out_documents(options.data, scoring, text_field=options.text_field)
            say(f"held out {self.name}: {len(self.documents)} documents")
        self._scoring = scoring
        self._tokenizer = tokenizer
        self._tasks = tasks or ScoredTasks()

    def measure(self, model: Any, subject: Subject, records: RecordFile) -> EvaluationReport:
        """Score a model as it is, write the records under `subject`, and return what was found."""
        report = evaluate(
            model,
            self.documents,
            tokenizer=self._tokenizer,
            compare_dense=False,
            **self._scoring.protocol,
            **self._tasks.protocol,
        )
        records.append(evaluation_records(subject, report.model, report.sparsity, self.name))
        return report

    def measure_routing(self, model: Any, subject: str, records: RecordFile) -> None:
        """Write the records of how an attached model routes the beginning of the text under `subject`."""
        assert self.documents is not None
        found = routing_behaviour(
            model,
            [document.text for document in self.documents],
            tokenizer=self._tokenizer,
            sequence_length=self._scoring.window,
            batch_size=self._scoring.batch_size,
            max_blocks=max(1, _ROUTING_TOKENS // self._scoring.window),
        )
        records.append(behaviour_records(subject, found, self.name))


def check_text(blocks: TokenBlocks, model: Any, source: str) -> None:
    """Say what text a run trains on, and refuse what is not of the model's vocabulary.

    Raises:
        DataError: If ids of the text are beyond the model's.
    """
    check_vocabulary(blocks.largest_id, model)
    warning = length_warning(blocks.sequence_length, model)
    if warning is not None:
        say(f"warning  {warning}")
    say(f"data     {source}: {len(blocks)} blocks of {blocks.sequence_length} tokens")


def evaluation_records(subject: Subject, scores: Scores, sparsity: Sparsity | None, data: str) -> Iterator[Record]:
    """Yield the records of one evaluated model.

    Args:
        subject: What was evaluated.
        scores: Its figures.
        sparsity: What it skipped on the text; None for a dense model.
        data: Name of the text.
    """
    where = data
    if scores.perplexity is not None:
        found = scores.perplexity
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
    for name, value in (("average", scores.tasks.average), ("average.stderr", scores.tasks.average_stderr)):
        if value is not None:
            yield Record(subject=subject, metric=f"accuracy.{name}", value=value, unit="share", where="tasks")


def sparsity_records(subject: Subject, sparsity: Sparsity, where: str) -> Iterator[Record]:
    """Yield the skip rates of a model and of each of its layers.

    Where some layers have a rate of a half, the others are dense there and have 0; a half that is dense in all layers,
    or that the model lacks, has no records.
    """
    for name in _SHARES:
        value = getattr(sparsity, name)
        yield Record(subject=subject, metric=f"sparsity.{name}", value=value, unit="share", where=where)
    # Tells a static plan from routers, also where no router was measured.
    yield Record(subject=subject, metric="sparsity.tokens", value=sparsity.tokens, unit="token", where=where)
    known = {place for rates in sparsity.layers for place, rate in enumerate(rates) if rate is not None}
    for layer, rates in enumerate(sparsity.layers):
        for place, half in enumerate(("attention", "ffn")):
            if place in known:
                yield Record(
                    subject=subject,
                    metric=f"sparsity.{half}",
                    value=rates[place] or 0.0,
                    unit="share",
                    where=where,
                    layer=layer,
                )


def training_records(subject: str, summary: Mapping[str, Any], folder: Path) -> Iterator[Record]:
    """Yield the course of a stage, thinned to what a figure can show, and its summary.

    Where the summary has no rate, because no step was left to a resumed run, it is that of the recorded steps.

    Args:
        subject: The stage.
        summary: What the trainer wrote about the stage.
        folder: Of the stage, where the trainer keeps its metrics.
    """
    metrics = folder / _METRICS_FILE
    points = read_records(metrics)[0] if metrics.is_file() else []
    steps = sorted({record.step for record in points if record.step is not None})
    shown = {*steps[:: max(1, len(steps) // _MOST_POINTS)], *steps[-1:]}
    yield from (replace(record, subject=subject) for record in points if record.step in shown)
    found = {_RATE: _rate(points), **{name: value for name, value in summary.items() if value is not None}}
    for name, unit in _SUMMARY.items():
        value = found.get(name)
        if isinstance(value, int | float):
            yield Record(subject=subject, metric=f"training.{name}", value=value, unit=unit, where="training")


def _rate(points: Sequence[Record]) -> float | None:
    """Return tokens per second over all recorded steps, which have equally many tokens; None where none says it."""
    rates = [point.value for point in points if point.metric == f"training.{_RATE}" and point.step is not None]
    known = [rate for rate in rates if isinstance(rate, int | float) and rate > 0]
    return statistics.harmonic_mean(known) if known else None
