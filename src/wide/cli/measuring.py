"""Evaluate a model and keep what was found as records."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from wide.cli.options import EvalOptions
from wide.evaluation.evaluate import evaluate
from wide.evaluation.report import EvaluationReport, Scores
from wide.evaluation.routing_behaviour import routing_behaviour
from wide.evaluation.routing_records import behaviour_records
from wide.evaluation.tasks import PER_WORD
from wide.models.cost import Sparsity
from wide.records import Record, RecordFile

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


class HeldOut:
    """Held-out text on which the models of a run are compared.

    Args:
        documents: The text; None scores tasks alone.
        name: What to call it.
        options: How it is scored.
        tokenizer: Of the model.
        records: Where results go.
        tasks: Tasks of lm-evaluation-harness that are evaluated beside the text.
        local_data: Folder with copies of the tasks' data; None loads them from the hub.
        limit: Items of each task; None means all.
    """

    def __init__(
        self,
        documents: list[Any] | None,
        name: str,
        options: EvalOptions,
        tokenizer: Any,
        records: RecordFile,
        *,
        tasks: Sequence[str] = (),
        local_data: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Keep the text."""
        self.documents = documents
        self.name = name
        self._options = options
        self._tokenizer = tokenizer
        self._records = records
        self._tasks: dict[str, Any] = {"tasks": tasks, "local_data": local_data, "limit": limit}

    def measure(self, model: Any, subject: str) -> EvaluationReport:
        """Score a model as it is, write the records under `subject`, and return what was found."""
        options = self._options
        report = evaluate(
            model,
            self.documents,
            tokenizer=self._tokenizer,
            window=options.window,
            stride=options.stride,
            batch_size=options.batch_size,
            max_windows=options.max_windows,
            compare_dense=False,
            **self._tasks,
        )
        self._records.append(evaluation_records(subject, report.model, report.sparsity, self.name))
        return report

    def measure_routing(self, model: Any, subject: str) -> None:
        """Write the records of how an attached model routes the beginning of the text under `subject`."""
        assert self.documents is not None
        found = routing_behaviour(
            model,
            [document.text for document in self.documents],
            tokenizer=self._tokenizer,
            sequence_length=self._options.window,
            batch_size=self._options.batch_size,
            max_blocks=max(1, _ROUTING_TOKENS // self._options.window),
        )
        self._records.append(behaviour_records(subject, found, self.name))


def evaluation_records(subject: str, scores: Scores, sparsity: Sparsity | None, data: str) -> Iterator[Record]:
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
        windows = json.dumps([[round(loss, 4), tokens] for loss, tokens in found.windows])
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


def sparsity_records(subject: str, sparsity: Sparsity, where: str) -> Iterator[Record]:
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
