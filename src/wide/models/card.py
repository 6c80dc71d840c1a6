"""The README of an adapter, a checkpoint or an export, in the Hub's format: metadata for machines, facts for people."""

from collections.abc import Mapping
from importlib import resources
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
    from jinja2 import Environment

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
    measured = scored.get("token_perplexity", {})
    perplexity = measured.get("perplexity")
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
    field, target, last = _asked(provenance)
    stages = [(title, provenance[key]) for key, title in _STAGES.items() if "stage" in provenance.get(key, {})]
    text = (resources.files("wide.models") / "card.md").read_text(encoding="utf-8")
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(text)
    return template.render(
        metadata=metadata.to_yaml(),
        perplexity=measured,
        protocol=[f"{key} {measured[key]}" for key in ("tokens", "window", "stride") if key in measured],
        skipped=scored.get("sparsity", {}).get(field),
        counted=_COUNTED[field],
        trained=last.get("inference", {}).get("sparsity"),
        version=config["wide_version"],
        **{"what": what, "name": name, "held": held, "base": base, "lines": lines, "scored": scored, "target": target},
        **{"stages": stages, "library": library, "how": how},
    )


def _asked(provenance: Mapping[str, Any]) -> tuple[str, float | None, Mapping[str, Any]]:
    """Return what was asked for: field of `Sparsity`, and share; and the last stage that had that target."""
    if "method" in provenance:
        method = provenance["method"]
        field = "linear_flops_layers" if method.get("match") == "linear_flops" else "mean"
        return field, method.get("target"), {}
    prune = provenance.get("prune", {})
    objective = prune.get("objective", {})
    field = {"linear_flops": "linear_flops"}.get(objective.get("target"), "mean")
    return field, objective.get("sparsity"), provenance.get("recover", prune)


_STAGES = {"prune": "Stage 1 (routers)", "recover": "Stage 2 (LoRA)"}
_COUNTED = {
    "mean": "of the groups (mean of attention and FFN)",
    "linear_flops": "of the prunable work",
    "linear_flops_layers": "of the work of the decoder layers",
}
