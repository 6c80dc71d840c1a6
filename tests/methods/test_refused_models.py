"""Which rows refuse which models, before they read any text: the table in docs/guide/compare.md."""

from dataclasses import replace

import pytest
import torch
from depth_toys import blocks_of
from families import make, make_borrowing
from test_every_method import ROWS, SETTINGS, STAGE
from torch import nn

from wide.errors import UnsupportedModelError
from wide.methods.apply import apply
from wide.methods.catalogue import get
from wide.methods.method import Target
from wide.models.attach import detach, is_attached
from wide.training.modes import rehearsal

EVERYWHERE_BUT_ROUTED_HALVES = set(ROWS) - {"skipgpt", "skipgpt-original", "wide"}
REFUSED = {
    "llama": set(),
    "gemma2": {"slicegpt"},
    "olmo2": {"slicegpt"},
    "granite": {"slicegpt"},
    "borrowed keys": {"blockpruner", "cooppruner", "dllm-original", "shortened-ppl", "shortened-taylor", "slicegpt"},
    "mixture of experts": EVERYWHERE_BUT_ROUTED_HALVES,
    "quantised": {"shortened-taylor", "tyr"},
}


class Quantised(nn.Module):
    """A linear layer whose weight is int8."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.weight = nn.Parameter((linear.weight.detach() * 100).to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.float() / 100)


def model_of(kind):
    if kind == "borrowed keys":
        return make_borrowing()
    if kind == "mixture of experts":
        return make("mixtral", num_local_experts=4)
    model = make("llama" if kind == "quantised" else kind)
    if kind == "quantised":
        for module in list(model.model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Quantised(child))
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_who_refuses_what(kind):
    model, text = model_of(kind), blocks_of(torch.randint(3, 97, (48, 32)))
    refused = set()
    for name in ROWS:
        settings = SETTINGS[name]
        if name.startswith("shortened"):
            settings = replace(settings, protect_first=0, protect_last=0)
        try:
            with rehearsal(model):
                apply(model, get(name), text, Target(sparsity=0.4), settings, stage=STAGE, seed=1)
        except UnsupportedModelError:
            refused.add(name)
            assert not is_attached(model)
        if is_attached(model):
            detach(model)
    assert refused == REFUSED[kind]
