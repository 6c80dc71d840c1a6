"""LoRA whose update leaves a method's zeros alone: with single weights pruned, B A would fill every one of them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from wide.models.attach import Attachment, attachment

_CHANCE = 1e-3
"""Share of zeros that corrections behind scales may hold by chance."""


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
    """Keep LoRA off the zeros of matrices of which the method pruned single weights.

    Where whole units are pruned, their scale of 0 does: what LoRA writes there is multiplied by nothing.

    Args:
        model: An attached model on which PEFT has put LoRA.
        adapter: Name of that LoRA.
    """
    state = attachment(model)
    if state.replaced is None:
        return
    pruned = _sparse(state.replaced.zeros(), _unit_columns(state))
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_variant")]
    for layer in layers:
        if layer.get_base_layer().weight in pruned:
            layer.lora_variant[adapter] = MaskedUpdate()


def pruned_places(state: Attachment) -> dict[nn.Parameter, Tensor]:
    """Return where replaced weights are pruned and must stay zero when LoRA is merged, bool of each one's shape.

    These are the zeros of matrices of which single weights were pruned, and the columns of whole units that were.
    A zero anywhere else is a weight like any other, which LoRA may move.
    """
    if state.replaced is None:
        return {}
    zeros, columns = state.replaced.zeros(), _unit_columns(state)
    sparse = _sparse(zeros, columns)
    places = {parameter: zeros[parameter] for parameter in sparse}
    places |= {weight: zeros[weight] & of_units for weight, of_units in columns.items() if weight not in sparse}
    return places


def _sparse(zeros: Mapping[nn.Parameter, Tensor], columns: Mapping[nn.Parameter, Tensor]) -> set[nn.Parameter]:
    """Return the matrices of which the method pruned single weights.

    A method that prunes units replaces what their scales multiply, and its corrections may hit zero by chance, which
    must not make a layer dear. A matrix without scales has been replaced for its zeros, those that its base had, too:
    a model that was pruned before may be pruned again.

    Args:
        zeros: Where replaced matrices hold zeros, bool of each one's shape.
        columns: Of those behind scales, the inputs of pruned units, bool `[in]`.
    """
    by_chance = {weight: _CHANCE * weight.numel() if weight in columns else 0.0 for weight in zeros}
    own = {weight: places & ~columns[weight] if weight in columns else places for weight, places in zeros.items()}
    return {weight for weight, places in own.items() if int(places.sum()) > by_chance[weight]}


def _unit_columns(state: Attachment) -> dict[nn.Parameter, Tensor]:
    """Return of the replaced weights behind scales, `[out, in]`, the inputs whose scale is 0, bool `[in]`."""
    assert state.replaced is not None
    found: dict[nn.Parameter, Tensor] = {}
    for gate in state.static_gates():
        spec = state.specs[gate.layer_index]
        last: Any = spec.attention.output if gate.half_layer == "attention" or spec.ffn is None else spec.ffn.down
        weight: nn.Parameter = last.weight
        if weight in state.replaced:
            units = gate.factors().detach() == 0
            found[weight] = units.repeat_interleave(weight.shape[1] // units.numel()).to(weight.device)
    return found


def _update(module: Any, adapter: str) -> Tensor:
    return module.get_delta_weight(adapter).masked_fill(module.get_base_layer().weight == 0, 0.0)
