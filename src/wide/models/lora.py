"""LoRA for stage 2: the one module that imports PEFT."""

import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

from wide.config import RecoverConfig
from wide.errors import AdapterError, ConfigError, MissingExtraError, NotAttachedError, UnsupportedModelError
from wide.models.attach import attachment, is_attached
from wide.models.having import having
from wide.models.plan_check import misfit
from wide.models.pretrained import peft_adapters, require_in_memory
from wide.models.sharding import reshard
from wide.plan import Skipped
from wide.schema import Between, Positive, read_json, typed

OWN_LORA = "wide"
"""What PEFT calls the LoRA of stage 2; under its default name it would be overwritten by an adapter of the user."""
_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Keys of PEFT's configuration that do not change what the matrices compute, or that the model's structure decides.
_DESCRIPTIVE = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "inference_mode"),
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
}


class _LoraFacts(TypedDict):
    r: Positive
    lora_alpha: Annotated[float, Between(1e-6, 1e6)]
    lora_dropout: Annotated[float, Between(0, 1)]


class LoraHandle:
    """LoRA on one attached model, put on by `add_lora`: its parameters, its files, merging and removal.

    `trainable` are parameters that were trainable before; they are again without LoRA.
    """

    def __init__(self, model: nn.Module, tuner: Any, trainable: Sequence[nn.Parameter] = ()) -> None:
        self._model = model
        self._tuner = tuner
        self._trainable = trainable
        self.merged, self.above_merged = False, has_merged_lora(model)

    @property
    def config(self) -> dict[str, Any]:
        """PEFT's configuration, JSON-ready."""
        return json.loads(json.dumps(self._tuner.peft_config[OWN_LORA].to_dict(), default=_listed))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the LoRA matrices under the names PEFT's files use."""
        return {
            _PREFIX + name.replace(f".{OWN_LORA}.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if ".lora_" in name
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return the LoRA matrices, float32."""
        return list(self.named_parameters().values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the LoRA matrices on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.named_parameters().items()}

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, which any PEFT can read."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), str(folder / _WEIGHTS), metadata={"format": "pt"})
        (folder / _CONFIG).write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")

    def merge(self) -> None:
        """Add the updates to the base weights, for good; raises NotAttachedError if PEFT has other adapters there."""
        if foreign := sorted(set(peft_adapters(self._model)) - {OWN_LORA}):
            raise NotAttachedError(f"PEFT has {foreign} beside this LoRA; take it off first (model.delete_adapter)")
        # Where the base is sharded, each process adds its share of an update that all of them have whole.
        reshard(self._model)
        with implicit_replication():
            self._tuner.merge_and_unload()
        self._forget()
        self.merged = True

    def unload(self) -> None:
        """Remove the wrappers without adding the updates: the base weights are as they were.

        Raises NotAttachedError if the updates were merged already and cannot be taken out again.
        """
        if self.merged:
            raise NotAttachedError("LoRA was merged into the base weights; load the base model again to get rid of it")
        self._tuner.unload()
        self._forget()

    def _forget(self) -> None:
        # A later attach or save must not mistake PEFT's leftovers on the model for a live adapter.
        for name in ("peft_config", "active_adapter"):
            if name in self._model.__dict__:
                delattr(self._model, name)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for parameter in self._trainable:
            parameter.requires_grad_(True)


def add_lora(model: nn.Module, *, rank: int = 16, alpha: float = 32.0, dropout: float = 0.1) -> LoraHandle:
    """Put LoRA on all linear layers of an attached model's decoder, in place.

    Routers and sublayers that the plan skips are left alone.

    Raises:
        NotAttachedError: If the model has no routers, or has LoRA already.
        UnsupportedModelError: If PEFT cannot wrap the model, such as Mixtral's experts, or it is offloaded.
        MissingExtraError: If PEFT is not installed.

    Source: paper, section 3.2; targets and hyperparameters: section 4.1.
    """
    return _inject(model, _configuration(model, rank=rank, alpha=alpha, dropout=dropout))


def load_lora(model: nn.Module, folder: Path) -> LoraHandle:
    """Put LoRA on an attached model from the files of `LoraHandle.save`.

    Raises AdapterError if a file is missing or does not fit (the caller detaches then), and otherwise as `add_lora`.
    """
    for name in (_WEIGHTS, _CONFIG):
        if not (folder / name).is_file():
            raise AdapterError(f"{folder / name} is missing: the LoRA part of this adapter is incomplete")
    found, where = read_json(folder / _CONFIG), f"{folder / _CONFIG}:"
    found = typed(dict[str, Any], found, where)
    facts: _LoraFacts = typed(
        _LoraFacts, {key: found[key] for key in _LoraFacts.__annotations__ if key in found}, where
    )
    config = _configuration(model, rank=facts["r"], alpha=facts["lora_alpha"], dropout=facts["lora_dropout"])
    try:
        weights = load_file(str(folder / _WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{folder / _WEIGHTS} cannot be read ({error}); the file is damaged") from error
    # Before memory is allotted for it.
    ranks = {tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name and tensor.dim()}
    if min(ranks, default=0) != facts["r"]:
        raise AdapterError(f"{where} r is {facts['r']}, wanted that of the matrices beside it, {sorted(ranks)}")
    handle = _inject(model, config)
    own = handle.config  # PEFT adds to it what experts need.
    for key in sorted(own.keys() & found.keys() - _DESCRIPTIVE):
        # Off is None, false or empty, as PEFT's versions have it.
        if found[key] != own[key] and (found[key] or own[key]):
            raise AdapterError(f"{where} {key} is {reprlib.repr(found[key])}, wanted {own[key]!r}, as wide writes it")
    handle.above_merged = False  # What the adapter tells of LoRA is of this one.
    copy_strictly(handle.named_parameters(), weights, "LoRA")
    return handle


def require_same_lora(lora: LoraHandle, stage: RecoverConfig) -> None:
    """Refuse to train LoRA that is there already under another rank, alpha or dropout (ConfigError)."""
    had = lora.config | {"lora_rank": lora.config["r"]}
    names = ("lora_rank", "lora_alpha", "lora_dropout")
    if words := ", ".join(f"{n} {getattr(stage, n)} instead of {had[n]}" for n in names if getattr(stage, n) != had[n]):
        kept = ", ".join(f"{name} {had[name]}" for name in names)
        raise ConfigError(
            f"this model has LoRA already, and {words} was asked for; ask for what it has ({kept}), or begin with the "
            "adapter of stage 1"
        )


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge an attached model's LoRA into its base weights and return the same model; without LoRA, do nothing."""
    state = attachment(model)
    if state.lora is not None and not state.lora.merged:
        state.lora.merge()
    return model


def has_merged_lora(model: nn.Module) -> bool:
    """Return whether LoRA was added to the weights for good, so that the base model is not at hand."""
    if not is_attached(model):
        return False
    state = attachment(model)
    return "recover" in state.provenance if state.lora is None else state.lora.merged or state.lora.above_merged


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Run the forwards inside the block without the LoRA updates, if there are any (they must not be merged)."""
    with ExitStack() as stack:
        for module in model.modules():
            # PEFT's own switch also turns requires_grad off and on again, which would undo frozen parts.
            if "_disable_adapters" in vars(module):
                stack.enter_context(having(module, _disable_adapters=True))
        yield


def copy_strictly(parameters: dict[str, nn.Parameter], state: dict[str, Tensor], what: str) -> None:
    """Copy tensors into parameters of the same names and shapes.

    Raises AdapterError, and copies nothing, if a name is missing or surplus, a shape differs, or a value is not finite.
    """
    wrong = misfit({name: parameter.shape for name, parameter in parameters.items()}, state)
    if wrong is not None:
        raise AdapterError(f"{what} tensors do not fit the model: {wrong}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _configuration(model: nn.Module, *, rank: int, alpha: float, dropout: float) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtraError("LoRA needs PEFT; install it with: pip install 'wide[lora]'") from error
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        exclude_modules=_untouched(model),
        task_type="CAUSAL_LM",
    )


def _inject(model: nn.Module, config: Any) -> LoraHandle:
    from peft.tuners.lora import LoraLayer, LoraModel

    state = attachment(model)
    if state.lora is not None:
        has = "has LoRA merged into its weights" if state.lora.merged else "already has LoRA"
        raise NotAttachedError(f"this model {has}; begin with its adapter, or with a full checkpoint of it")
    if peft_adapters(model):
        raise NotAttachedError(f"PEFT has the adapter {peft_adapters(model)} on this model; merge it first")
    require_in_memory(model, "LoRA")
    # PEFT freezes whatever is not its own; the routers' setting is restored at once, all others without LoRA.
    routers = [p for router in state.routers() for p in router.parameters() if p.requires_grad]
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        tuner = LoraModel(model, config, OWN_LORA)
    except ValueError as error:
        raise UnsupportedModelError(
            f"PEFT puts no LoRA on {type(model).__name__}: {error}; load the model again, and leave stage 2 out or, "
            "for experts, set lora_dropout to 0"
        ) from error
    for parameter in routers:
        parameter.requires_grad_(True)
    handle = LoraHandle(model, tuner, trainable)
    for parameter in handle.parameters():
        parameter.data = parameter.data.float()
    for module in tuner.modules():
        if isinstance(module, LoraLayer):
            module.train(module.get_base_layer().training)
    state.lora = handle
    return handle


def _untouched(model: nn.Module) -> str | None:
    """Return what the names of modules without LoRA look like, as a regular expression; None if all get LoRA."""
    state = attachment(model)
    skipped = {
        part.module
        for spec, layer in zip(state.specs, state.plan.layers, strict=True)
        for name, part in spec.sublayers()
        if isinstance(getattr(layer, name), Skipped)
    }
    names = [re.escape(name) + r"\..*" for name, module in model.named_modules() if module in skipped]
    if state.plan.is_routed:
        names.append(r".*wide_router.*")
    return "|".join(names) or None


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)
