"""What an evaluation found: pruned and dense figures side by side, as JSON and as a table."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wide.evaluation.harness import HarnessResult, TaskResult
from wide.evaluation.perplexity import PerplexityResult
from wide.models.cost import Sparsity
from wide.writing import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Figures of one model.

    Args:
        perplexity: Token perplexity on the text, None if none was asked for.
        tasks: Scores of the tasks, None if none were asked for.
    """

    perplexity: PerplexityResult | None = None
    tasks: HarnessResult | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {"perplexity": _json(self.perplexity), "tasks": _json(self.tasks)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """An evaluation.

    Args:
        data: Name of the text that was scored, None if none was.
        model: Figures of the model as it is (pruned, if it carries routers).
        dense: Figures of the base model, routing, pruning and LoRA switched off; None if the model carries no plan or
            none were asked for.
        sparsity: What was skipped on the text, on exactly the tokens that were scored, or what a static plan prunes;
            None for a model without a plan. That of tasks is with each task.
        masked: Figures of the masked path on the text, where `model` ran through fused operators; None otherwise.
        flip_rate: Share of routing decisions that differ between those two paths, in [0, 1]; None otherwise.
        dense_has_lora: Whether the dense figures are with LoRA, which was merged into the weights for good.
    """

    data: str | None
    model: Scores
    dense: Scores | None
    sparsity: Sparsity | None
    masked: Scores | None = None
    flip_rate: float | None = None
    dense_has_lora: bool = False

    @property
    def retention(self) -> float | None:
        """Average accuracy as a share of the dense model's, 1 = nothing lost."""
        if self.model.tasks is None or self.dense is None or self.dense.tasks is None:
            return None
        pruned, dense = self.model.tasks.average, self.dense.tasks.average
        return pruned / dense if pruned is not None and dense else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        nested = {name: _json(getattr(self, name)) for name in ("model", "dense", "masked", "sparsity")}
        return asdict(self) | nested | {"retention": self.retention}

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        write_whole(path, json.dumps(self.to_json(), indent=2) + "\n")

    def __repr__(self) -> str:
        """Return the table: what a notebook shows."""
        return self.table()

    def table(self) -> str:
        """Return the report as readable text."""
        dense = "dense + LoRA" if self.dense_has_lora else "dense"
        rows = [("", "pruned" if self.sparsities() else "model", dense), *self._score_rows()]
        if self.dense is None:
            rows = [(name, value, "") for name, value, _ in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        for name, sparsity in self.sparsities():
            lines += ["", *_sparsity_lines(name, sparsity)]
        return "\n".join(lines)

    def sparsities(self) -> list[tuple[str, Sparsity]]:
        """Return what was skipped, by the name of the text or task."""
        found = [] if self.sparsity is None else [(str(self.data), self.sparsity)]
        tasks = () if self.model.tasks is None else self.model.tasks.tasks
        return found + [(task.label, task.sparsity) for task in tasks if task.sparsity is not None]

    def _score_rows(self) -> Iterator[tuple[str, str, str]]:
        dense = self.dense or Scores()
        if self.model.perplexity is not None:
            found = self.model.perplexity
            name = f"token perplexity, {self.data} (window {found.window}, stride {found.stride})"
            other = "" if dense.perplexity is None else f"{dense.perplexity.perplexity:.3f}"
            yield name, f"{found.perplexity:.3f}", other
        if self.masked is not None and self.masked.perplexity is not None:
            yield "the same, dense layers and masks", f"{self.masked.perplexity.perplexity:.3f}", ""
        if self.flip_rate is not None:
            yield "decisions that differ between the two", f"{self.flip_rate:.3%}", ""
        if self.model.tasks is None:
            return
        others = (None,) * len(self.model.tasks.tasks) if dense.tasks is None else dense.tasks.tasks
        for task, other_task in zip(self.model.tasks.tasks, others, strict=True):
            theirs = {} if other_task is None else dict(_task_scores(other_task))
            for metric, score in _task_scores(task):
                yield f"{task.label}, {metric}", score, theirs.get(metric, "")
        if self.model.tasks.average is not None:
            error = self.model.tasks.average_stderr
            dense_average = None if dense.tasks is None else dense.tasks.average
            other = "" if dense_average is None else f"{dense_average:.2%}"
            yield "average accuracy", _score("acc", self.model.tasks.average, error), other
        if self.retention is not None:
            yield "retention", f"{self.retention:.2%}", ""


def _json(found: Any) -> Any:
    return None if found is None else found.to_json()


def _task_scores(task: TaskResult) -> Iterator[tuple[str, str]]:
    yield task.metric, _score(task.metric, task.value, task.stderr)
    if task.token_perplexity is not None:
        yield "token_perplexity", _score("token_perplexity", task.token_perplexity, task.token_stderr)


def _score(metric: str, value: float, stderr: float | None) -> str:
    if metric.startswith("acc"):
        return f"{value:.2%}" if stderr is None else f"{value:.2%} ± {100 * stderr:.2f}"
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def _sparsity_lines(name: str, sparsity: Sparsity) -> list[str]:
    # Without routers nothing depends on the text.
    where = f"skipped on {name} ({sparsity.tokens} tokens)" if sparsity.tokens else "pruned for every token"
    lines = [
        f"{where}: attention {sparsity.attention:.2%}, FFN {sparsity.ffn:.2%}, mean {sparsity.mean:.2%}",
        f"  linear work {sparsity.linear_flops:.2%} of what can be skipped, {sparsity.linear_flops_layers:.2%} with K "
        f"and V, {sparsity.linear_flops_with_fixed:.2%} with K, V and output head",
        f"  parameters of the layers {sparsity.parameters_removed:.2%} removed, KV cache {sparsity.kv_cache_kept:.2%} "
        "kept",
    ]
    by_layer = "  ".join(f"{i}: {_rate(a)}/{_rate(f)}" for i, (a, f) in enumerate(sparsity.layers))
    return [*lines, f"  by layer (attention/FFN): {by_layer}"]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
