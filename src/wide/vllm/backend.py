"""What vLLM's Transformers backend serves: other families, masked and no faster than dense, and static checkpoints."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import TransformersForCausalLM

from wide.errors import AdapterError
from wide.materialisation.checkpoint import SlicedMixin
from wide.materialisation.cut import check_range, cut_empty, head_channels, head_rows
from wide.materialisation.shape import LayerShape, ModelShape
from wide.models.block_spec import BlockSpec, feed_forward
from wide.models.discovery import discover
from wide.models.gates import GATHER_NAME, input_of
from wide.models.pretrained import PRUNED_PREFIX
from wide.plan import Routed
from wide.vllm.limits import padded_channels, read_pruning, read_shape, read_weights
from wide.vllm.sublayers import Router, cleared
from wide.vllm.tally import Reporting

_LOGGER = logging.getLogger("vllm.wide")


class WideTransformersForCausalLM(Reporting, TransformersForCausalLM):
    """A model of transformers whose FFN activations and attention heads are masked before they are projected back."""

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
        self.take_over(vllm_config, pruning.weights)


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
    """A static checkpoint of `wide export`: each layer has its own channels; where heads were pruned there are zeros.

    vLLM's kernels for attention take the numbers of heads from the configuration.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        # Before the model is a module.
        self.__dict__.update(left=read_shape(config).layers, padded={}, sizes={})
        config.__class__ = CONFIG_MAPPING[config.model_type.removeprefix(SlicedMixin.wide_type_prefix)]
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.take_over(vllm_config, read_weights(config))

    def _create_hf_to_vllm_mapper(self) -> None:
        # The first thing that the backend does with its model, whose layers are still those of transformers.
        names, layers, blocks = {module: name for name, module in self.model.named_modules()}, [], discover(self.model)
        check_range(blocks, ModelShape(layers=self.left))
        for block, left in zip(blocks, self.left, strict=True):
            channels = padded_channels(left, self.tp_group.world_size)
            layers.append(LayerShape(query_heads=left.query_heads and "dense", channels=channels))
            for linear, dim, places, size in _kept(block, left, channels):
                # A bias has no columns.
                for part in ("weight", "bias")[: 2 - dim]:
                    self.padded[f"{names[linear]}.{part}"] = dim, places, size
        with torch.device("meta"):
            cut_empty(self.model, ModelShape(layers=tuple(layers)))
        self.sizes.update((name, list(parameter.shape)) for name, parameter in self.model.named_parameters())
        super()._create_hf_to_vllm_mapper()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load them, with zeros where heads were pruned or ranks would have different numbers of channels.

        Raises AdapterError if one has not the shape that the configuration says: vLLM may take a part of it.
        """
        # Pruned heads are there again, so that none is looked up.
        whole = (self._whole(*each) for each in weights if GATHER_NAME not in each[0])
        return super().load_weights(whole)  # type: ignore[no-any-return]

    def _whole(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        known, found = name.removeprefix(f"{self.model.base_model_prefix}."), list(tensor.shape)
        wanted = [*self.sizes.get(known, found)]
        if known in self.padded:
            dim, places, _ = self.padded[known]
            wanted[dim] = len(places)
        if found != wanted:
            raise AdapterError(f"{name} has the shape {found}, but config.json: wide_shape says {wanted}")
        return name, with_zeros(tensor, *self.padded[known]) if known in self.padded else tensor

    def _create_attention_instances(self, _prefix: str = "") -> None:
        # From vLLM 0.32 on, modules have their attentions; before, the method below is called.
        for index, attention in self.create_attention_instances().items():
            name, fuser = self.attention_fusers[index]
            module = self.get_submodule(name)
            attention.impl.scale = fuser.scale(module) or attention.impl.scale
            module.attn = attention

    def create_attention_instances(self) -> dict[int, Any]:
        """Return vLLM's attentions by layer; none where none is left."""
        config, known, found = self.text_config, self.model_config, {}
        kinds, size = getattr(config, "layer_types", None), known.get_head_size()
        for index, layer in enumerate(self.left):
            if not layer.query_heads:
                continue
            is_sliding = kinds is not None and kinds[index] == "sliding_attention"
            found[index] = Attention(
                num_heads=known.get_num_attention_heads(self.parallel_config),
                head_size=size,
                scale=size**-0.5,
                num_kv_heads=known.get_num_kv_heads(self.parallel_config),
                cache_config=self.cache_config,
                logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
                per_layer_sliding_window=config.sliding_window if is_sliding else None,
                prefix=f"{index}.attn",
            )
        return found


def _kept(block: BlockSpec, left: LayerShape, channels: Any) -> Iterator[tuple[Any, int, Tensor, int]]:
    """Yield linear layers that get zeros: the dimension, places in it of what was kept, int64 [n], and its size."""
    attention, heads = block.attention, left.query_heads
    if isinstance(heads, tuple) and heads:
        yield attention.output, 1, head_channels(heads, attention.head_dim), attention.query_width
        for linear, rows in head_rows(attention, heads):
            yield linear, 0, rows, linear.out_features
    if isinstance(left.channels, int) and left.channels != channels:
        ffn, places = feed_forward(block), torch.arange(left.channels)
        *first, last = ffn.linears()
        yield last, 1, places, channels
        rows = torch.cat((places, channels + places)) if ffn.fused_gate else places
        for linear in first:
            yield linear, 0, rows, channels * (1 + ffn.fused_gate)


def with_zeros(tensor: Tensor, dim: int, places: Tensor, size: int) -> Tensor:
    """Return weights or biases at their places in one dimension of some size, and zeros at all others."""
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    return tensor.new_zeros(shape).index_copy_(dim, places.to(tensor.device), tensor)
