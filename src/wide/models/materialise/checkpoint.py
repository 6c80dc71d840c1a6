"""Sliced models on disk: a generated `Sliced<Base>` class per family, which builds its modules from the kept sizes.

    wide.materialise(model).save_pretrained(path)
    wide.register_auto_classes()                       once per process
    AutoModelForCausalLM.from_pretrained(path)         the same logits, without the base model; or
    wide.load_checkpoint(path)                         without registering

A process that has not registered the classes refuses such a folder (unknown model type).
"""

import sys
from typing import Any

from torch import nn

from wide.errors import AdapterError, UnsupportedModelError
from wide.models.generated import StrictLoading, generate_classes
from wide.models.materialise.cut import cut_empty
from wide.models.materialise.shape import ModelShape

SLICED_PREFIX = "wide_sliced_"
_PRUNED_PREFIX = "wide_"
_registered: dict[str, tuple[type[Any], type[Any]]] = {}


class SlicedMixin(StrictLoading):
    """What a generated class adds to its base: modules of the sizes that `config.wide_shape` says."""

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


def sliced_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """Return the generated (configuration, model) classes of a family, registering them on first use.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of that type.
    """
    if model_type not in _registered:
        _registered[model_type] = generate_classes(
            model_type,
            prefix=SLICED_PREFIX,
            name="Sliced",
            mixin=SlicedMixin,
            field="wide_shape",
            home=sys.modules[__name__],
        )
    return _registered[model_type]


def family_of(model: nn.Module) -> str:
    """Return the model type of a model's family, also of a full checkpoint whose plan is attached."""
    config: Any = model.config
    return str(config.model_type).removeprefix(_PRUNED_PREFIX)


def become_ordinary(model: nn.Module) -> None:
    """Give a model of a generated class, whose plan was detached, the classes of its family, in place."""
    config: Any = model.config
    config_class, model_class = ordinary_classes(model)
    if type(config) is not config_class:
        del config.wide
        config.__class__ = config_class
        model.__class__ = model_class


def ordinary_classes(model: nn.Module) -> tuple[type[Any], type[Any]]:
    """Return the (configuration, model) classes that a model has without a plan."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = model.config
    if not str(config.model_type).startswith(_PRUNED_PREFIX):
        return type(config), type(model)
    config_class = CONFIG_MAPPING[family_of(model)]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def become_sliced(model: nn.Module, shape: ModelShape) -> None:
    """Give a model that was cut the generated class of its family, in place, so that it saves as what it is.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of its type.
    """
    config: Any = model.config
    config_class, model_class = sliced_classes(family_of(model))
    # The parts of the model share this object, so it must stay the same one.
    config.__class__ = config_class
    config.wide_shape = shape.to_json()
    model.__class__ = model_class
