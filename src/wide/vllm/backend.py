"""What vLLM's Transformers backend serves: other families, masked and no faster than dense, and static checkpoints."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import TransformersForCausalLM

from wide.errors import UnsupportedModelError
from wide.materialisation.checkpoint import SlicedMixin
from wide.materialisation.cut import cut_empty
from wide.models.discovery import discover
from wide.models.gates import GATHER_NAME, input_of
from wide.models.pretrained import PRUNED_PREFIX
from wide.plan import Routed
from wide.vllm.int8 import quantise_linears
from wide.vllm.limits import heads_left, padded_channels, read_pruning, read_shape, read_weights
from wide.vllm.sublayers import Router, cleared
from wide.vllm.tally import Reporting, Tally

_LOGGER = logging.getLogger("vllm.wide")


class WideTransformersForCausalLM(Reporting, TransformersForCausalLM):
    """A model of transformers whose FFN activations and attention heads are masked before they are projected back."""

    supports_lora = False
    supports_pp = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        pruning, family = read_pruning(config), config.model_type.removeprefix(PRUNED_PREFIX)
        # The backend builds what the configuration's class says.
        config.__class__ = CONFIG_MAPPING[family]
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _LOGGER.warning("wide serves %s masked: answers are right, and no faster than dense", family)
        with torch.device("meta"):
            dense = AutoModelForCausalLM.from_config(config)
        names = {module: name.removeprefix(f"{dense.base_model_prefix}.") for name, module in dense.named_modules()}
        for block, plan in zip(discover(dense), pruning.plan.layers, strict=True):
            for half, spec in block.sublayers():
                routed, threshold = getattr(plan, half), pruning.thresholds.get((block.index, half))
                if isinstance(routed, Routed) and threshold is not None:
                    router = Router(block.hidden_size, routed, threshold)
                    found, last = (self.model.get_submodule(names[part]) for part in (spec.module, spec.linears()[-1]))
                    found.wide_router = router
                    if router.decides:
                        _mask(found, last, router)
        quantise_linears(self, pruning.weights)
        self.tally, self.most_rows = Tally(self), vllm_config.scheduler_config.max_num_batched_tokens


def _mask(sublayer: nn.Module, last: nn.Module, router: Router) -> None:
    """Clear skipped groups of what reaches a sublayer's last projection, [1, M, C], as its input decides."""
    masks: list[Tensor] = []

    def decide(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        masks.append(router(input_of(args, options).flatten(0, -2)))

    def clear(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, *others = args
        return (cleared(values.flatten(0, -2), masks.pop()).view(values.shape), *others)

    sublayer.register_forward_pre_hook(decide, with_kwargs=True)
    last.register_forward_pre_hook(clear)


class SlicedTransformersForCausalLM(Reporting, TransformersForCausalLM):
    """A static checkpoint of `wide export`, each of whose layers has its own numbers of heads and channels."""

    supports_lora = False
    supports_pp = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config, ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        shape = read_shape(config)
        channels = [(layer.channels, padded_channels(layer, ranks)) for layer in shape.layers]
        layers = tuple(replace(layer, channels=wide) for layer, (_, wide) in zip(shape.layers, channels, strict=True))
        # Before the model is a module.
        self.__dict__.update(shape=replace(shape, layers=layers), channels=channels, padded={})
        config.__class__ = CONFIG_MAPPING[config.model_type.removeprefix(SlicedMixin.wide_type_prefix)]
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        quantise_linears(self, read_weights(config))
        self.tally, self.most_rows = Tally(self), vllm_config.scheduler_config.max_num_batched_tokens

    def _create_hf_to_vllm_mapper(self) -> None:
        # The first thing that the backend does with its model, whose layers are still those of transformers.
        names = {module: name for name, module in self.model.named_modules()}
        for block, sizes in zip(discover(self.model), self.channels, strict=True):
            for half, spec in block.sublayers():
                if half == "ffn" and sizes[0] != sizes[1]:
                    *first, last = (names[linear] for linear in spec.linears())
                    self.padded |= {f"{name}.{part}": (0, *sizes) for name in first for part in ("weight", "bias")}
                    self.padded[f"{last}.weight"] = (1, *sizes)
        with torch.device("meta"):
            cut_empty(self.model, self.shape)
        if any(name.endswith(GATHER_NAME) for name, _ in self.model.named_modules()):
            raise UnsupportedModelError(
                "query heads that share KV heads unevenly are not served by vLLM; use `wide generate`, or prune whole "
                "KV groups"
            )
        super()._create_hf_to_vllm_mapper()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load them, with channels of zeros where ranks would have different numbers of channels."""
        prefix = f"{self.model.base_model_prefix}."
        sizes = ((name, tensor, self.padded.get(name.removeprefix(prefix))) for name, tensor in weights)
        return super().load_weights(  # type: ignore[no-any-return]
            (name, tensor if found is None else with_zeros(tensor, *found)) for name, tensor, found in sizes
        )

    def _create_attention_instances(self, _prefix: str = "") -> None:
        # From vLLM 0.32 on, modules have their attentions; before, the method below is called.
        for index, attention in self.create_attention_instances().items():
            name, fuser = self.attention_fusers[index]
            module = self.get_submodule(name)
            attention.impl.scale = fuser.scale(module) or attention.impl.scale
            module.attn = attention

    def create_attention_instances(self) -> dict[int, Any]:
        """Return vLLM's attentions by layer, with the numbers of heads that are left; none where none is."""
        config, ranks, found = self.text_config, self.tp_group.world_size, {}
        kinds = getattr(config, "layer_types", None)
        for index, (heads, kv_heads) in heads_left(config, self.shape).items():
            is_sliding = kinds is not None and kinds[index] == "sliding_attention"
            size = self.model_config.get_head_size()
            found[index] = Attention(
                num_heads=heads // ranks,
                head_size=size,
                scale=size**-0.5,
                num_kv_heads=kv_heads // ranks,
                cache_config=self.cache_config,
                logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
                per_layer_sliding_window=config.sliding_window if is_sliding else None,
                prefix=f"{index}.attn",
            )
        return found


def with_zeros(tensor: Tensor, dim: int, channels: int, padded: int) -> Tensor:
    """Return weights or biases with zeros behind the channels of one dimension, each time that it has all of them."""
    parts = tensor.unflatten(dim, (-1, channels))
    zeros = parts.new_zeros(*parts.shape[: dim + 1], padded - channels, *parts.shape[dim + 2 :])
    return torch.cat((parts, zeros), dim + 1).flatten(dim, dim + 1)
