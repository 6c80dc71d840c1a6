"""The README of an adapter, a checkpoint or an export, in the Hub's format: metadata for machines, facts for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wide.data.local_names import is_repository
from wide.plan import Plan

CARD_FILE = "README.md"
PLACE = "PATH/TO/THIS/FOLDER"
"""Stands in a card for the folder that it lies in, and is replaced by its name on the Hub."""


def finish_folder(folder: Path, config: Mapping[str, Any], how: str, library: str = "wide") -> None:
    """Write the card beside what was saved, and make all files as readable as any other output.

    `config` is as `wide_config.json` holds it; `how` is the Python that loads the folder, which is called `PLACE`.
    """
    (folder / CARD_FILE).write_text(model_card(config, how, library), encoding="utf-8")
    # safetensors makes its files private.
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def model_card(config: Mapping[str, Any], how: str, library: str = "wide") -> str:
    """Return the card as Markdown with the Hub's metadata; arguments are those of `finish_folder`."""
    from huggingface_hub import EvalResult, ModelCardData

    base, provenance = config["base"], config["provenance"]
    name = base.get("name_or_path") or "the base model"
    plan = Plan.from_json(config["plan"])
    lines = plan.in_words()
    if config["has_weights"]:
        lines.append("base weights: replaced (wide_weights.safetensors)")
    what, tag = "Static pruning", "static-pruning"
    held = ["A static plan", "LoRA"] if config["has_lora"] else ["A static plan"]
    if plan.is_routed:
        what, tag, held[0] = "Token-wise width pruning", "dynamic-width-pruning", "Routers"
        lines.append("every token chooses which of these groups of attention heads and FFN channels it executes")
    texts = {str(stage.get("text")) for key in ("prune", "recover") if (stage := provenance.get(key))}
    scored = provenance.get("held_out", {})
    perplexity = scored.get("token_perplexity", {}).get("perplexity")
    result = EvalResult(
        task_type="text-generation",
        dataset_type=str(scored.get("data")),
        dataset_name=str(scored.get("data")),
        metric_type="perplexity",
        metric_value=perplexity,
    )
    # The Hub refuses names that are none of its own.
    metadata = ModelCardData(
        base_model=name if is_repository(name) else None,
        datasets=sorted(filter(is_repository, texts)) or None,
        license="other",
        license_name="as-the-base-model",
        library_name=library,
        pipeline_tag="text-generation",
        tags=["pruning", tag],
        metrics=None if perplexity is None else ["perplexity"],
        model_name=f"{what} of {name}",
        eval_results=None if perplexity is None else [result],
    )
    install = "pip install 'wide[lora]'    # in a copy of the repository: pip install '.[lora]'"
    return f"""---
{metadata.to_yaml()}
---
# {what} of {name}

{" and ".join(held)} for a {base["model_type"]} model of {base["num_layers"]} layers.
{chr(10).join(f"- {line}" for line in lines)}

{chr(10).join(_results(provenance)) or "What it skips and what that costs was not recorded."}

```bash
{"pip install transformers" if library == "transformers" else install}
```

```python
{how}
```

The licence of the base model holds for what is derived from it; wide is Apache-2.0. Written by wide
{config["wide_version"]}{"" if library == "transformers" else "; `wide inspect` prints all settings"}.
"""


def _results(provenance: Mapping[str, Any]) -> list[str]:
    """Return lines with perplexity and sparsity, in the measure that was asked for, beside the dense model's."""
    field, words, target, last = _asked(provenance)
    scored = provenance.get("held_out", {})
    perplexity, skipped = scored.get("token_perplexity", {}), scored.get("sparsity", {}).get(field)
    lines = []
    if perplexity:
        how = ", ".join(f"{key} {perplexity[key]}" for key in _PROTOCOL if key in perplexity)
        shown = f"{perplexity['perplexity']:.2f}"
        if perplexity.get("stderr"):
            # Of the mean loss, which its exponential multiplies.
            shown += f" ± {perplexity['perplexity'] * perplexity['stderr']:.2f}"
        cell = "" if skipped is None else f"{skipped:.1%}"
        lines += ["| | token perplexity | skipped |", "|---|---|---|"]
        lines += [f"| this model | {shown} | {cell} |"]
        lines += [f"| {_DENSE.get(name, name)} | {value:.2f} | |" for name, value in scored.get("of_dense", {}).items()]
        lines += ["", f"On {scored['data']} ({how}); ± is the standard error over windows."]
    trained = last.get("inference", {}).get("sparsity")
    facts = [f"asked {target:.1%} {words}"] if target is not None else []
    facts += [f"measured on training text {trained:.1%}"] if trained is not None else []
    lines += [f"Skipped: {', '.join(facts)}."] if facts else []
    return lines + [
        _training(provenance[key], name) for key, name in _STAGES.items() if "stage" in provenance.get(key, {})
    ]


def _training(facts: Mapping[str, Any], name: str) -> str:
    stage, text = facts["stage"], facts.get("text")
    sizes = f"{stage.get('steps')} steps of {stage.get('batch_size')} x {stage.get('sequence_length')} tokens"
    return f"{name}: {sizes}{f' of {text}' if text else ''}."


def _asked(provenance: Mapping[str, Any]) -> tuple[str, str, float | None, Mapping[str, Any]]:
    """Return what was asked for: field of `Sparsity`, in words, share; and the last stage that had that target."""
    if "method" in provenance:
        method = provenance["method"]
        field = "linear_flops_layers" if method.get("match") == "linear_flops" else "mean"
        return field, _COUNTED[field], method.get("target"), {}
    prune = provenance.get("prune", {})
    objective = prune.get("objective", {})
    field = {"linear_flops": "linear_flops"}.get(objective.get("target"), "mean")
    if field == "linear_flops" and objective.get("include_fixed"):
        field = "linear_flops_with_fixed"
    return field, _COUNTED[field], objective.get("sparsity"), provenance.get("recover", prune)


_PROTOCOL = ("tokens", "window", "stride")
_STAGES = {"prune": "Stage 1 (routers)", "recover": "Stage 2 (LoRA)"}
_DENSE = {"dense": "dense", "dense + LoRA": "dense, with the same LoRA"}
_COUNTED = {
    "mean": "of the groups (mean of attention and FFN)",
    "linear_flops": "of the prunable work",
    "linear_flops_with_fixed": "of all work",
    "linear_flops_layers": "of the work of the decoder layers",
}
