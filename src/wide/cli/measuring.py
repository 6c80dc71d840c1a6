"""Evaluate a model and keep what was found as records."""

from collections.abc import Iterator
from typing import Any

from wide.cli.options import EvalOptions
from wide.evaluation.evaluate import evaluate
from wide.evaluation.report import EvaluationReport, Scores
from wide.models.accounting import Sparsity
from wide.records import Record, RecordFile


class HeldOut:
    """Held-out text on which the models of a run are compared.

    Args:
        documents: The text.
        name: What to call it.
        options: How it is scored.
        tokenizer: Of the model.
        records: Where results go.
    """

    def __init__(
        self, documents: list[Any], name: str, options: EvalOptions, tokenizer: Any, records: RecordFile
    ) -> None:
        """Keep the text."""
        self.documents = documents
        self.name = name
        self._options = options
        self._tokenizer = tokenizer
        self._records = records

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
        )
        self._records.append(evaluation_records(subject, report.model, report.sparsity, self.name))
        return report


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
    if sparsity is not None:
        yield from sparsity_records(subject, sparsity, where)
    if scores.tasks is None:
        return
    for task in scores.tasks.tasks:
        is_perplexity = task.metric == "word_perplexity"
        metric = task.metric if is_perplexity else f"accuracy.{task.label}"
        unit = "" if is_perplexity else "share"
        yield Record(subject=subject, metric=metric, value=task.value, unit=unit, where=f"{task.label}, {task.metric}")
    if scores.tasks.average is not None:
        yield Record(
            subject=subject, metric="accuracy.average", value=scores.tasks.average, unit="share", where="tasks"
        )


def sparsity_records(subject: str, sparsity: Sparsity, where: str) -> Iterator[Record]:
    """Yield the skip rates of a model and of each of its layers."""
    for name in ("attention", "ffn", "mean", "linear_flops", "linear_flops_with_fixed"):
        value = getattr(sparsity, name)
        yield Record(subject=subject, metric=f"sparsity.{name}", value=value, unit="share", where=where)
    for layer, rates in enumerate(sparsity.layers):
        for half, rate in zip(("attention", "ffn"), rates, strict=True):
            if rate is not None:
                yield Record(
                    subject=subject, metric=f"sparsity.{half}", value=rate, unit="share", where=where, layer=layer
                )
