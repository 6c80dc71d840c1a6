"""The adapter on disk: a small, self-describing folder that loads strictly.

    wide_config.json            version, base model, plan, thresholds in force and calibrated (`dial`), provenance
    wide_router.safetensors     router matrices, float32; only where the plan has routers
    wide_static.safetensors     scales and bases of static plans, float32; only where it has any
    wide_weights.safetensors    base weights that the method replaced; only if there are any
    wide_order.safetensors      orders of FFN channels, int64; only where they are not those of the base
    lora/                       PEFT's files, only after stage 2
    README.md                   model card

LoRA lies in a folder of its own, so that nothing loads base + LoRA without the routers.
"""

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wide.errors import AdapterError, ConfigError, NotAttachedError, ShapeError
from wide.models.attach import Attachment, attach, attachment, detach
from wide.models.discovery import discover
from wide.models.lora import copy_strictly, load_lora
from wide.models.pretrained import differences, fingerprint, load_pretrained, same_weights, sampled_values
from wide.plan import Plan
from wide.version import __version__

FORMAT_VERSION = 3
CONFIG_FILE, ROUTER_FILE, LORA_FOLDER, CARD_FILE = "wide_config.json", "wide_router.safetensors", "lora", "README.md"
STATIC_FILE, WEIGHTS_FILE = "wide_static.safetensors", "wide_weights.safetensors"
ORDER_FILE = "wide_order.safetensors"
_STATIC_WORDS = {
    "skipped": "left out for every token",
    "kept": "with only some of their heads or channels, the same for every token",
    "following": "executed for the tokens that the attention of the layer executes for",
}
_WAY_OUT = "copy it again, or use what a stage of its run kept (RUN/stage1/adapter, RUN/stage2/adapter)"
_KEYS = {
    "format_version",
    "wide_version",
    "base",
    "plan",
    "thresholds",
    "dial",
    "provenance",
    "has_lora",
    "has_weights",
    "has_order",
}


def save(model: nn.Module, path: str | Path, *, ignore_base_changes: bool = False) -> Path:
    """Write the adapter of an attached model to a folder, whole or not at all, and return the folder.

    A static plan is kept with its scales, bases and replaced weights.

    Args:
        model: An attached model; LoRA must not be merged.
        path: The folder; an adapter that is there already is replaced.
        ignore_base_changes: Save although base weights have changed since `attach`; what is loaded later stands on
            the base as it was.

    Raises:
        NotAttachedError: If the model has no plan, LoRA was merged into its weights or they were trained since
            `attach` (save a full checkpoint), or a static gate is still being trained through a transform.
        AdapterError: If the folder exists and holds something else.
    """
    state = attachment(model)
    require_final_scales(state)
    reason = None
    if state.lora is not None and state.lora.merged:
        reason = "LoRA was merged into the base weights"
    elif state.originals_lost:
        reason = "this model came from a full checkpoint whose base weights were replaced"
    elif state.order_lost:
        reason = "this model came from a full checkpoint whose FFN channels lie in another order than those of its base"
    elif not ignore_base_changes and not _has_its_weights(model, state):
        reason = (
            "base weights have changed since wide.attach (give ignore_base_changes=True if the base as it was is meant)"
        )
    if reason is not None:
        raise NotAttachedError(
            f"{reason}, so an adapter cannot describe this model; save a full checkpoint with "
            "wide.save_checkpoint(model, path)"
        )
    target = Path(path)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / CONFIG_FILE).exists())):
        raise AdapterError(f"{target} exists and is not an adapter; choose another folder or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    # A crash between the two renames leaves the earlier adapter whole, under this name.
    earlier = temporary.with_name(f"{temporary.name}.earlier")
    try:
        _write(model, temporary)
        if target.exists():
            target.rename(earlier)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)
    return target


def _has_its_weights(model: nn.Module, state: Attachment) -> bool:
    with nullcontext() if state.replaced is None else state.replaced.showing(is_dense=False):
        return same_weights(state.weights_seen, sampled_values(model))


def load(model_or_name: nn.Module | str, path: str | Path, *, check_weights: bool = True, **load_options: Any) -> Any:
    """Attach a saved adapter to its base model and return the model.

    Args:
        model_or_name: The base model, without routers, or its name or folder for `from_pretrained`.
        path: Folder written by `save`.
        check_weights: Whether the sample of base weights must agree; False admits a fine-tuned sister checkpoint.
        load_options: For `from_pretrained`, where a name is given.

    Raises:
        AdapterError: If a file is missing or malformed, or the adapter was made for another base model.
        NotAttachedError: If the model carries routers already.
    """
    folder = Path(path)
    config = read_config(folder)
    plan = Plan.from_json(config["plan"])
    routers = _read_tensors(folder, ROUTER_FILE, wanted=plan.is_routed)
    static = _read_tensors(folder, STATIC_FILE, wanted=bool(plan.tensor_shapes()))
    weights = _read_tensors(folder, WEIGHTS_FILE, wanted=bool(config["has_weights"]))
    orders = _read_tensors(folder, ORDER_FILE, wanted=bool(config["has_order"]))
    has_lora = _has(folder / LORA_FOLDER, wanted=bool(config["has_lora"]))
    model = load_pretrained(model_or_name, **load_options) if isinstance(model_or_name, str) else model_or_name
    _check_base(config["base"], model, check_weights)
    try:
        attach(model, plan, tensors=static, weights=weights, orders=orders)
    except (ShapeError, ConfigError) as error:
        raise AdapterError(f"{folder} is damaged: {error}; {_WAY_OUT}") from error
    try:
        copy_strictly(_router_parameters(model), routers, "router")
        apply_config(model, config)
        if has_lora:
            load_lora(model, folder / LORA_FOLDER)
    except Exception as error:
        detach(model)
        if isinstance(error, AdapterError):
            raise AdapterError(f"{folder}: {error}; {_WAY_OUT}") from error
        raise
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check an adapter's configuration without loading a model.

    Raises:
        AdapterError: If it is missing, not JSON, of another format version, or has missing or unknown keys.
    """
    file = folder / CONFIG_FILE
    if not folder.exists():
        raise AdapterError(f"there is no folder {str(folder)!r}; check the path of the adapter, or of its run")
    if not file.is_file():
        raise AdapterError(
            f"{folder} is not an adapter: {CONFIG_FILE} is missing; name the folder that wide.save wrote, or that of a "
            "run with an adapter in it"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"{file} is not valid JSON ({error}); the adapter is damaged: {_WAY_OUT}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} must hold an object, not {type(config).__name__}; {_WAY_OUT}")
    check_config(config, str(file))
    return config


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse a configuration that is not of this version's format.

    Raises:
        AdapterError: If it is of another version, or has missing or unknown keys; the message names them.
    """
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise AdapterError(
            f"{where}: format version {version!r} is not {FORMAT_VERSION}; use the wide version "
            f"that wrote it ({config.get('wide_version')!r})"
        )
    missing, unknown = sorted(_KEYS - set(config)), sorted(set(config) - _KEYS)
    if missing or unknown:
        raise AdapterError(f"{where}: missing keys {missing}, unknown keys {unknown}; copy it again, as wide wrote it")


def require_final_scales(state: Attachment) -> None:
    """Refuse to keep scales that are not what is applied.

    Raises:
        NotAttachedError: If a static gate has a transform.
    """
    for gate in state.static_gates():
        if gate.transform is not None:
            raise NotAttachedError(
                f"layer {gate.layer_index}: the {gate.half_layer} scales are still trained through a transform, which "
                "no file keeps; put what it gives into `scale` and set `transform` to None"
            )


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the JSON-ready configuration of an attached model, as `wide_config.json` holds it."""
    state = attachment(model)
    return {
        "format_version": FORMAT_VERSION,
        "wide_version": __version__,
        "base": state.base,
        "plan": state.plan.to_json(),
        "thresholds": [_number_to_json(router.threshold) for router in state.routers()],
        "dial": [[sparsity, _number_to_json(threshold)] for sparsity, threshold in state.dial],
        "provenance": state.provenance,
        "has_lora": state.lora is not None and not state.lora.merged,
        "has_weights": state.replaced is not None or state.originals_lost,
        "has_order": state.regrouped is not None or state.order_lost,
    }


def apply_config(model: nn.Module, config: dict[str, Any]) -> None:
    """Set thresholds, those in force and those calibrated, and provenance of an attached model from a configuration.

    Raises:
        AdapterError: If the numbers are malformed.
    """
    state = attachment(model)
    routers = state.routers()
    try:
        thresholds = [_number_from_json(value) for value in config["thresholds"]]
        calibrated = [(float(sparsity), _number_from_json(threshold)) for sparsity, threshold in config["dial"]]
    except (TypeError, ValueError) as error:
        raise AdapterError(f"{CONFIG_FILE}: thresholds or dial are malformed ({error})") from error
    if len(thresholds) != len(routers):
        raise AdapterError(f"{CONFIG_FILE}: {len(thresholds)} thresholds for {len(routers)} routers")
    for router, threshold in zip(routers, thresholds, strict=True):
        router.threshold = threshold
    state.dial = calibrated
    state.provenance = dict(config["provenance"])


def _write(model: nn.Module, folder: Path) -> None:
    state = attachment(model)
    config = config_of(model)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    files: dict[str, Mapping[str, Tensor]] = {
        ROUTER_FILE: _router_parameters(model),
        STATIC_FILE: state.static_parameters(),
        WEIGHTS_FILE: {} if state.replaced is None else state.replaced.values(),
        ORDER_FILE: {} if state.regrouped is None else state.regrouped.orders(),
    }
    for name, tensors in files.items():
        if tensors:
            save_file({key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}, str(folder / name))
    if state.lora is not None:
        state.lora.save(folder / LORA_FOLDER)
    (folder / CARD_FILE).write_text(_model_card(config), encoding="utf-8")
    # mkdtemp makes the folder private, safetensors its files; an adapter is as readable as any other output.
    folder.chmod(0o755)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def _router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"layers.{router.layer_index}.{router.half_layer}.{name}": parameter
        for router in attachment(model).routers()
        for name, parameter in router.named_parameters()
    }


def _read_tensors(folder: Path, name: str, *, wanted: bool) -> dict[str, Tensor]:
    if not _has(folder / name, wanted=wanted):
        return {}
    try:
        return load_file(str(folder / name))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{folder / name} cannot be read ({error}); the file is damaged: {_WAY_OUT}") from error


def _has(path: Path, *, wanted: bool) -> bool:
    """Return whether a part of an adapter is there, and refuse it where the configuration says otherwise."""
    # Without LoRA, for example, the routers of stage 2 would load well and compute something nobody trained.
    if wanted and not path.exists():
        raise AdapterError(f"{path} is missing: the adapter is incomplete; {_WAY_OUT}")
    if path.exists() and not wanted:
        raise AdapterError(f"{path} does not belong to this adapter, whose {CONFIG_FILE} has no such values; remove it")
    return wanted


def _check_base(expected: dict[str, Any], model: nn.Module, check_weights: bool) -> None:
    found = fingerprint(model, discover(model))
    if not check_weights:
        found["weight_sample"] = []
    words = differences(expected, found)
    if words:
        raise AdapterError(
            f"this adapter was made for {expected.get('name_or_path') or expected.get('model_type')!r}, not for this "
            f"model: {'; '.join(words)}. Load the base it names"
            + ("" if "weights differ" not in words[0] else ", or pass check_weights=False for a fine-tuned sister")
        )


def _number_to_json(value: float) -> float | str:
    # JSON has no infinities; a threshold of -inf executes everything.
    return value if math.isfinite(value) else str(value)


def _number_from_json(value: float | str) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("a threshold is not a number")
    return number


def _model_card(config: dict[str, Any]) -> str:
    """Return the README of an adapter as Markdown with Hub metadata."""
    base = config["base"]
    name = base.get("name_or_path") or "the base model"
    sublayers = [sublayer for layer in config["plan"]["layers"] for sublayer in (layer["attention"], layer["ffn"])]
    is_routed = any(sublayer["kind"] == "routed" for sublayer in sublayers)
    what, tag = "Static pruning", "static-pruning"
    held = ["A static plan", "LoRA"] if config["has_lora"] else ["A static plan"]
    if is_routed:
        what, tag, held[0] = "Token-wise width pruning", "dynamic-width-pruning", "Routers"
    facts = "\n".join(f"| {key} | {value} |" for key, value in _flat(config["provenance"]))
    return f"""---
library_name: wide
base_model: {name}
tags: [pruning, {tag}]
---
# {what} of {name}

{" and ".join(held)} for a {base["model_type"]} model of {base["num_layers"]} layers.
{chr(10).join(_plan_lines(config, sublayers))}

```python
import wide

model = wide.load("{name}", "PATH/TO/THIS/FOLDER")
```

| training | |
|---|---|
{facts or "| not recorded | |"}

Written by wide {config["wide_version"]}.
"""


def _plan_lines(config: dict[str, Any], sublayers: list[dict[str, Any]]) -> list[str]:
    stream, count, total = config["plan"]["stream"], Counter(s["kind"] for s in sublayers), len(sublayers)
    lines = []
    if count["routed"]:
        sizes = sorted({sublayer["grouping"]["group_size"] for sublayer in sublayers if sublayer["kind"] == "routed"})
        lines.append(
            f"- {count['routed']} of {total} sublayers routed, group sizes {sizes} channels. Every token chooses which "
            "attention-head groups and FFN-channel groups it executes."
        )
    lines += [f"- {count[kind]} of {total} sublayers {words}." for kind, words in _STATIC_WORDS.items() if count[kind]]
    if stream is not None:
        lines.append(
            f"- The residual stream lies in subspaces of {stream['kept']} of its {stream['width']} dimensions."
        )
    if config["has_weights"]:
        lines.append("- Base weights are replaced (wide_weights.safetensors).")
    return lines or ["- Every sublayer runs as it is."]


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((f"{prefix}{key}", value))
    return rows
