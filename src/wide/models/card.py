"""The README of an adapter, a checkpoint or an export, in the Hub's format: metadata for machines, facts for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wide.data.local_names import is_repository
from wide.plan import Plan
from wide.schema import flatten

CARD_FILE = "README.md"
PLACE = "PATH/TO/THIS/FOLDER"
"""Stands in a card for the folder that it lies in, and is replaced by its name on the Hub."""


def finish_folder(folder: Path, config: Mapping[str, Any], how: str) -> None:
    """Write the card beside what was saved, and make all files as readable as any other output.

    Args:
        folder: Of an adapter or a checkpoint.
        config: As `wide_config.json` holds it.
        how: The Python that loads the folder, which is called `PLACE`.
    """
    (folder / CARD_FILE).write_text(model_card(config, how), encoding="utf-8")
    # safetensors makes its files private.
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def model_card(config: Mapping[str, Any], how: str) -> str:
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
        library_name="wide",
        pipeline_tag="text-generation",
        tags=["pruning", tag],
        metrics=None if perplexity is None else ["perplexity"],
        model_name=f"{what} of {name}",
        eval_results=None if perplexity is None else [result],
    )
    # A method's notes may hold a number for every channel.
    rows = [*_summary(provenance), *((k, v) for k, v in flatten(provenance).items() if not isinstance(v, list))]
    facts = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"""---
{metadata.to_yaml()}
---
# {what} of {name}

{" and ".join(held)} for a {base["model_type"]} model of {base["num_layers"]} layers.
{chr(10).join(f"- {line}" for line in lines)}

```python
{how}
```

| fact | |
|---|---|
{facts or "| not recorded | |"}

Written by wide {config["wide_version"]}.
"""


def _summary(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what readers ask first: sparsity asked and measured, and perplexity, as far as they are known."""
    rows = []
    if "method" in provenance:
        rows.append(("**sparsity asked**", provenance["method"].get("target")))
    elif "prune" in provenance:
        rows.append(("**sparsity asked**", provenance["prune"].get("objective", {}).get("sparsity")))
        last = provenance.get("recover", provenance["prune"])
        rows.append(("**sparsity measured, on training text**", last.get("inference", {}).get("sparsity")))
    scored = provenance.get("held_out", {})
    rows.append(("**sparsity measured, on held-out text**", scored.get("sparsity", {}).get("mean")))
    known = [(name, f"{share:.1%}") for name, share in rows if share is not None]
    perplexity = scored.get("token_perplexity", {}).get("perplexity")
    return known if perplexity is None else [*known, (f"**token perplexity on {scored['data']}**", f"{perplexity:.2f}")]
