"""In which measure sparsity is counted: what each half-layer's skip rate weighs."""

from typing import Literal

from torch import nn

from wide.models.accounting import model_costs
from wide.models.attach import attachment

Measure = Literal["mean", "linear_flops"]


def half_weights(model: nn.Module, measure: Measure = "mean", *, include_fixed: bool = False) -> list[float]:
    """Return what the skip rate of each routed half-layer weighs in the sparsity of an attached model.

    The sparsity is the sum of weight times skip rate, in the order of `Attachment.routers()`.

    Args:
        model: An attached model.
        measure: 'mean': unweighted mean over layers of each kind of half, then over the two kinds (paper, section
            3.2); 'linear_flops': the share of the prunable matrix-product work.
        include_fixed: For 'linear_flops': count K, V and the output head into the total.
    """
    routers = attachment(model).routers()
    if measure == "mean":
        count = {kind: sum(router.half_layer == kind for router in routers) for kind in ("attention", "ffn")}
        kinds = sum(1 for number in count.values() if number)
        return [1.0 / (kinds * count[router.half_layer]) for router in routers]
    work = model_costs(model)
    total = sum(layer.prunable + (layer.fixed if include_fixed else 0.0) for layer in work.layers)
    total += work.head if include_fixed else 0.0
    shares = []
    for router in routers:
        layer = work.layers[router.layer_index]
        group = layer.attention_group if router.half_layer == "attention" else layer.ffn_group
        shares.append(group * router.num_groups / total)
    return shares
