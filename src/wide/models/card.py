"""The model card that lies beside every adapter."""

from collections import Counter
from typing import Any

_ROUTED = "Every token chooses which attention-head groups and FFN-channel groups it executes."
_WORDS = {
    "skipped": "left out for every token",
    "kept": "with only some of their heads or channels, the same for every token",
    "following": "executed for the tokens that the attention of the layer executes for",
}


def model_card(config: dict[str, Any], *, has_lora: bool) -> str:
    """Return the README of an adapter as Markdown with Hub metadata.

    Args:
        config: The adapter's configuration (`wide_config.json`).
        has_lora: Whether stage 2 was run.
    """
    base, provenance = config["base"], config["provenance"]
    facts = "\n".join(f"| {key} | {value} |" for key, value in _flat(provenance))
    name = base.get("name_or_path") or "the base model"
    is_routed = any(half["kind"] == "routed" for half in _halves(config["plan"]))
    what = "Token-wise width pruning" if is_routed else "Static pruning"
    tag = "dynamic-width-pruning" if is_routed else "static-pruning"
    return f"""---
library_name: wide
base_model: {name}
tags: [pruning, {tag}]
---
# {what} of {name}

{" and ".join([_held(config), *(["LoRA"] if has_lora else [])])} for a {base["model_type"]} model of \
{base["num_layers"]} layers.
{chr(10).join(_plan_lines(config))}

```python
import wide

model = wide.load("{name}", "PATH/TO/THIS/FOLDER")
```

| training | |
|---|---|
{facts or "| not recorded | |"}

Written by wide {config["wide_version"]}.
"""


def _halves(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [half for layer in plan["layers"] for half in (layer["attention"], layer["ffn"])]


def _held(config: dict[str, Any]) -> str:
    is_routed = any(half["kind"] == "routed" for half in _halves(config["plan"]))
    return "Routers" if is_routed else "A static plan"


def _plan_lines(config: dict[str, Any]) -> list[str]:
    halves, stream = _halves(config["plan"]), config["plan"]["stream"]
    count = Counter(half["kind"] for half in halves)
    lines = []
    if count["routed"]:
        sizes = sorted({half["grouping"]["group_size"] for half in halves if half["kind"] == "routed"})
        lines.append(
            f"- {count['routed']} of {len(halves)} half-layers routed, group sizes {sizes} channels. {_ROUTED}"
        )
    lines += [f"- {count[kind]} of {len(halves)} half-layers {words}." for kind, words in _WORDS.items() if count[kind]]
    if stream is not None:
        lines.append(
            f"- The residual stream lies in subspaces of {stream['kept']} of its {stream['width']} dimensions."
        )
    if config["has_weights"]:
        lines.append("- Base weights are replaced (wide_weights.safetensors).")
    return lines or ["- Every half-layer runs as it is."]


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((f"{prefix}{key}", value))
    return rows
