"""A live model in lm-evaluation-harness: the paper's tasks, and what was skipped on their real tokens."""

import copy
import io
import logging
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from wide.errors import EvaluationError, first_line
from wide.evaluation.likelihood import log_likelihoods
from wide.evaluation.perplexity import exp_or_infinity
from wide.evaluation.tasks import ELSEWHERE, PER_WORD, ZERO_SHOT_TASKS, Task, find_task, write_local_task
from wide.models.attach import is_attached
from wide.models.cost import SkipCounter, Sparsity
from wide.models.having import having
from wide.models.observe import judging, model_device, observe, own_randomness
from wide.standard_error import perplexity_stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One task's score.

    Args:
        metric: The metric that the paper reports: accuracies lie in [0, 1]; `word_perplexity` is per whitespace word.
        stderr: Its standard error: the harness's over items, and of `word_perplexity`, for which it has none, the ratio
            estimator's over documents; None for a single document.
        full_items: Items of the full evaluation split.
        sparsity: What was skipped on this task's tokens, padding excluded; None for a model without routers.
        token_perplexity: Perplexity per token of the same text in the same windows, where `metric` is one per word;
            else None.
        token_stderr: Standard error of `token_perplexity` over documents; None where there is none.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int
    full_items: int
    sparsity: Sparsity | None = None
    token_perplexity: float | None = None
    token_stderr: float | None = None
    other_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_subset(self) -> bool:
        """Whether fewer items than the full split were evaluated, so that published figures are not comparable."""
        return self.items != self.full_items

    @property
    def label(self) -> str:
        """Task name, with the number of items where it is a subset."""
        return f"{self.task} ({self.items}-item subset)" if self.is_subset else self.task

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self) | {"is_subset": self.is_subset}


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """Scores of several tasks; the model saw at most `max_length` tokens at once."""

    tasks: tuple[TaskResult, ...]
    max_length: int
    harness_version: str

    @property
    def _accuracies(self) -> list[TaskResult]:
        return [task for task in self.tasks if task.task in ZERO_SHOT_TASKS]

    @property
    def average(self) -> float | None:
        """Mean accuracy over the zero-shot tasks that ran, in [0, 1]."""
        return statistics.fmean(task.value for task in self._accuracies) if self._accuracies else None

    @property
    def average_stderr(self) -> float | None:
        """Standard error of the mean accuracy, tasks taken as independent."""
        errors = [task.stderr for task in self._accuracies if task.stderr is not None]
        if not errors or len(errors) < len(self._accuracies):
            return None
        return math.hypot(*errors) / len(errors)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        averages = {"average": self.average, "average_stderr": self.average_stderr}
        return asdict(self) | averages | {"tasks": [task.to_json() for task in self.tasks]}


def run_harness(
    model: nn.Module,
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    local_data: Path | None = None,
    max_length: int = 4096,
    batch_size: int = 8,
    limit: int | None = None,
    count_skips: bool = True,
) -> HarnessResult:
    """Evaluate a live model, zero-shot, with the harness's own prompts and metrics.

    Likelihoods are `wide.evaluation.likelihood`'s: the log-softmax is taken in float32 whatever the model's dtype (the
    harness's default is the model's). Raises EvaluationError if a task is unknown or its data cannot be had.

    Args:
        local_data: Folder with copies of the data; None loads them from the Hugging Face hub.
        max_length: Tokens that the model sees at most at once; 4096 in the paper.
        batch_size: Sequences per forward; short ones are more, see `log_likelihoods`.
        limit: Evaluate only so many items of each task; the result is labelled a subset.
    """
    chosen = [find_task(name) for name in tasks]
    # Options follow a context; a document's first token follows BOS, or EOS, or nothing that a model could score.
    has_start = tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None
    whole = [task.name for task in chosen if task.metric == PER_WORD]
    if whole and not has_start:
        raise EvaluationError(
            f"the task {whole[0]} begins documents with BOS or EOS, and this tokenizer has neither; score text with "
            "--data (in Python, data=) instead, or give the tokenizer one"
        )
    import lm_eval
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    # Its progress and warnings are about its own command line.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = []
    # The harness seeds every generator.
    own = own_randomness(model_device(model))
    with tempfile.TemporaryDirectory(prefix="wide-tasks-") as scratch, judging(model), own:
        manager, names = _task_manager(lm_eval, chosen, local_data, Path(scratch))
        for task, name in zip(chosen, names, strict=True):
            meter = SkipCounter(model) if count_skips and is_attached(model) else None
            told: dict[str, Any] = {"tokenizer": copy.deepcopy(tokenizer), "batch_size": batch_size}
            # Any: the harness only looks whether a text begins with it.
            told |= {"max_length": max_length, "prefix_token_id": None if has_start else 0}
            lm = HFLM(pretrained=model, **told)
            # The options of an item share their context.
            lm.tok_encode = cache(lm.tok_encode)
            # The harness's progress bars, which cannot be turned off, are kept out of files; logging is not affected.
            bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
            with nullcontext() if meter is None else observe(model) as routing, bars, _without_waste(lm_eval):
                after = None if meter is None or routing is None else partial(meter.add, routing)
                lm._loglikelihood_tokens = partial(_likelihoods, model, max_length, batch_size, after)
                # Single documents are needed for the error of a perplexity only.
                raw = _evaluate(lm_eval, lm, name, manager, limit, log_samples=task.metric == PER_WORD)
            results.append(_task_result(task, name, raw, meter, lm))
    return HarnessResult(tasks=tuple(results), max_length=max_length, harness_version=str(lm_eval.__version__))


def _task_manager(lm_eval: Any, tasks: Sequence[Task], local_data: Path | None, scratch: Path) -> tuple[Any, list[str]]:
    """Return a manager that knows these tasks only (indexing all of the harness's takes seconds), and their names."""
    from lm_eval.tasks import TaskManager

    stock = Path(lm_eval.__file__).parent / "tasks"
    if local_data is not None:
        names = [write_local_task(task, local_data, stock, scratch) for task in tasks]
        return TaskManager(include_path=str(scratch), include_defaults=False), names
    folders = sorted({str((stock / task.stock).parent) for task in tasks})
    return TaskManager(include_path=folders, include_defaults=False), [task.name for task in tasks]


def _evaluate(
    lm_eval: Any, lm: Any, name: str, manager: Any, limit: int | None, *, log_samples: bool
) -> dict[str, Any]:
    # Of several processes each scores everything: layers of a sharded model are gathered from all of them. The harness
    # would tell the first one alone what it found.
    rank = os.environ.pop("LOCAL_RANK", None)
    try:
        return lm_eval.evaluator.simple_evaluate(
            model=lm, tasks=[name], num_fewshot=0, task_manager=manager, limit=limit, log_samples=log_samples
        )
    except (OSError, ValueError, RuntimeError) as error:
        # Data sets that cannot be reached raise any of these; so does a model that fails, whose error says more.
        modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        if not any(module.startswith("datasets.") for module in modules):
            raise
        raise EvaluationError(
            f"the data of the task {name!r} cannot be loaded: {first_line(error)}; check the network{ELSEWHERE}"
        ) from error
    finally:
        if rank is not None:
            os.environ["LOCAL_RANK"] = rank


def _task_result(task: Task, name: str, raw: dict[str, Any], meter: SkipCounter | None, lm: Any) -> TaskResult:
    scores = {key.partition(",")[0]: value for key, value in raw["results"][name].items() if "," in key}
    numbers = {key: float(value) for key, value in scores.items() if isinstance(value, int | float)}
    stderr, token_perplexity, token_stderr = numbers.get(f"{task.metric}_stderr"), None, None
    if task.metric == PER_WORD:
        documents = raw["samples"][name]
        losses = [-float(document[PER_WORD][0]) for document in documents]
        words = [int(document[PER_WORD][1]) for document in documents]
        tokens = [len(lm.tok_encode(document["arguments"][0][0])) for document in documents]
        token_perplexity = exp_or_infinity(math.fsum(losses) / max(sum(tokens), 1))
        stderr, token_stderr = perplexity_stderr(losses, words), perplexity_stderr(losses, tokens)
    return TaskResult(
        task=task.name,
        metric=task.metric,
        value=numbers[task.metric],
        stderr=stderr,
        items=int(raw["n-samples"][name]["effective"]),
        full_items=task.num_items,
        sparsity=None if meter is None else meter.result(),
        token_perplexity=token_perplexity,
        token_stderr=token_stderr,
        other_metrics={k: v for k, v in numbers.items() if k not in (task.metric, f"{task.metric}_stderr")},
    )


def _likelihoods(
    model: nn.Module, length: int, batch_size: int, after: Callable[..., None] | None, requests: Sequence[Any], **_: Any
) -> list[tuple[float, bool]]:
    """Stand for the harness's own: the log-softmax is in float32, short requests share forwards, skips are counted."""
    pairs = [(context, continuation) for _, context, continuation in requests]
    return log_likelihoods(model, pairs, max_length=length, batch_size=batch_size, after_forward=after)


@contextmanager
def _without_waste(lm_eval: Any) -> Iterator[None]:
    """Keep the harness from what takes it minutes and serves nobody here; scores are the same."""
    from lm_eval.utils import env

    # It compiles templates anew for every item, and lists the installed packages after every task. Outside of a
    # repository, git's answer ends on the terminal as a fatal error.
    nothing = {"add_env_info": lambda storage: None, "get_git_commit_hash": lambda: None}
    with having(env, from_string=cache(env.from_string)), having(lm_eval.evaluator, **nothing):
        yield
