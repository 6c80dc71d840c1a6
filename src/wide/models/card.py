"""The model card that lies beside every adapter."""

from typing import Any


def model_card(config: dict[str, Any], *, has_lora: bool) -> str:
    """Return the README of an adapter as Markdown with Hub metadata.

    Args:
        config: The adapter's configuration (`wide_config.json`).
        has_lora: Whether stage 2 was run.
    """
    base, provenance = config["base"], config["provenance"]
    routed = [
        half for layer in config["plan"] for half in (layer["attention"], layer["ffn"]) if half["kind"] == "routed"
    ]
    sizes = sorted({half["grouping"]["group_size"] for half in routed})
    facts = "\n".join(f"| {key} | {value} |" for key, value in _flat(provenance))
    name = base.get("name_or_path") or "the base model"
    return f"""---
library_name: wide
base_model: {name}
tags: [pruning, dynamic-width-pruning]
---
# Token-wise width pruning of {name}

Routers{" and LoRA" if has_lora else ""} for a {base["model_type"]} model of {base["num_layers"]} layers
({len(routed)} routed half-layers; group sizes {sizes} channels). Every token chooses which attention-head groups and
FFN-channel groups it executes.

```python
import wide

model = wide.load("{name}", "PATH/TO/THIS/FOLDER")
```

| training | |
|---|---|
{facts or "| not recorded | |"}

Written by wide {config["wide_version"]}.
"""


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((f"{prefix}{key}", value))
    return rows
