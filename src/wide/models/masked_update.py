"""LoRA whose update leaves a method's zeros alone: with single weights pruned, B A would fill every one of them."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from wide.models.attach import attachment


class MaskedUpdate:
    """One layer's LoRA as W x + (M o B A) dropout(x) scaling, where M is 1 where W is not zero.

    PEFT calls it in place of its own forward and merge (`LoraLayer.lora_variant`), so that training, evaluation and
    merging take the same update. M is read off W in every forward. The update is as large as W, so the forward of
    such a layer costs twice that of the base layer, its backward about three times, and until the backward each layer
    keeps its update.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Add the update to the base layer's output.

        Args:
            module: PEFT's layer.
            active_adapter: Name of the LoRA.
            x: `[..., in]`, in the dtype of LoRA.
            result: `[..., out]`, of the base layer.
        """
        x, update = module.lora_dropout[active_adapter](x), _update(module, active_adapter)
        if not module.training:
            # Without autocast, as a merged weight multiplies; the update is as large as it.
            x, update = x.to(result.dtype), update.to(result.dtype)
        return result + functional.linear(x, update)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Add the update to the base layer's weight, `[out, in]`, in place."""
        orig_weight.data += _update(module, active_adapter)


def mask_updates(model: nn.Module, adapter: str) -> None:
    """Keep LoRA off the zeros of replaced weights, wherever nothing else holds it back.

    Where whole units are pruned, their scale of 0 does: what LoRA writes there is multiplied by nothing.

    Args:
        model: An attached model on which PEFT has put LoRA.
        adapter: Name of that LoRA.
    """
    state = attachment(model)
    if state.replaced is None:
        return
    zeros = state.replaced.zeros()
    for gate in state.static_gates():
        spec = state.specs[gate.layer_index]
        last: Any = spec.attention.output if gate.half_layer == "attention" or spec.ffn is None else spec.ffn.down
        places = zeros.get(last.weight)
        if places is not None:
            units = gate.factors() == 0
            places[:, units.repeat_interleave(places.shape[1] // units.numel()).to(places.device)] = False
    pruned = {parameter for parameter, places in zeros.items() if places.any()}
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_variant")]
    for layer in layers:
        if layer.get_base_layer().weight in pruned:
            layer.lora_variant[adapter] = MaskedUpdate()


def _update(module: Any, adapter: str) -> Tensor:
    return module.get_delta_weight(adapter).masked_fill(module.get_base_layer().weight == 0, 0.0)
