"""Evaluate a model in one call: perplexity and tasks, pruned beside dense, with the work that was skipped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from wide.data.batches import TokenBlocks
from wide.data.corpus import PYTHON_DOCS, load_documents
from wide.data.documents import Document
from wide.data.tokenizer import load_tokenizer
from wide.errors import ConfigError, EvaluationError
from wide.evaluation.flips import RoutingTape
from wide.evaluation.harness import run_harness
from wide.evaluation.inference import SkipMeter, dense, has_merged_lora, longest_input
from wide.evaluation.perplexity import token_perplexity
from wide.evaluation.report import EvaluationReport, Scores
from wide.evaluation.tasks import find_task
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import is_attached

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_WINDOW = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What is scored, and how; the same for the pruned and the dense model."""

    text: TokenBlocks | Sequence[Document | str] | None
    tokenizer: "PreTrainedTokenizerBase | None"
    tasks: Sequence[str]
    local_data: Path | None
    window: int
    stride: int | None
    batch_size: int
    max_windows: int | None
    limit: int | None

    def score(self, model: nn.Module, meter: SkipMeter, *, count_skips: bool) -> Scores:
        """Return the figures of the model as it runs now."""
        perplexity = results = None
        if self.text is not None:
            perplexity = token_perplexity(
                model,
                self.text,
                tokenizer=self.tokenizer,
                window=self.window,
                stride=self.stride,
                batch_size=self.batch_size,
                max_windows=self.max_windows,
                meter=meter,
            )
        if self.tasks:
            assert self.tokenizer is not None
            results = run_harness(
                model,
                self.tasks,
                tokenizer=self.tokenizer,
                local_data=self.local_data,
                max_length=self.window,
                batch_size=self.batch_size,
                limit=self.limit,
                count_skips=count_skips,
            )
        return Scores(perplexity=perplexity, tasks=results)


def evaluate(
    model: nn.Module,
    data: TokenBlocks | Sequence[Document | str] | str | Path | None = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tasks: Sequence[str] = (),
    local_data: str | Path | None = None,
    split: str | None = None,
    text_field: str = "text",
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_windows: int | None = None,
    limit: int | None = None,
    compare_dense: bool = True,
    fused: bool = False,
) -> EvaluationReport:
    """Score a model on text and tasks, and measure what it skips there.

    Args:
        model: A Hugging Face causal LM, attached or not, on any device.
        data: Text for token perplexity: a source as in `load_documents`, texts, documents, or packed blocks. None
            scores the held-out part of 'python-docs' if no tasks are given, and no text otherwise.
        tokenizer: None loads the one of the folder or name that the model came from.
        tasks: Names of tasks, see `wide.evaluation.tasks.TASKS`.
        local_data: Folder with copies of the tasks' data; None loads them from the Hugging Face hub.
        split: Of the source, see `load_documents`; None means 'heldout' for 'python-docs'.
        text_field: Field that holds the text, where rows have fields.
        window: Tokens that the model sees at once, in text and tasks; None means its maximum, at most 4096.
        stride: Step of the window over text; None means disjoint windows.
        batch_size: Sequences per forward; of tasks with short texts, more.
        max_documents: Score only so many documents of the text.
        max_windows: Score only so many windows of the text.
        limit: Evaluate only so many items of each task.
        compare_dense: Score the base model, too: routing, pruning and LoRA switched off; the report says where LoRA
            was merged and cannot be.
        fused: Score the model through its fused operators (`wide.optimize`), and on the text also masked, with the
            share of decisions that differ between the two paths.

    Raises:
        ConfigError: If a count is less than 1.
        DataError: If the text cannot be read or does not fit the model.
        EvaluationError: If a task is unknown, its data cannot be had, or the figures are not numbers.
        NotAttachedError: If `fused` is asked of a model that cannot run fused now; see `wide.optimize`.
    """
    # Wrong names and counts must fail before the first long forward.
    for name in tasks:
        find_task(name)
    counts = {"batch_size": batch_size, "max_documents": max_documents, "max_windows": max_windows, "limit": limit}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}; leave it out for the default")
    if data is None and not tasks:
        data = PYTHON_DOCS
    if tokenizer is None and not (isinstance(data, TokenBlocks) and not tasks):
        tokenizer = load_tokenizer(model)
    request = _Request(
        text=_text(data, split, text_field, max_documents),
        tokenizer=tokenizer,
        tasks=tasks,
        local_data=None if local_data is None else Path(local_data),
        window=window or min(longest_input(model) or _LONGEST_WINDOW, _LONGEST_WINDOW),
        stride=stride,
        batch_size=batch_size,
        max_windows=max_windows,
        limit=limit,
    )
    masked = flips = None
    if fused:
        masked, scores, meter, flips = _score_fused(model, request)
    else:
        meter = SkipMeter(model)
        scores = request.score(model, meter, count_skips=True)
    dense_scores = None
    if compare_dense and is_attached(model):
        with dense(model):
            dense_scores = request.score(model, SkipMeter(None), count_skips=False)
    return EvaluationReport(
        data=_name(data, split),
        model=scores,
        dense=dense_scores,
        sparsity=None if data is None else meter.result(),
        masked=masked,
        flip_rate=flips,
        dense_has_lora=dense_scores is not None and has_merged_lora(model),
    )


def _score_fused(model: nn.Module, request: _Request) -> tuple[Scores | None, Scores, SkipMeter, float | None]:
    """Return the masked figures on the text, the fused ones, what the fused path skipped, and the rate of flips."""
    before, after = RoutingTape(model), RoutingTape(model)
    masked = None
    if request.text is not None:
        masked = replace(request, tasks=()).score(model, before, count_skips=False)
    training = model.training
    optimize(model.eval())
    try:
        scores = request.score(model, after, count_skips=True)
    finally:
        deoptimize(model).train(training)
    return masked, scores, after, None if masked is None else after.flip_rate(before)


def _text(
    data: TokenBlocks | Sequence[Document | str] | str | Path | None,
    split: str | None,
    text_field: str,
    max_documents: int | None,
) -> TokenBlocks | Sequence[Document | str] | None:
    if isinstance(data, str | Path):
        chosen = _split(data, split)
        return list(load_documents(data, split=chosen, text_field=text_field, max_documents=max_documents))
    if isinstance(data, TokenBlocks) and max_documents is not None:
        raise EvaluationError("packed blocks have no documents to count; use max_windows instead of max_documents")
    return data if data is None or isinstance(data, TokenBlocks) else data[:max_documents]


def _split(source: str | Path, split: str | None) -> str | None:
    return "heldout" if source == PYTHON_DOCS and split is None else split


def _name(data: TokenBlocks | Sequence[Document | str] | str | Path | None, split: str | None) -> str | None:
    if data is None:
        return None
    if isinstance(data, TokenBlocks):
        return f"{len(data)} packed blocks"
    if not isinstance(data, str | Path):
        return f"{len(data)} documents"
    chosen = _split(data, split)
    return str(data) if chosen is None else f"{data} ({chosen})"
