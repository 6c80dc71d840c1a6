"""Generated classes: a family's model and configuration with a mixin and one more field, known to the Auto classes.

A process that has not registered them refuses such a checkpoint (unknown model type) instead of loading it as the base.
"""

from types import ModuleType
from typing import Any

from wide.errors import AdapterError, UnsupportedModelError


class StrictLoading:
    """What every generated model class shares: tensors that do not fit are an error."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but refuse missing or surplus tensors.

        Raises:
            AdapterError: If a tensor is missing, surplus or misshapen; transformers would only warn.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            raise AdapterError(
                f"the checkpoint does not fit {cls.__name__}: { ({k: v[:3] for k, v in wrong.items() if v}) }"
            )
        return (model, info) if output_loading_info else model


def generate_classes(
    model_type: str, *, prefix: str, name: str, mixin: type[Any], field: str, home: ModuleType
) -> tuple[type[Any], type[Any]]:
    """Make the (configuration, model) classes of a family and register them with the Auto classes.

    Args:
        model_type: Of the family, as transformers names it.
        prefix: Before the family's model type.
        name: Before the names of the family's classes.
        mixin: Comes before the family's model class.
        field: Name of the configuration's further field, a JSON object or None.
        home: The module that the classes say they are from, and lie in.

    Raises:
        UnsupportedModelError: If transformers has no causal LM of that type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no model type {model_type!r}")
    base_config = CONFIG_MAPPING[model_type]
    if base_config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model for {model_type!r}")
    base_model = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    config_class = type(
        name + base_config.__name__,
        (base_config,),
        {
            "__module__": home.__name__,
            "model_type": prefix + model_type,
            field: None,
            "__annotations__": {field: "dict | None"},
        },
    )
    model_class = type(
        name + base_model.__name__,
        (mixin, base_model),
        {
            "__module__": home.__name__,
            "config_class": config_class,
            "config": None,
            "__annotations__": {"config": config_class},
        },
    )
    for generated in (config_class, model_class):
        setattr(home, generated.__name__, generated)
    AutoConfig.register(prefix + model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    return config_class, model_class
