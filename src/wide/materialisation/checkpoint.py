"""Full pruned checkpoints: generated classes for every family, known to transformers' Auto classes.

    wide.save_checkpoint(model, path)                  `Wide<Base>`: base weights (LoRA merged) and routers or scales
    wide.materialise(model).save_pretrained(path)      `Sliced<Base>`: smaller matrices, built from the kept sizes
    wide.load_checkpoint(path)                         the same logits, without the base model; or
    wide.register_auto_classes()                       once per process, then
    AutoModelForCausalLM.from_pretrained(path)

A process that has not registered the classes refuses such a folder (unknown model type) instead of loading it dense.
"""

import functools
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from wide.data.local_names import missing_folder
from wide.errors import AdapterError, NotAttachedError, ShapeError, UnsupportedModelError
from wide.materialisation.cut import cut_empty
from wide.materialisation.shape import ModelShape
from wide.models.adapter import apply_config, check_config, config_of, require_final_scales
from wide.models.attach import attach, attachment
from wide.models.gates import GATE_NAME, ROUTER_NAME, StaticGate
from wide.models.plan_check import check_tensors, placeholder_tensors
from wide.models.pretrained import PRUNED_PREFIX
from wide.models.router import THRESHOLD_NAME, Router
from wide.models.stream import STREAM_NAME, StreamBasis
from wide.plan import Plan

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


class PrunedMixin:
    """What every generated model class adds to its base: tensors that do not fit are an error.

    A kind of checkpoint has a prefix before the family's model type, one before the names of the family's classes, and
    a further field of the configuration, a JSON object.
    """

    wide_type_prefix: ClassVar[str]
    wide_class_prefix: ClassVar[str]
    wide_field: ClassVar[str]

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
        try:
            model._check_loaded()
        except ShapeError as error:
            raise AdapterError(f"the checkpoint does not fit {cls.__name__}: {error}") from error
        return (model, info) if output_loading_info else model

    def _check_loaded(self) -> None:
        """Refuse values that do not fit together."""


class WideMixin(PrunedMixin):
    """The whole model with the routers, scales and bases that `config.wide` says."""

    wide_type_prefix, wide_class_prefix, wide_field = PRUNED_PREFIX, "Wide", "wide"
    wide_saves_plan = True
    _keys_to_ignore_on_save: set[str] | None
    _keep_in_fp32_modules_strict = {ROUTER_NAME, GATE_NAME, STREAM_NAME}  # noqa: RUF012  transformers reads a plain class attribute

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the base model, then attach the routers that the configuration describes."""
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if not isinstance(config.wide, dict):
            raise AdapterError(f"config.wide must hold the adapter's configuration, got {config.wide!r}")
        check_config(config.wide, "config.wide")
        assert isinstance(self, nn.Module)
        plan = Plan.from_json(config.wide["plan"])
        attach(self, plan, tensors=placeholder_tensors(plan))
        apply_config(self, config.wide)
        state = attachment(self)
        # The weights come afterwards, from the file.
        state.base, state.weights_seen = dict(config.wide["base"]), None
        state.originals_lost = bool(config.wide["has_weights"])
        state.order_lost = bool(config.wide["has_order"])
        self.post_init()  # type: ignore[operator]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            module.reset_parameters()
        elif not isinstance(module, StaticGate | StreamBasis):
            # Scales and bases have no initial values but those of the checkpoint.
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Save as transformers does, with the thresholds in force.

        Raises:
            NotAttachedError: If LoRA is not merged yet, or scales are still being trained.
        """
        assert isinstance(self, nn.Module)
        state, config = attachment(self), self.config
        require_final_scales(state)
        if state.lora is not None and not state.lora.merged:
            raise NotAttachedError("merge LoRA first: wide.merge_lora(model)")
        config.wide = config_of(self)  # type: ignore[union-attr]
        # Thresholds lie in the configuration.
        ignored, named = self._keys_to_ignore_on_save, self.named_modules()
        thresholds = {f"{name}.{THRESHOLD_NAME}" for name, module in named if isinstance(module, Router)}
        self._keys_to_ignore_on_save = {*(ignored or ()), *thresholds}
        try:
            super().save_pretrained(*args, **options)  # type: ignore[misc]
        finally:
            self._keys_to_ignore_on_save = ignored

    def _check_loaded(self) -> None:
        assert isinstance(self, nn.Module)
        state = attachment(self)
        check_tensors(state.plan, state.static_parameters())


class SlicedMixin(PrunedMixin):
    """Modules of the sizes that `config.wide_shape` says."""

    wide_type_prefix, wide_class_prefix, wide_field = f"{PRUNED_PREFIX}sliced_", "Sliced", "wide_shape"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the base model, then cut it."""
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if config.wide_shape is None:
            raise AdapterError(
                f"the configuration of a {type(self).__name__} needs wide_shape, the sizes that are left"
            )
        assert isinstance(self, nn.Module)
        cut_empty(self, ModelShape.from_json(config.wide_shape))
        self.post_init()  # type: ignore[operator]

    def _get_static_cache_init_shape(self) -> None:
        # The layers have different numbers of KV heads; each layer of a static cache is made at its first use.
        return None

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse paged caches, which transformers allots with one number of KV heads for all layers.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            "continuous batching needs the same number of KV heads in all layers, which a sliced model does not have; "
            "use generate(), or materialise with how='masked'"
        )


def register_auto_classes() -> None:
    """Register every supported family's pruned and sliced models with the Auto classes; idempotent.

    Their model types are `wide_<family>` and `wide_sliced_<family>`, for AutoConfig and AutoModelForCausalLM.
    """
    from transformers import CONFIG_MAPPING

    for family in FAMILIES:
        if family in CONFIG_MAPPING:
            generated_classes(family, WideMixin)
            generated_classes(family, SlicedMixin)


@functools.cache
def generated_classes(family: str, mixin: type[PrunedMixin]) -> tuple[type[Any], type[Any]]:
    """Return the (configuration, model) classes of a family for a kind of checkpoint, registering them at first.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of that type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if family not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no model type {family!r}")
    base_config = CONFIG_MAPPING[family]
    if base_config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model for {family!r}")
    base_model = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    config_class = type(
        mixin.wide_class_prefix + base_config.__name__,
        (base_config,),
        {
            "__module__": __name__,
            "model_type": mixin.wide_type_prefix + family,
            mixin.wide_field: None,
            "__annotations__": {mixin.wide_field: "dict | None"},
        },
    )
    model_class = type(
        mixin.wide_class_prefix + base_model.__name__,
        (mixin, base_model),
        {
            "__module__": __name__,
            "config_class": config_class,
            "config": None,
            "__annotations__": {"config": config_class},
        },
    )
    for generated in (config_class, model_class):
        setattr(sys.modules[__name__], generated.__name__, generated)
    AutoConfig.register(mixin.wide_type_prefix + family, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    return config_class, model_class


def family_of(model: nn.Module) -> str:
    """Return the model type of a model's family, also of a full checkpoint whose plan is attached."""
    config: Any = model.config
    return str(config.model_type).removeprefix(PRUNED_PREFIX)


def ordinary_classes(model: nn.Module) -> tuple[type[Any], type[Any]]:
    """Return the (configuration, model) classes that a model has without a plan."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = model.config
    if not str(config.model_type).startswith(PRUNED_PREFIX):
        return type(config), type(model)
    config_class = CONFIG_MAPPING[family_of(model)]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def become_ordinary(model: nn.Module) -> None:
    """Give a model of a generated class, whose plan was detached, the classes of its family, in place."""
    config: Any = model.config
    config_class, model_class = ordinary_classes(model)
    if type(config) is not config_class:
        del config.wide
        config.__class__ = config_class
        model.__class__ = model_class


def become_sliced(model: nn.Module, shape: ModelShape) -> None:
    """Give a model that was cut the generated class of its family, in place, so that it saves as what it is.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of its type.
    """
    config: Any = model.config
    # The parts of the model share this object, so it must stay the same one.
    config.__class__, model.__class__ = generated_classes(family_of(model), SlicedMixin)
    config.wide_shape = shape.to_json()


def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write base weights and routers as one Hugging Face checkpoint and return its folder.

    A static plan is kept as masks beside the whole weights; `wide.materialise` makes a model that is really smaller.

    Raises:
        NotAttachedError: If the model has no plan, LoRA is not merged yet, or scales are still being trained.
        UnsupportedModelError: If its family has no generated class.
    """
    attachment(model)
    config: Any = model.config
    config_class, model_class = generated_classes(family_of(model), WideMixin)
    facts = config.to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        facts.pop(key, None)
    before = model.__class__, config
    model.__class__, model.config = model_class, config_class(**facts)
    try:
        # By the class: an attached model's own name refuses.
        model_class.save_pretrained(model, path)
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
    # The masked kind's prefix begins the sliced one's.
    for mixin in (SlicedMixin, WideMixin):
        if model_type.startswith(mixin.wide_type_prefix):
            generated_classes(model_type.removeprefix(mixin.wide_type_prefix), mixin)
            break
    else:
        raise AdapterError(f"{path} is a {model_type!r} checkpoint, not a pruned one; use wide.load(model, adapter)")
    options.setdefault("dtype", "auto")
    model = AutoModelForCausalLM.from_pretrained(str(path), **options)
    assert isinstance(model, torch.nn.Module)
    return model.eval()
