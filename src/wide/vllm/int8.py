"""Int8 weights of vLLM's linear layers: made once, when weights have been read, and multiplied as the engine does."""

import logging
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from wide.errors import UnsupportedModelError
from wide.inference.operators.products import LinearWeights
from wide.kernels.int8 import hadamard, quantise_int8
from wide.vllm.operators import dense_linear
from wide.vllm.sublayers import FeedForward, rotation_of

_LOGGER = logging.getLogger("vllm.wide")
_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_FFN = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


def quantise_linears(model: nn.Module, form: str) -> None:
    """Have the linear layers and the head keep weights in one of `WEIGHTS` as soon as they have been read, or drawn."""
    if form == "model":
        return
    kinds = LinearBase | ParallelLMHead
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    saved = _Saved(len(layers), form)
    groups = {m.down_proj: m.wide_router.num_groups for m in model.modules() if isinstance(m, FeedForward)}
    for name, layer in layers.items():
        reads_heads = isinstance(layer, QKVParallelLinear) or name.endswith(_QUERIES_KEYS_VALUES)
        rounds = form == "w8a8" and not reads_heads and isinstance(layer, LinearBase)
        # As the engine does; a block stays in its group.
        parts = groups.get(layer, 1) if rounds and name.endswith(_FFN) else None
        layer.quant_method = _Int8(name, saved, int8_rows=rounds, parts=parts)


class _Saved:
    """Bytes that a model saves, logged after its last layer."""

    def __init__(self, layers: int, form: str) -> None:
        self.layers, self.form, self.left, self.before, self.after = layers, form, layers, 0, 0

    def add(self, before: int, after: int) -> None:
        self.left, self.before, self.after = self.left - 1, self.before + before, self.after + after
        if self.left == 0:
            old, new = (f"{each / 2**30:.2f} GiB" for each in (self.before, self.after))
            _LOGGER.info("wide keeps %d linear layers in %s: %s instead of %s", self.layers, self.form, new, old)


class _Int8(LinearMethodBase):
    """What vLLM asks to prepare a layer and to multiply by it; with `int8_rows` many rows are int8, too.

    Blocks of input channels are rotated inside `parts` groups; None = none is.
    """

    def __init__(self, name: str, saved: _Saved, *, int8_rows: bool, parts: int | None) -> None:
        self.name, self.saved, self.int8_rows, self.parts = name, saved, int8_rows, parts

    def create_weights(self, *_args: Any, **_options: Any) -> None:
        """Create nothing: the layer has made its weight, in the model's dtype."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put int8 values in the place of the weight, with a scale for each output channel of this rank.

        Raises UnsupportedModelError if the weight holds NaN or infinity.
        """
        weight: Any = layer.weight
        rotation = None if self.parts is None else hadamard(weight.shape[1] // self.parts, weight.detach())
        values, scale = quantise_int8(weight, rotation=rotation)
        if not bool(scale.isfinite().all()):
            raise UnsupportedModelError(
                f"{self.name}: weights hold NaN or infinity, which int8 cannot; leave wide_weights out"
            )
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.register_buffer("weight_scale", scale, persistent=False)
        layer.register_buffer("weight_rotation", rotation, persistent=False)
        self.saved.add(weight.nbytes, values.nbytes + scale.nbytes)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product [..., N] of rows [..., K]."""
        weights = LinearWeights(layer.weight, bias, layer.weight_scale, self.int8_rows, rotation_of(layer))  # type: ignore[arg-type]
        return dense_linear(x, weights)
