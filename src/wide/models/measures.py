"""In which measure sparsity is counted: what each half-layer's skip rate weighs."""

from typing import Literal

from torch import nn

from wide.models.accounting import model_costs
from wide.models.attach import attachment

Measure = Literal["mean", "linear_flops", "attention", "ffn"]


def half_weights(model: nn.Module, measure: Measure = "mean", *, include_fixed: bool = False) -> list[float]:
    """Return what the skip rate of each routed half-layer weighs in the sparsity of an attached model.

    The sparsity is the sum of weight times skip rate, in the order of `Attachment.routers()`.

    Args:
        model: An attached model.
        measure: 'mean': unweighted mean over layers of each kind of half, then over the two kinds (paper, section
            3.2); 'linear_flops': the share of the prunable matrix-product work; 'attention', 'ffn': the mean over the
            halves of that kind alone.
        include_fixed: For 'linear_flops': count K, V and the output head into the total.
    """
    routers = attachment(model).routers()
    if measure in ("attention", "ffn"):
        return kind_weights(model, measure)
    if measure == "mean":
        kinds = [weights for weights in (kind_weights(model, kind) for kind in ("attention", "ffn")) if any(weights)]
        return [sum(weights) / len(kinds) for weights in zip(*kinds, strict=True)]
    work = model_costs(model)
    total = sum(layer.total if include_fixed else layer.prunable for layer in work.layers)
    total += work.head if include_fixed else 0.0
    shares = []
    for router in routers:
        layer = work.layers[router.layer_index]
        attention, ffn = layer.attention_group * layer.attention_groups, layer.ffn_group * layer.ffn_groups
        own = attention if router.half_layer == "attention" else ffn
        shares.append((own + (ffn if router.is_followed else 0.0)) / total)
    return shares


def kind_weights(model: nn.Module, kind: str) -> list[float]:
    """Return what the skip rate of each router weighs in the mean over all routed halves of one kind.

    An FFN that follows the attention has the rate of the attention's router.

    Args:
        model: An attached model.
        kind: 'attention' or 'ffn'.
    """
    routers = attachment(model).routers()
    counts = [router.half_layer == kind or (kind == "ffn" and router.is_followed) for router in routers]
    return [count / max(sum(counts), 1) for count in counts]
