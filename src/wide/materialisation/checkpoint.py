"""Full pruned checkpoints: generated classes for every family, known to transformers' Auto classes after `import wide`.

`Wide<Base>` has base weights (LoRA merged) and routers or scales; `Sliced<Base>` smaller matrices, built from the kept
sizes. A process that has not imported wide refuses such a folder (unknown model type) instead of loading it dense.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig

from wide.data.local_names import missing_folder
from wide.errors import (
    AdapterError,
    ConfigError,
    NotAttachedError,
    ShapeError,
    UnsupportedModelError,
    WideError,
    is_out_of_memory,
)
from wide.materialisation.cut import cut_empty
from wide.materialisation.shape import ModelShape
from wide.models.adapter import apply_config, check_config, config_of, require_final_scales
from wide.models.attach import attach, attachment
from wide.models.card import PLACE, finish_folder
from wide.models.files import check_sums, write_sums
from wide.models.gates import GATE_NAME, ROUTER_NAME, StaticGate
from wide.models.having import having
from wide.models.lora import OWN_LORA
from wide.models.plan_check import check_tensors, placeholder_tensors
from wide.models.pretrained import (
    LOADING,
    PRUNED_PREFIX,
    REPORTING,
    forbid_packing,
    misloaded,
    peft_adapters,
    require_in_memory,
    stored_facts,
)
from wide.models.router import THRESHOLD_NAME, Router
from wide.models.sharding import is_first_process, is_sharded, reshard, whole
from wide.models.stream import STREAM_NAME, StreamBasis
from wide.schema import require, typed

HOW_TO_LOAD = f"""import wide  # makes the model known to transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{PLACE}")"""


class PrunedMixin(nn.Module):
    """What every generated model class adds to its base: tensors that do not fit are an error.

    A kind of checkpoint has a prefix before the family's model type, one before the names of the family's classes, and
    a further field of the configuration, a JSON object.
    """

    wide_type_prefix: ClassVar[str]
    wide_class_prefix: ClassVar[str]
    wide_field: ClassVar[str]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, which would only warn of tensors that do not fit.

        Raises AdapterError if a tensor is missing, surplus or misshapen, or does not hold what the plan says.
        """
        with LOADING:
            model, info = super().from_pretrained(*args, **kwargs | REPORTING)  # type: ignore[misc]
        wrong = misloaded(info)
        if wrong is not None:
            raise AdapterError(f"the checkpoint does not fit {cls.__name__}: {wrong}")
        forbid_packing(model)
        try:
            model._check_loaded()
        except ShapeError as error:
            raise AdapterError(f"the checkpoint does not fit {cls.__name__}: {error}") from error
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | PathLike[str], **options: Any) -> None:
        """Save as transformers does, with what says whether the files are whole.

        Raises AdapterError if there is a file of that name, or what the model was made from, and ConfigError if a
        sharded model is to be pushed at once.
        """
        save, upload = super().save_pretrained, super()._upload_modified_files  # type: ignore[misc]
        folder = Path(save_directory)
        if folder.is_file():
            raise AdapterError(f"{folder} is a file; name a folder for the checkpoint")
        config = cast(Any, self.config)
        is_origin = (
            config._name_or_path and folder.exists() and folder.resolve() == Path(config._name_or_path).resolve()
        )
        # A checkpoint of its own kind may be replaced, as with transformers.
        if is_origin and stored_facts(str(folder)).get("model_type") != config.model_type:
            raise AdapterError(f"{folder} holds the weights that this model was loaded from; name another folder")

        def finish_and_upload(place: str, name: str, *args: Any, **more: Any) -> Any:
            self._finish(Path(place), name)
            return upload(place, name, *args, **more)

        if is_sharded(self):
            if options.get("push_to_hub"):
                raise ConfigError(
                    "a sharded model cannot be pushed while it is saved; leave push_to_hub out, and let "
                    "the first process call wide.push_to_hub(folder, name) afterwards"
                )
            _save_file_by_file(self, save, folder, **options)
        else:
            with having(self, _upload_modified_files=finish_and_upload):
                save(save_directory, **options)
        if options.get("is_main_process", True) and is_first_process():
            self._finish(folder)

    def _finish(self, folder: Path, _name: str = PLACE) -> None:
        """Write what lies beside the weights of a folder, which the Hub knows by that name."""
        write_sums(folder)

    def _check_loaded(self) -> None:
        """Refuse values that do not fit together."""


class WideMixin(PrunedMixin):
    """The whole model with the routers, scales and bases that `config.wide` says."""

    wide_type_prefix, wide_class_prefix, wide_field = PRUNED_PREFIX, "Wide", "wide"
    wide_saves_plan = True
    _keys_to_ignore_on_save: set[str] | None
    _keep_in_fp32_modules_strict = {ROUTER_NAME, GATE_NAME, STREAM_NAME}  # noqa: RUF012  transformers reads a plain class attribute

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        facts = check_config(config.wide, "config.json: wide")
        attach(self, facts["plan"], tensors=placeholder_tensors(facts["plan"]))
        apply_config(self, facts)
        state = attachment(self)
        # The weights come afterwards, from the file.
        state.base, state.weights_seen = facts["base"], None
        state.originals_lost, state.order_lost = facts["has_weights"], facts["has_order"]
        self.post_init()  # type: ignore[operator]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            module.reset_parameters()
        elif not isinstance(module, StaticGate | StreamBasis):
            # Scales and bases have no initial values but those of the checkpoint.
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | PathLike[str], **options: Any) -> None:
        """Save as transformers does, with the thresholds in force and a card.

        Raises NotAttachedError if LoRA is not merged yet, or scales are still being trained.
        """
        state, config = attachment(self), self.config
        require_final_scales(state)
        _require_merged(self)
        require_in_memory(self, "a full checkpoint")
        config.wide = config_of(self)  # type: ignore[union-attr]
        # Thresholds lie in the configuration.
        ignored, named = self._keys_to_ignore_on_save, self.named_modules()
        thresholds = {f"{name}.{THRESHOLD_NAME}" for name, module in named if isinstance(module, Router)}
        with having(self, _keys_to_ignore_on_save={*(ignored or ()), *thresholds}):
            super().save_pretrained(save_directory, **options)

    def wide_detached(self) -> None:
        """Take the classes of the family, so that the model saves as what it is without a plan."""
        config_class, model_class = ordinary_classes(self)
        take_own_config(self)
        config: Any = self.config
        del config.wide
        config.__class__, self.__class__ = config_class, model_class
        # A loaded configuration has a copy of its class's.
        config.model_type = config_class.model_type

    def _finish(self, folder: Path, name: str = PLACE) -> None:
        super()._finish(folder)
        finish_folder(folder, self.config.wide, HOW_TO_LOAD.replace(PLACE, name))  # type: ignore[union-attr, arg-type]

    def _check_loaded(self) -> None:
        state = attachment(self)
        check_tensors(state.plan, state.static_parameters())


class SlicedMixin(PrunedMixin):
    """Modules of the sizes that `config.wide_shape` says."""

    wide_type_prefix, wide_class_prefix, wide_field = f"{PRUNED_PREFIX}sliced_", "Sliced", "wide_shape"
    wide_is_sliced = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if config.wide_shape is None:
            raise AdapterError(
                f"the configuration of a {type(self).__name__} needs wide_shape, the sizes that are left"
            )
        self.wide_is_sliced = False
        cut_empty(self, typed(ModelShape, config.wide_shape, "wide_shape"))
        del self.wide_is_sliced
        self.post_init()  # type: ignore[operator]

    def _get_static_cache_init_shape(self) -> None:
        # The layers have different numbers of KV heads; each layer of a static cache is made at its first use.
        return None

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise UnsupportedModelError: paged caches are allotted with one number of KV heads for all layers."""
        raise UnsupportedModelError(
            "continuous batching needs the same number of KV heads in all layers, which a sliced model does not have; "
            "use generate(), or materialise with how='masked'"
        )


def register(model_type: str) -> bool:
    """Make the classes of a model type, `wide_<family>` or `wide_sliced_<family>`, known to transformers' Auto classes.

    Return whether it is such a type, of a family that transformers knows; of any other nothing is registered.
    Idempotent.
    """
    from transformers import CONFIG_MAPPING

    # The masked kind's prefix begins the sliced one's.
    for mixin in (SlicedMixin, WideMixin):
        family = model_type.removeprefix(mixin.wide_type_prefix)
        if family != model_type and family in CONFIG_MAPPING:
            generated_classes(family, mixin)
            return True
    return False


@functools.cache
def generated_classes(family: str, mixin: type[PrunedMixin]) -> tuple[type[Any], type[Any]]:
    """Return the (configuration, model) classes of a family for a kind of checkpoint, registering them at first.

    Raises UnsupportedModelError if transformers has no causal LM of that type.
    """
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers import conversion_mapping as files

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
            # A process that unpickles it may not have made the class yet.
            "__reduce_ex__": lambda self, _protocol: (_empty_config, (type(self).model_type,), vars(self)),
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
    # transformers' server looks for the name in `transformers`, which runs twice when it is imported and then is two
    # modules, of one class of its own.
    setattr(type(transformers), model_class.__name__, model_class)
    # Of experts, for example, files hold other matrices than the modules, by the type or the class of the model.
    for ordinary, name in ((family, mixin.wide_type_prefix + family), (base_model.__name__, model_class.__name__)):
        if (conversion := files.get_checkpoint_conversion_mapping(ordinary)) is not None:
            files.register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    AutoConfig.register(mixin.wide_type_prefix + family, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    return config_class, model_class


def _empty_config(model_type: str) -> Any:
    """Return a configuration without values, for a pickle that has them."""
    from transformers import CONFIG_MAPPING

    register(model_type)
    kind = CONFIG_MAPPING[model_type]
    return kind.__new__(kind)


def family_of(model: Any) -> str:
    """Return the model type of a model's family, also of a full checkpoint whose plan is attached."""
    return str(model.config.model_type).removeprefix(PRUNED_PREFIX)


def ordinary_classes(model: nn.Module) -> tuple[type[Any], type[Any]]:
    """Return the (configuration, model) classes that a model has without a plan."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = model.config
    if not str(config.model_type).startswith(PRUNED_PREFIX):
        return type(config), type(model)
    config_class = CONFIG_MAPPING[family_of(model)]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def take_own_config(model: nn.Module) -> None:
    """Copy the configuration, for all parts of the model alike: other models may have been built from the same."""
    copied: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(vars(module).get("config"), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copied)


def become_sliced(model: nn.Module, shape: ModelShape) -> None:
    """Give a model that was cut the generated class of its family, in place, so that it saves as what it is.

    Raises UnsupportedModelError if transformers has no causal LM of its type.
    """
    config: Any = model.config
    # The parts of the model share this object, so it must stay the same one.
    config.__class__, model.__class__ = generated_classes(family_of(model), SlicedMixin)
    config.wide_shape = json.loads(json.dumps(asdict(shape)))


def _save_file_by_file(
    model: nn.Module, save: Callable[..., None], folder: Path, max_shard_size: int | str = "5GB", **options: Any
) -> None:
    """Write what `save` writes of a sharded model, gathering the tensors of one file at a time."""
    reshard(model)
    unique = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    places: dict[str, str] = {}
    # What transformers saves by its own means it gathers whole on the first process.
    with having(model.config, distributed_config=None):
        for file, names in split.filename_to_tensors.items():
            tensors = {name: whole(state[name]).cpu() for name in names}
            if is_first_process():
                part = folder / ".part"
                save(part, state_dict=tensors, max_shard_size="100TB", **options)
                with safe_open(part / "model.safetensors", framework="pt") as written:
                    places |= dict.fromkeys(written.keys(), file)
                (part / "model.safetensors").rename(folder / file)
                for other in part.iterdir():
                    other.replace(folder / other.name)
                part.rmdir()
    if is_first_process() and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dist.barrier()


def save_checkpoint(model: nn.Module, path: str | Path, **options: Any) -> Path:
    """Write base weights and routers as one Hugging Face checkpoint and return its folder.

    A static plan is kept as masks, with whole weights; `wide.materialise` makes a model that is really smaller.
    An attached model's own `save_pretrained` does the same, and so do checkpoints of transformers' Trainer. If several
    processes shard the model, all of them must call this; the first writes, and holds one file's tensors at a time.

    Args:
        model: An attached model; LoRA must be merged.
        options: For transformers' `save_pretrained`, e.g. `max_shard_size="5GB"`.

    Raises:
        NotAttachedError: If the model has no plan, LoRA is not merged yet, or scales are still being trained.
        UnsupportedModelError: If its family has no generated class.
    """
    attachment(model)
    # PEFT's wrapper would save its own part alone.
    _require_merged(model)
    cast(Any, model).save_pretrained(path, **options)
    return Path(path)


def _require_merged(model: nn.Module) -> None:
    own = {OWN_LORA} if attachment(model).lora is not None else set()
    if foreign := sorted(set(peft_adapters(model)) - own):
        raise NotAttachedError(f"merge PEFT's adapters first, {foreign}: model.merge_and_unload()")
    if peft_adapters(model):
        raise NotAttachedError("merge LoRA first: wide.merge_lora(model)")


def load_checkpoint(path: str | Path, **options: Any) -> Any:
    """Return the model of a checkpoint written by `save_checkpoint`, or by a sliced model, in evaluation mode.

    Args:
        options: For `from_pretrained`, e.g. `dtype=torch.float32`.

    Raises:
        AdapterError: If there is no such folder, it is not such a checkpoint, its tensors do not fit, or its weights,
            up to 8 GiB of them, are not those that were written.
    """
    from transformers import AutoModelForCausalLM

    require(str | PathLike, path, "path", "a checkpoint's folder or name")
    wrong = missing_folder(str(path))
    if wrong is not None:
        raise AdapterError(wrong)
    try:
        facts, _ = PreTrainedConfig.get_config_dict(str(path))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} is no checkpoint: {error}") from error
    model_type = str(facts.get("model_type", ""))
    with LOADING:
        is_pruned = register(model_type)
    if not is_pruned:
        raise AdapterError(f"{path} is a {model_type!r} checkpoint, not a pruned one; use wide.load(model, adapter)")
    check_sums(Path(path))
    options.setdefault("dtype", "auto")
    try:
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(str(path), **options)
    # What is damaged raises whatever transformers stumbles over.
    except Exception as error:
        if isinstance(error, WideError) or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AdapterError(f"{path} cannot be loaded: {reason}; copy it again, or export it anew") from error
    return model.eval()
