"""A step of an optimised model over a static cache, compiled as one graph, is the step that runs eagerly."""

import torch
from families import make, tokens
from tables import fixed
from transformers import StaticCache

from wide.config import WideConfig
from wide.inference.optimize import optimize
from wide.models.attach import attach
from wide.models.observe import capture_routing, force_routing
from wide.routing import LayerRouting

PROMPT, STEPS = 9, 3
# The prompt takes the gathered operators; steps take those for few tokens, and attention over the cache skips.
TABLE = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)


def test_steps_over_a_static_cache_compile_as_one_graph():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens(2, PROMPT + STEPS)
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    optimize(model, table=TABLE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
    with torch.no_grad():
        with force_routing(model, _between(routing, 0, PROMPT)):
            model(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + STEPS):
            with force_routing(model, _between(routing, at, at + 1)):
                got = compiled(ids[:, at : at + 1], past_key_values=cache).logits
            torch.testing.assert_close(got[:, 0], masked[:, at], atol=1e-5, rtol=1e-4)


def _between(routing: list[LayerRouting], first: int, last: int) -> list[LayerRouting]:
    """Return the decisions on some of the tokens."""
    return [
        LayerRouting(
            attention=None if layer.attention is None else layer.attention[:, first:last],
            ffn=None if layer.ffn is None else layer.ffn[:, first:last],
        )
        for layer in routing
    ]
