"""Full pruned checkpoints: a generated `Wide<Base>` class per family, registered with the Auto classes.

    wide.save_checkpoint(model, path)                  base weights (LoRA merged) and routers or scales, one folder
    wide.register_auto_classes()                       once per process
    AutoModelForCausalLM.from_pretrained(path)         the routed model; or wide.load_checkpoint(path)

A process that has not registered the classes refuses such a folder (unknown model type) instead of loading it dense.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wide.data.local_names import missing_folder
from wide.errors import AdapterError, NotAttachedError, ShapeError, UnsupportedModelError
from wide.models.adapter import apply_config, config_of, current_config, require_final_scales
from wide.models.attach import attach, attachment
from wide.models.gates import GATE_NAME, ROUTER_NAME
from wide.models.materialise.checkpoint import SLICED_PREFIX, sliced_classes
from wide.models.plan_check import check_tensors, placeholder_tensors
from wide.models.router import Router
from wide.models.static import StaticGate
from wide.models.stream import STREAM_NAME, StreamBasis
from wide.plan import Plan

PREFIX = "wide_"
FAMILIES = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "glm4",
    "cohere2",
    "exaone4",
    "seed_oss",
    "arcee",
    "apertus",
    "ernie4_5",
    "helium",
)
_registered: dict[str, tuple[type[Any], type[Any]]] = {}


class WideMixin:
    """What a generated class adds to its base: routers from `config.wide`, and strict loading of them."""

    _keep_in_fp32_modules_strict = {ROUTER_NAME, GATE_NAME, STREAM_NAME}  # noqa: RUF012  transformers reads a plain class attribute

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the base model, then attach the routers that the configuration describes."""
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if not isinstance(config.wide, dict):
            raise AdapterError(f"config.wide must hold the adapter's configuration, got {config.wide!r}")
        facts = current_config(config.wide, "config.wide")
        assert isinstance(self, nn.Module)
        plan = Plan.from_json(facts["plan"])
        attach(self, plan, tensors=placeholder_tensors(plan))
        apply_config(self, facts)
        attachment(self).base = dict(facts["base"])
        attachment(self).originals_lost = bool(facts["has_weights"])
        attachment(self).order_lost = bool(facts["has_order"])
        self.post_init()  # type: ignore[operator]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            module.reset_parameters()
        elif not isinstance(module, StaticGate | StreamBasis):
            # Scales and bases have no initial values but those of the checkpoint.
            super()._init_weights(module)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but refuse missing or surplus tensors.

        Raises:
            AdapterError: If a tensor is missing, surplus or misshapen, where transformers would only warn, or does not
                hold what the plan says.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            raise AdapterError(
                f"the checkpoint does not fit {cls.__name__}: { ({k: v[:3] for k, v in wrong.items() if v}) }"
            )
        state = attachment(model)
        try:
            check_tensors(state.plan, state.static_parameters())
        except ShapeError as error:
            raise AdapterError(f"the checkpoint does not fit {cls.__name__}: {error}") from error
        return (model, info) if output_loading_info else model


def register_auto_classes() -> None:
    """Register every supported family's pruned and sliced models with the Auto classes; idempotent.

    Their model types are `wide_<family>` and `wide_sliced_<family>`, for AutoConfig and AutoModelForCausalLM.
    """
    from transformers import CONFIG_MAPPING

    for family in FAMILIES:
        if family in CONFIG_MAPPING:
            auto_classes(family)
            sliced_classes(family)


def auto_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """Return the generated (configuration, model) classes of a family, registering them on first use.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of that type.
    """
    if model_type in _registered:
        return _registered[model_type]
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no model type {model_type!r}")
    base_config = CONFIG_MAPPING[model_type]
    if base_config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model for {model_type!r}")
    base_model = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    module = sys.modules[__name__]
    config_class = type(
        f"Wide{base_config.__name__}",
        (base_config,),
        {
            "__module__": __name__,
            "model_type": PREFIX + model_type,
            "wide": None,
            "__annotations__": {"wide": "dict | None"},
        },
    )
    setattr(module, config_class.__name__, config_class)
    model_class = type(
        f"Wide{base_model.__name__}",
        (WideMixin, base_model),
        {
            "__module__": __name__,
            "config_class": config_class,
            "config": None,
            "__annotations__": {"config": config_class},
        },
    )
    setattr(module, model_class.__name__, model_class)
    AutoConfig.register(PREFIX + model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    _registered[model_type] = (config_class, model_class)
    return _registered[model_type]


def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write base weights and routers as one Hugging Face checkpoint and return its folder.

    A static plan is kept as masks beside the whole weights; `wide.materialise` makes a model that is really smaller.

    Raises:
        NotAttachedError: If the model has no plan, LoRA is not merged yet, or scales are still being trained.
        UnsupportedModelError: If its family has no generated class.
    """
    state = attachment(model)
    require_final_scales(state)
    if state.lora is not None and not state.lora.merged:
        raise NotAttachedError("merge LoRA first: wide.merge_lora(model)")
    config: Any = model.config
    config_class, model_class = auto_classes(str(config.model_type).removeprefix(PREFIX))
    facts = config.to_dict() | {"wide": config_of(model)}
    for key in ("model_type", "architectures", "transformers_version"):
        facts.pop(key, None)
    before = model.__class__, config
    model.__class__, model.config = model_class, config_class(**facts)
    try:
        model.save_pretrained(path)  # type: ignore[operator]
    finally:
        model.__class__, model.config = before
    return Path(path)


def load_checkpoint(path: str | Path, **options: Any) -> Any:
    """Return the model of a checkpoint written by `save_checkpoint`, or by a sliced model, in evaluation mode.

    Args:
        path: The folder or hub name.
        options: For `from_pretrained`, e.g. `dtype=torch.float32`.

    Raises:
        AdapterError: If there is no such folder, it is not such a checkpoint, or its tensors do not fit.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    wrong = missing_folder(str(path))
    if wrong is not None:
        raise AdapterError(wrong)
    facts, _ = PreTrainedConfig.get_config_dict(str(path))
    model_type = str(facts.get("model_type", ""))
    if not model_type.startswith(PREFIX):
        raise AdapterError(f"{path} is a {model_type!r} checkpoint, not a pruned one; use wide.load(model, adapter)")
    if model_type.startswith(SLICED_PREFIX):
        sliced_classes(model_type.removeprefix(SLICED_PREFIX))
    else:
        auto_classes(model_type.removeprefix(PREFIX))
    options.setdefault("dtype", "auto")
    model = AutoModelForCausalLM.from_pretrained(str(path), **options)
    assert isinstance(model, torch.nn.Module)
    return model.eval()
