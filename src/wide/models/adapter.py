"""The adapter on disk: a small, self-describing folder that loads strictly; docs/reference/files.md lists its files.

LoRA lies in a folder of its own, so that nothing loads base + LoRA without the routers.
"""

import hashlib
import json
import math
import reprlib
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wide.errors import AdapterError, ConfigError, NotAttachedError, ShapeError
from wide.models.attach import Attachment, attach, attachment, detach
from wide.models.card import PLACE, finish_folder
from wide.models.discovery import discover
from wide.models.files import sha256_of
from wide.models.hub import find_adapter, upload
from wide.models.lora import OWN_LORA, copy_strictly, has_merged_lora, load_lora
from wide.models.plan_check import check_tensors
from wide.models.pretrained import (
    LOADING,
    BaseFacts,
    differences,
    fingerprint,
    load_pretrained,
    peft_adapters,
    require_in_memory,
    same_weights,
    sampled_values,
)
from wide.models.sharding import is_first_process
from wide.plan import Plan, Routed
from wide.schema import Between, read_json, require, typed
from wide.version import __version__
from wide.writing import whole_folder

FORMAT_VERSION = 3
CONFIG_FILE, ROUTER_FILE, LORA_FOLDER = "wide_config.json", "wide_router.safetensors", "lora"
STATIC_FILE, WEIGHTS_FILE = "wide_static.safetensors", "wide_weights.safetensors"
ORDER_FILE = "wide_order.safetensors"
_WAY_OUT = "copy it again, or use what a stage of its run kept (RUN/stage1/adapter, RUN/stage2/adapter)"
# What training and methods write of themselves, an object each.
_PROVENANCE = {"prune", "recover", "method", "held_out"}
# Of a margin, in logits; those that nothing reaches are infinite.
_Threshold = Annotated[float, Between(-1e6, 1e6)] | Literal["-inf", "inf"]


class AdapterFacts(TypedDict):
    """What `wide_config.json` holds; all but `files` stands in the configuration of a full checkpoint, too.

    `files` is the sha256 of each other file but the card, by its path, and of this file without that entry; adapters
    of earlier versions have none.
    """

    format_version: int
    wide_version: str
    base: BaseFacts
    plan: Plan
    thresholds: list[_Threshold]
    dial: list[tuple[Annotated[float, Between(0, 1)], _Threshold]]
    provenance: dict[str, Any]
    has_lora: bool
    has_weights: bool
    has_order: bool
    files: NotRequired[dict[str, str]]


def save(
    model: nn.Module, path: str | Path, *, ignore_base_changes: bool = False, push_to_hub: str | None = None
) -> Path:
    """Write the adapter of an attached model to a folder, whole or not at all, and return the folder.

    A static plan is kept with its scales, bases and replaced weights.

    Args:
        model: An attached model; LoRA must not be merged.
        path: The folder; an adapter that is there already is replaced. In a group of processes the first one writes;
            where they shard the model, all must call this.
        ignore_base_changes: Save although base weights have changed since `attach`, or PEFT has put an adapter on them.
            The adapter does not contain these changes.
        push_to_hub: Name of a repository of the Hub, `user/name`, to which the folder is uploaded, too.

    Raises:
        NotAttachedError: If the model has no plan, LoRA was merged into its weights or they were trained since
            `attach` (save a full checkpoint), or a static gate is still being trained through a transform.
        ShapeError: If static scales or bases are none that a plan may have, as after `model.to(torch.bfloat16)`.
        UnsupportedModelError: If routers, scales or bases are offloaded.
        AdapterError: If the folder exists and holds something else, or the Hub refuses.
    """
    require(str | Path, path, "path", "a folder")
    require_describable(model, ignore_base_changes=ignore_base_changes)
    target = Path(path)
    if not is_first_process():
        return target
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / CONFIG_FILE).exists())):
        raise AdapterError(f"{target} exists and is not an adapter; choose another folder or empty it")
    with whole_folder(target) as folder:
        _write(model, folder)
    if push_to_hub is not None:
        upload(target, push_to_hub)
    return target


def push_to_hub(
    model_or_folder: nn.Module | str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload with wide",
) -> str:
    """Upload an adapter, a full checkpoint or an export to the Hugging Face Hub, with its card, in one commit.

    `load` takes adapters from there by their name; after `import wide`, transformers takes checkpoints. An attached
    model's own `push_to_hub` uploads a full checkpoint.

    Args:
        model_or_folder: An attached model, whose adapter is uploaded, or a folder of `wide.save`,
            `wide.save_checkpoint` or `wide export`.
        repo_id: `user/name`; made where it is not there.
        private: Whether a new repository is private; None means the account's default.
        token: Of the Hub; None means the one that is logged in.
        revision: Branch, made where it is not there; None means the main one.

    Returns:
        The commit's address; nothing on processes that do not write.

    Raises:
        NotAttachedError: As for `save`, for a model.
        AdapterError: If the folder is none of these, or the Hub refuses.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_or_folder
        if isinstance(folder, nn.Module):
            folder = save(folder, Path(temporary) / "adapter")
            if not is_first_process():
                return ""
        if not any((Path(folder) / name).is_file() for name in (CONFIG_FILE, "config.json")):
            raise AdapterError(f"{folder} holds neither {CONFIG_FILE} nor config.json; name a folder that wide wrote")
        return upload(Path(folder), repo_id, private=private, token=token, revision=revision, message=message)


def load(
    model_or_name: nn.Module | str | Path,
    path: str | Path | None = None,
    *,
    check_weights: bool = True,
    **load_options: Any,
) -> Any:
    """Attach a saved adapter to its base model and return the model.

    Args:
        model_or_name: The base model, without routers, or its name or folder for `from_pretrained`. Without `path` it
            is the adapter, and the base is loaded by the name that the adapter has recorded.
        path: Folder written by `save`, that of a run, or the name on the Hub, `user/name` or `user/name@revision`.
        check_weights: Whether the sample of base weights must agree; False admits a fine-tuned sister checkpoint.
        load_options: For `from_pretrained`, where a name is given; `token` and `cache_dir` are for the adapter, too.

    Raises:
        AdapterError: If a file is missing or malformed, the Hub does not give it, or the adapter was made for another
            base model.
        NotAttachedError: If the model carries routers already.
        ConfigError: If `model_or_name` is neither a model nor a name.
    """
    require(nn.Module | str | Path, model_or_name, "model_or_name", "a model, or its name or folder")
    require(str | Path | None, path, "path", "an adapter's folder or name (the base comes first)")
    if path is None and isinstance(model_or_name, nn.Module):
        raise AdapterError("name the adapter that this model gets: wide.load(model, adapter)")
    hub_options = {key: load_options[key] for key in ("token", "cache_dir") if key in load_options}
    folder = find_adapter(str(model_or_name if path is None else path), **hub_options)
    config = read_config(folder)
    if path is None:
        model_or_name = config["base"]["name_or_path"]
        if not model_or_name:
            raise AdapterError(f"{folder} does not name its base model; name it: wide.load(base, adapter)")
        if config["base"]["revision"] is not None and not Path(model_or_name).exists():
            load_options.setdefault("revision", config["base"]["revision"])
    plan = config["plan"]
    routers = _read_tensors(folder, ROUTER_FILE, wanted=plan.is_routed)
    static = _read_tensors(folder, STATIC_FILE, wanted=bool(plan.tensor_shapes()))
    weights = _read_tensors(folder, WEIGHTS_FILE, wanted=config["has_weights"])
    orders = _read_tensors(folder, ORDER_FILE, wanted=config["has_order"])
    has_lora = _has(folder / LORA_FOLDER, wanted=config["has_lora"])
    is_model = isinstance(model_or_name, nn.Module)
    # A load in another thread meanwhile would change what LoRA begins with.
    with LOADING:
        model: Any = model_or_name if is_model else load_pretrained(str(model_or_name), **load_options)
        _check_base(config["base"], model, check_weights)
        try:
            attach(model, plan, tensors=static, weights=weights, orders=orders)
        except (ShapeError, ConfigError) as error:
            raise AdapterError(f"{folder} is damaged: {error}; {_WAY_OUT}") from error
        try:
            restore_routers(model, routers)
            apply_config(model, config)
            if has_lora:
                load_lora(model, folder / LORA_FOLDER)
        except Exception as error:
            detach(model)
            if isinstance(error, AdapterError):
                raise AdapterError(f"{folder}: {error}; {_WAY_OUT}") from error
            raise
    return model


def read_config(folder: Path) -> AdapterFacts:
    """Read an adapter's configuration and check it and the files beside it, without loading a model.

    Raises AdapterError if it is missing, not JSON, not as `check_config` wants it, or a file is not the one that was
    written.
    """
    file = folder / CONFIG_FILE
    if not folder.exists():
        raise AdapterError(f"there is no folder {str(folder)!r}; check the path of the adapter, or of its run")
    if not file.is_file():
        raise AdapterError(f"{folder} is not an adapter: {CONFIG_FILE} is missing; name what wide.save wrote, or a run")
    try:
        found = read_json(file)
        config = check_config(found, f"{file}:")
        for name, wanted in config.get("files", {}).items():
            seen = _digest(found) if name == CONFIG_FILE else sha256_of(folder / name)
            if seen != wanted:
                raise AdapterError(
                    f"{folder / name} is damaged: its sha256 is {seen[:12]}…, wanted {wanted[:12]}… (if you changed it "
                    f"on purpose, remove 'files' from {CONFIG_FILE})"
                )
    except AdapterError as error:
        raise AdapterError(f"{error}; {_WAY_OUT}") from error
    return config


def check_config(config: object, where: str) -> AdapterFacts:
    """Return a configuration that is of this version's format.

    Raises AdapterError if it is of another version, a key is missing or unknown, or a value is none that it can have.
    """
    version = config.get("format_version") if isinstance(config, Mapping) else FORMAT_VERSION
    if isinstance(config, Mapping) and version != FORMAT_VERSION:
        raise AdapterError(
            f"{where} format version {version!r} is not {FORMAT_VERSION}; use the wide version "
            f"that wrote it ({config.get('wide_version')!r})"
        )
    facts: AdapterFacts = typed(AdapterFacts, config, where)
    routers = sum(isinstance(half, Routed) for *_, half in facts["plan"].halves())
    if len(facts["thresholds"]) != routers:
        raise AdapterError(f"{where} {len(facts['thresholds'])} thresholds for {routers} routers")
    points = [(sparsity, float(threshold)) for sparsity, threshold in facts["dial"]]
    if any(not (a < c and b < d) for (a, b), (c, d) in pairwise(points)):
        raise AdapterError(f"{where} dial does not ascend: {reprlib.repr(points)}")
    for key in _PROVENANCE & facts["provenance"].keys():
        typed(dict[str, Any], facts["provenance"][key], f"{where} provenance.{key}")
    return facts


def require_describable(model: nn.Module, *, ignore_base_changes: bool = False) -> None:
    """Raise NotAttachedError if an adapter on its base would not be this model, see `save`."""
    state = attachment(model)
    require_in_memory(model, "an adapter of a full checkpoint", added_only=True)
    require_final_scales(state)
    reason = ""
    if has_merged_lora(model):
        reason = "LoRA was merged into the base weights"
    elif state.originals_lost:
        reason = "this model came from a full checkpoint whose base weights were replaced"
    elif state.order_lost:
        reason = "this model came from a full checkpoint whose FFN channels lie in another order than those of its base"
    elif not ignore_base_changes and (
        # Of what a full checkpoint holds, it is only known what its base was. One layer that was trained is enough.
        differences(state.base, fingerprint(model, state.specs), agreement=1.0)
        if state.weights_seen is None
        else not same_weights(state.weights_seen, sampled_values(model))
    ):
        reason = "base weights changed since wide.attach (give ignore_base_changes=True if the base as it was is meant)"
    foreign = set(peft_adapters(model)) - ({OWN_LORA} if state.lora is not None else set())
    if foreign and not ignore_base_changes:
        raise NotAttachedError(
            f"PEFT's adapter {sorted(foreign)} would be left out; merge it (model.merge_and_unload()) and save a full "
            "checkpoint with wide.save_checkpoint, or let PEFT save it and give ignore_base_changes=True"
        )
    if reason:
        raise NotAttachedError(f"{reason}, so no adapter describes this model; use wide.save_checkpoint(model, path)")


def require_final_scales(state: Attachment) -> None:
    """Raise NotAttachedError if scales are not what is applied, and ShapeError if a loaded plan could not have them."""
    # A model that was moved to another dtype may have bases that are not orthonormal any more.
    check_tensors(state.plan, state.static_parameters())
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
        "dial": [[sparsity, _number_to_json(threshold)] for sparsity, threshold in state.thresholds_by_sparsity],
        "provenance": state.provenance,
        "has_lora": state.lora is not None and not state.lora.merged,
        "has_weights": state.replaced is not None or state.originals_lost,
        "has_order": state.regrouped is not None or state.order_lost,
    }


def apply_config(model: nn.Module, config: AdapterFacts) -> None:
    """Set thresholds, those in force and those calibrated, and provenance of an attached model from a configuration."""
    state = attachment(model)
    for router, threshold in zip(state.routers(), config["thresholds"], strict=True):
        router.threshold = float(threshold)
    state.thresholds_by_sparsity = [(sparsity, float(threshold)) for sparsity, threshold in config["dial"]]
    state.provenance = dict(config["provenance"])


def _write(model: nn.Module, folder: Path) -> None:
    state = attachment(model)
    config = config_of(model)
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
    # What could not be loaded again is not written.
    check_config(json.loads(json.dumps(config)), "this model:")
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in written}
    config["files"] = hashes | {CONFIG_FILE: _digest(config | {"files": hashes})}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    finish_folder(folder, config, f'import wide\n\nmodel = wide.load("{state.base["name_or_path"]}", "{PLACE}")')


def restore_routers(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of a `wide_router.safetensors` into an attached model; raises AdapterError if unfit."""
    copy_strictly(_router_parameters(model), tensors, "router")


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


def _check_base(expected: BaseFacts, model: nn.Module, check_weights: bool) -> None:
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


def _digest(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration without its own entry."""
    files = {name: value for name, value in config["files"].items() if name != CONFIG_FILE}
    return hashlib.sha256(json.dumps({**config, "files": files}, sort_keys=True).encode()).hexdigest()
