"""Plans of static methods for tiny models, with their values."""

import torch

from wide.grouping import Grouping
from wide.models.discovery import discover
from wide.plan import Dense, Following, Kept, LayerPlan, Plan, Routed, Skipped, Stream


def random_scale(units, kept, seed):
    """Return scales of which `kept` are not zero, none of them 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.zeros(units)
    chosen = torch.randperm(units, generator=generator)[:kept]
    scale[chosen] = 0.5 + torch.rand(kept, generator=generator)
    return scale


def kept_plan(model, *, heads=None, channels=None):
    """Return a plan that keeps query heads and channels of every layer, other ones in each, and its scales."""
    layers, tensors = [], {}
    for spec in discover(model):
        grouping = Grouping(spec.attention.query_width, spec.attention.head_dim)
        kept = heads or grouping.num_groups - 1
        tensors[f"layers.{spec.index}.attention.scale"] = random_scale(grouping.num_groups, kept, spec.index)
        attention = Kept(grouping=grouping, kept=kept)
        grouping = Grouping(spec.ffn.width, 1)
        kept = channels or spec.ffn.width // 2 + 1
        tensors[f"layers.{spec.index}.ffn.scale"] = random_scale(spec.ffn.width, kept, 100 + spec.index)
        layers.append(LayerPlan(attention=attention, ffn=Kept(grouping=grouping, kept=kept)))
    return Plan(tuple(layers)), tensors


def skipped_plan(model, halves):
    """Return a plan that leaves out these (layer, half) pairs."""
    layers = [
        LayerPlan(
            attention=Skipped() if (spec.index, "attention") in halves else Dense(),
            ffn=Skipped() if (spec.index, "ffn") in halves else Dense(),
        )
        for spec in discover(model)
    ]
    return Plan(tuple(layers))


def stream_plan(model, kept):
    """Return a plan of dense halves on random subspaces of the stream, and its bases."""
    specs = discover(model)
    width = specs[0].hidden_size
    plan = Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in specs), Stream(width=width, kept=kept))
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.linalg.qr(torch.randn(shape, generator=generator)).Q for name, shape in plan.tensor_shapes().items()
    }
    return plan, tensors


def layer_skip_plan(model, **options):
    """Return a plan with one router a layer, which both halves obey."""
    return Plan(
        tuple(
            LayerPlan(
                attention=Routed(grouping=Grouping.whole(spec.attention.query_width), rank=4, **options),
                ffn=Following(),
            )
            for spec in discover(model)
        )
    )


def module_skip_plan(model, **options):
    """Return a plan with a router for each half, which it executes or skips as a whole."""
    return Plan(
        tuple(
            LayerPlan(
                attention=Routed(grouping=Grouping.whole(spec.attention.query_width), rank=4, **options),
                ffn=Routed(grouping=Grouping.whole(spec.ffn.width), rank=4, **options),
            )
            for spec in discover(model)
        )
    )
