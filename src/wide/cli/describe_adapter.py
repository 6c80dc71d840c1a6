"""What an adapter holds, read from its files alone."""

from pathlib import Path
from typing import Any

from wide.models.adapter import read_config
from wide.plan import Half, Kept, Plan, Routed


def describe_adapter(folder: Path) -> str:
    """Return base model, plan, training, sparsity per layer, dial and file sizes, as text.

    Args:
        folder: Written by `wide.save`.

    Raises:
        AdapterError: If it is not an adapter, or a damaged one.
    """
    config = read_config(folder)
    base = config["base"]
    lines = [
        f"{folder}: adapter for {base.get('name_or_path') or base['model_type']} ({base['model_type']}, "
        f"{base['num_layers']} layers), written by wide {config['wide_version']}",
        *_plan(Plan.from_json(config["plan"])),
        *(["  base weights replaced"] if config["has_weights"] else []),
        *_facts(config["provenance"]),
        *_dial(config),
        *_files(folder),
    ]
    return "\n".join(lines)


def _plan(plan: Plan) -> list[str]:
    kinds: dict[str, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        kinds.setdefault(f"attention {_half(layer.attention)}; ffn {_half(layer.ffn)}", []).append(index)
    lines = [f"  layers {_ranges(layers)}: {kind}" for kind, layers in kinds.items()]
    if plan.stream is not None:
        lines.append(f"  residual stream: {plan.stream.kept} of {plan.stream.width} dimensions kept")
    return lines


def _half(half: Half) -> str:
    if isinstance(half, Kept):
        return f"keeps {half.kept} of {half.grouping.num_groups} units of {half.grouping.group_size} channels"
    if isinstance(half, Routed):
        groups, size = half.grouping.num_groups, half.grouping.group_size
        router = "" if half.form == "bottleneck" else f"{half.form} router, "
        return f"{groups} groups of {size} channels, {router}rank {half.rank}, {half.router_input} input"
    return type(half).__name__.lower()


def _ranges(layers: list[int]) -> str:
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole and len(layers) > 1 else ", ".join(map(str, layers))


def _facts(facts: dict[str, Any], indent: str = "  ") -> list[str]:
    lines = []
    for name, value in facts.items():
        if name == "notes":
            # A method's notes are for programs: they may hold a number for every channel.
            lines.append(f"{indent}notes: {', '.join(value) or 'none'}")
        elif isinstance(value, dict):
            lines += [f"{indent}{name}", *_facts(value, indent + "  ")]
        elif name == "layers" and isinstance(value, list):
            lines += [f"{indent}skipped per layer (attention, FFN)", *_layers(value, indent)]
        else:
            lines.append(f"{indent}{name}: {_number(value)}")
    return lines


def _layers(layers: list[Any], indent: str) -> list[str]:
    def show(rate: float | None) -> str:
        return "     -" if rate is None else f"{rate:>6.1%}"

    return [f"{indent}  {index:>3} {show(layer[0])} {show(layer[1])}" for index, layer in enumerate(layers)]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _dial(config: dict[str, Any]) -> list[str]:
    dial = config["dial"]
    if not config["thresholds"]:
        return ["  no routers: what it prunes is the same for every token"]
    if not dial:
        return ["  no dial: --sparsity cannot be set"]
    step = max(1, len(dial) // 10)
    shown = [*dial[::step], dial[-1]] if (len(dial) - 1) % step else dial[::step]
    points = ", ".join(f"{float(sparsity):.0%}: {float(threshold):+.3g}" for sparsity, threshold in shown)
    return [f"  dial of {len(dial)} points, sparsity: threshold of the margin, logits", f"    {points}"]


def _files(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [f"  {path.relative_to(folder)!s:<34}{path.stat().st_size / 1024:>12,.1f} KiB" for path in files]
