"""Evaluate a model in one call: perplexity and tasks, pruned beside dense, with the work that was skipped."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from wide.data.batches import TokenBlocks
from wide.data.corpus import PYTHON_DOCS, is_held_out_alike, load_documents, mixture, read_split
from wide.data.documents import Document, texts_of
from wide.data.tokenizer import check_positions, load_tokenizer, longest_input
from wide.errors import ConfigError
from wide.evaluation.harness import run_harness
from wide.evaluation.inference import RoutingTape
from wide.evaluation.perplexity import token_perplexity
from wide.evaluation.report import EvaluationReport, Scores
from wide.evaluation.tasks import check_tasks
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import is_attached, trained_on
from wide.models.cost import SkipCounter
from wide.models.lora import has_merged_lora, without_lora
from wide.models.observe import bypass, judging
from wide.schema import require

_LONGEST_WINDOW = 4096


def evaluate(
    model: nn.Module,
    data: TokenBlocks | Sequence[Document | str] | str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tasks: Sequence[str] = (),
    local_data: str | Path | None = None,
    split: str | None = None,
    text_field: str = "text",
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_windows: int | None = None,
    limit: int | None = None,
    compare_dense: bool = True,
    fused: bool = False,
    weights: str = "model",
) -> EvaluationReport:
    """Score a model on text and tasks, and measure what it skips there.

    Args:
        model: A Hugging Face causal LM, attached or not, on any device.
        data: Text for token perplexity: a source as in `load_documents`, texts, documents, or packed blocks. None
            scores the held-out part of 'python-docs' if no tasks are given, and no text otherwise.
        tokenizer: None loads the one of the folder or name that the model came from.
        tasks: Names of tasks, see `wide.evaluation.tasks.TASKS`.
        local_data: Folder with copies of the tasks' data; None loads them from the Hugging Face hub.
        split: Of the source, see `load_documents`; None means what `scored_split` says.
        window: Tokens that the model sees at once, in text and tasks; None means its maximum, at most 4096.
        stride: Step of the window over text; None means disjoint windows.
        batch_size: Sequences per forward; of tasks with short texts, more.
        compare_dense: Score the base model, too: routing, pruning and LoRA switched off; the report says where LoRA
            was merged and cannot be.
        fused: Score the model through its fused operators (`wide.optimize`), and on the text also masked, with the
            share of decisions that differ between the two paths.
        weights: Format of the linear layers' weights in the fused operators, as of `wide.optimize`.

    Raises:
        ConfigError: If a count is less than 1, or the window longer than the model's positions.
        DataError: If the text cannot be read or does not fit the model.
        EvaluationError: If a task is unknown, its data cannot be had, or the figures are not numbers.
        NotAttachedError: If `fused` is asked of a model that cannot run fused now; see `wide.optimize`.
    """
    # Wrong names and counts must fail before the first long forward.
    require(nn.Module, model, "model", "a model that is loaded (wide.load takes names)")
    tasks = [tasks] if isinstance(tasks, str) else tasks or ()
    check_tasks(tasks, local_data)
    counts = {"window": window, "stride": stride, "batch_size": batch_size, "max_windows": max_windows, "limit": limit}
    for name, count in counts.items():
        require(Integral | None, count, name, "a whole number")
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}; leave it out for the default")
    if data is None and not tasks:
        data = PYTHON_DOCS
    if tasks or not isinstance(data, TokenBlocks):
        tokenizer = load_tokenizer(model, tokenizer)
    text: TokenBlocks | Sequence[Document | str] | None
    if isinstance(data, str | Path):
        reading: dict[str, Any] = {"text_field": text_field, "tokenizer": tokenizer}
        split = split or scored_split(data, trained_on(model), **reading)
        text = list(load_documents(data, split=split, **reading))
        title: str | None = str(data) if split is None else f"{data} ({split})"
    else:
        kind = "packed blocks" if isinstance(data, TokenBlocks) else "documents"
        text = data if data is None or isinstance(data, TokenBlocks) else texts_of(data)
        title = None if text is None else f"{len(text)} {kind}"
    window = window or min(longest_input(model) or _LONGEST_WINDOW, _LONGEST_WINDOW)
    if tasks or not isinstance(text, TokenBlocks | None):
        check_positions("window", window, model)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size}
    for_text = shared | {"window": window, "stride": stride, "max_windows": max_windows}
    copies = None if local_data is None else Path(local_data)
    for_tasks = shared | {"local_data": copies, "max_length": window, "limit": limit}

    def score(meter: SkipCounter | None, *, names: Sequence[str] = tasks, count_skips: bool = False) -> Scores:
        found = None if text is None else token_perplexity(model, text, meter=meter, **for_text)
        results = run_harness(model, names, count_skips=count_skips, **for_tasks) if names else None
        return Scores(perplexity=found, tasks=results)

    masked = dense_scores = None
    tapes = (RoutingTape(model), RoutingTape(model)) if fused else None
    if tapes is not None and text is not None:
        masked = score(tapes[0], names=())
    meter = tapes[1] if tapes is not None else SkipCounter(model) if is_attached(model) else None
    with _fused(model, weights) if fused else nullcontext():
        scores = score(meter, count_skips=True)
    if compare_dense and is_attached(model):
        with bypass(model), without_lora(model):
            dense_scores = score(None)
    return EvaluationReport(
        data=title,
        model=scores,
        dense=dense_scores,
        sparsity=None if data is None or meter is None else meter.result(),
        masked=masked,
        flip_rate=None if masked is None or tapes is None else tapes[1].flip_rate(tapes[0]),
        dense_has_lora=dense_scores is not None and has_merged_lora(model),
    )


def scored_split(source: str | Path, provenance: Mapping[str, Any], **reading: Any) -> str | None:
    """Return the part of a source that is scored where none is named: what was held out of training, else all of it.

    `reading` is for `load_documents`, of text that was trained on under another name.

    Warns:
        UserWarning: If nothing was held out of the training, or it cannot be told what.
    """
    stages = [stage for stage in provenance.values() if isinstance(stage, dict) and isinstance(stage.get("text"), str)]
    # The parts of a mixture may have splits of their own, or none.
    split = all_of_it = "heldout" if mixture(source) or read_split(source, None) else None
    for stage in stages:
        for text, part in product(mixture(stage["text"]) or [stage["text"]], mixture(source) or [source]):
            is_alike = is_held_out_alike(text, part, **reading)
            if is_alike is None:
                continue
            split, way = "heldout", f"score another text, or {text}"
            if read_split(text, stage.get("split", "train")) is None:
                reason = f"all of {text}, so what is scored of it is training text"
                way = "score another text, or train with a part held out"
            elif is_alike:
                continue
            else:
                reason = f"{text}, which seems to share text with {part} and does not hold out the same of it"
            warnings.warn(f"this model was trained on {reason}; {way}", stacklevel=3)
            return all_of_it
    return split


@contextmanager
def _fused(model: nn.Module, weights: str) -> Iterator[None]:
    with judging(model):
        optimize(model, weights=weights)
        try:
            yield
        finally:
            deoptimize(model)
