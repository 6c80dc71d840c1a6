"""What an evaluation found: pruned and dense figures side by side, as JSON and as a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wide.evaluation.harness import HarnessResult
from wide.evaluation.perplexity import PerplexityResult
from wide.models.cost import Sparsity
from wide.writing import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Figures of one model, as far as they were asked for."""

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

    def table(self) -> str:
        """Return the report as readable text."""
        own, dense = (_figures(scores, self.data) for scores in (self.model, self.dense or Scores()))
        rows = [(name, value, dense.get(name, "")) for name, value in own.items()]
        if self.masked is not None and self.masked.perplexity is not None:
            rows.insert(1, ("the same, dense layers and masks", f"{self.masked.perplexity.perplexity:.3f}", ""))
        if self.flip_rate is not None:
            rows.insert(2, ("decisions that differ between the two", f"{self.flip_rate:.3%}", ""))
        if self.retention is not None:
            rows.append(("retention", f"{self.retention:.2%}", ""))
        title = "" if self.dense is None else "dense + LoRA" if self.dense_has_lora else "dense"
        rows.insert(0, ("", "pruned" if self.sparsities() else "model", title))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        for name, sparsity in self.sparsities():
            lines += ["", *_sparsity_lines(name, sparsity)]
        return "\n".join(lines)

    # What a notebook shows.
    __repr__ = table

    def sparsities(self) -> list[tuple[str, Sparsity]]:
        """Return what was skipped, by the name of the text or task."""
        found = [] if self.sparsity is None else [(str(self.data), self.sparsity)]
        tasks = () if self.model.tasks is None else self.model.tasks.tasks
        return found + [(task.label, task.sparsity) for task in tasks if task.sparsity is not None]


def _json(found: Any) -> Any:
    return None if found is None else found.to_json()


def _figures(scores: Scores, data: str | None) -> dict[str, str]:
    found = {}
    if (text := scores.perplexity) is not None:
        error = None if text.stderr is None else text.stderr * text.perplexity
        name = f"token perplexity, {data} (window {text.window}, stride {text.stride})"
        found[name] = _score("token_perplexity", text.perplexity, error)
    if (tasks := scores.tasks) is None:
        return found
    for task in tasks.tasks:
        found[f"{task.label}, {task.metric}"] = _score(task.metric, task.value, task.stderr)
        if task.token_perplexity is not None:
            value = _score("token_perplexity", task.token_perplexity, task.token_stderr)
            found[f"{task.label}, token_perplexity"] = value
    if tasks.average is not None:
        found["average accuracy"] = _score("acc", tasks.average, tasks.average_stderr)
    return found


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
