"""Static plans with random values for tiny models, one function per kind."""

import copy

import torch

from wide.grouping import Grouping
from wide.models.attach import attach
from wide.models.discovery import discover
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped, Stream


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def scales(number, kept, *, seed, folded=True):
    """Return `[number]` scales of which `kept` random ones are not 0."""
    scale = torch.zeros(number)
    chosen = torch.randperm(number, generator=draw(seed))[:kept]
    scale[chosen] = torch.rand(kept, generator=draw(seed + 1)) + 0.5 if folded else 1.0
    return scale


def width_plan(model, heads, channels, *, folded=True):
    """Keep the given query heads (lists, per layer) and a number of channels per layer; None leaves a half dense."""
    specs, layers, tensors = discover(model), [], {}
    for spec, kept_heads, kept_channels in zip(specs, heads, channels, strict=True):
        attention, ffn = Dense(), Dense()
        if kept_heads is not None:
            scale = torch.zeros(spec.attention.num_query_heads)
            scale[kept_heads] = scales(len(kept_heads), len(kept_heads), seed=spec.index, folded=folded)
            attention = Kept(
                grouping=Grouping(spec.attention.query_width, spec.attention.head_dim), kept=len(kept_heads)
            )
            tensors[f"layers.{spec.index}.attention.scale"] = scale
        if kept_channels is not None:
            tensors[f"layers.{spec.index}.ffn.scale"] = scales(
                spec.ffn.width, kept_channels, seed=7 + spec.index, folded=folded
            )
            ffn = Kept(grouping=Grouping(spec.ffn.width, 1), kept=kept_channels)
        layers.append(LayerPlan(attention=attention, ffn=ffn))
    return Plan(tuple(layers)), tensors


def depth_plan(skipped):
    """Skip halves: a pair (attention, FFN) of booleans per layer."""
    return Plan(
        tuple(LayerPlan(attention=Skipped() if a else Dense(), ffn=Skipped() if f else Dense()) for a, f in skipped)
    )


def stream_plan(model, kept, layers=None):
    """Project the stream on random subspaces of `kept` dimensions."""
    specs = discover(model)
    width = specs[0].hidden_size
    names = ["stream.embedding", *(f"layers.{s.index}.{half}.basis" for s in specs for half in ("attention", "ffn"))]
    tensors = {
        name: torch.linalg.qr(torch.randn(width, kept, generator=draw(seed), dtype=torch.float64))[0].float()
        for seed, name in enumerate(names[:-1])
    }
    layers = layers or tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in specs)
    return Plan(layers, Stream(width=width, kept=kept)), tensors


def twins(model, plan, tensors=None, **options):
    """Return two attached copies of a model: one to stay masked, one to be materialised."""
    return tuple(attach(copy.deepcopy(model), plan, tensors=tensors, **options) for _ in range(2))


def number_of_parameters(model):
    return sum(p.numel() for p in model.parameters())
