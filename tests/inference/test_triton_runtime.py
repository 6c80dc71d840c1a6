"""The runtime through the Triton kernels: the same logits as through plain PyTorch, prefill and steps."""

import pytest
import torch
from families import STRAIGHT, make, stirred, tokens
from tables import fixed

from wide.config import WideConfig
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.layer import ForwardOptions, force
from wide.inference.operators.table import OPERATORS
from wide.models.attach import attach

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def _table(backend, attention):
    return fixed(backend, query=5, attention=attention, output=5, gate_up=5, down=5, few=OPERATORS)


# Norms of heads; a window, a soft cap and norms after the sublayers; half of a head turned, in neighbouring channels;
# no norms before the sublayers.
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("qwen3", 5),
        pytest.param("gemma2", 5, marks=pytest.mark.slow),
        ("gemma2", None),
        ("glm4", 5),
        pytest.param("exaone4", None, marks=pytest.mark.slow),
    ],
)
def test_triton_and_torch_give_the_same_logits(family, attention):
    sizes = STRAIGHT[family] | {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][:1]
    model = stirred(make(family, **sizes)).to(DTYPE).to(DEVICE)
    model = attach(model, WideConfig(ffn_group_size=16, router_rank=4))
    decoder = Decoder(model, max_length=16)
    ids = tokens(1, 9).to(DEVICE)
    masks = [(torch.rand(9, 2, device=DEVICE) < 0.5, torch.rand(9, 4, device=DEVICE) < 0.5)]
    found = {}
    for backend in ("torch", "triton"):
        cache = decoder.new_cache(1)
        logits = [
            decoder.prefill_logits(
                ids, cache, ForwardOptions(table=_table(backend, attention), forced=force(decoder.layers, masks))
            )[0]
        ]
        for place in range(2):
            one = force(decoder.layers, [tuple(mask[place, None] for mask in pair) for pair in masks])
            logits.append(
                decoder.step(ids[:, place], cache, ForwardOptions(table=_table(backend, attention), forced=one))
            )
        found[backend] = torch.cat(logits).float()
    error = (found["triton"] - found["torch"]).norm() / found["torch"].norm()
    assert error < (2e-2 if DEVICE.type == "cuda" else 1e-4)
