"""The engine on a GPU: graphs give what direct calls give, in any order, on any stream, without growing."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import STRAIGHT, make, tokens
from tables import fixed

from wide.config import WideConfig
from wide.inference.engine.memory import Memory, Slot
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import attach, attachment
from wide.models.observe import capture_routing, force_routing
from wide.routing import LayerRouting

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
TABLE = fixed(query=5, attention=5, output=5, gate_up=5, down=5)
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def routed(family="llama", weights="model"):
    model = attach(
        make(family, **(STRAIGHT[family] | SIZES)).bfloat16().cuda(), WideConfig(ffn_group_size=64, router_rank=16)
    )
    return optimize(model, table=TABLE, weights=weights)


def prompt_and_steps(model, ids, length):
    """Return the logits of a prompt and of the steps behind it, and the masks of all of them."""
    parts, masks = [], []
    with torch.no_grad(), capture_routing(model) as routing:
        out = model(ids[:, :length])
        for place in range(length, ids.shape[1] + 1):
            parts.append(out.logits.float())
            masks.append([copy.copy(layer) for layer in routing])
            if place < ids.shape[1]:
                out = model(ids[:, place : place + 1], past_key_values=out.past_key_values)
    joined = [
        LayerRouting(**{half: torch.cat([getattr(each, half) for each in layers], 1) for half in ("attention", "ffn")})
        for layers in zip(*masks, strict=True)
    ]
    return torch.cat(parts, 1), joined


@pytest.mark.parametrize("weights", ["model", "int8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "mistral"])
def test_prompts_and_steps_are_those_of_the_masked_model(family, dtype, weights):
    model, ids = deoptimize(routed(family)).to(dtype), tokens(2, 204).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimize(model, table=TABLE, weights=weights)
    poison()
    found, masks = prompt_and_steps(model, ids, 200)
    if weights == "model":
        deoptimize(model)
    # In int8 the masked model has the engine's weights as long as it is optimised.
    with torch.no_grad(), force_routing(model, masks):
        wanted = model(ids).logits.float()
    # Steps read their rows as they are, the masked model those of a prompt in int8.
    compared = slice(None, 200 if weights == "w8a8" else None)
    torch.testing.assert_close(found[:, compared], wanted[:, compared], atol=0.05, rtol=0.05)
    if weights != "model":
        deoptimize(model)
    # Thresholds are not set yet: NaN.
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def without_graphs(monkeypatch):
    from wide.inference.engine.layer import ForwardOptions

    def step(self, ids, *, routed, pool):
        return self.decoder.step(ids, self.cache, ForwardOptions(routed=routed))

    monkeypatch.setattr(Slot, "step", step)
    monkeypatch.setattr(Slot, "prompt", lambda self, ids, lengths, **_: None)


def poison():
    """Leave NaN in the memory that the next allocations get."""
    torch.full((1 << 28,), torch.nan, device="cuda", dtype=torch.float32)


def several(model):
    """Return the tokens of requests of many sizes, some of them twice and at once, with and without padding."""
    found = []
    for batch, length in ((1, 30), (3, 70), (1, 30), (1, 200), (8, 30), (3, 90), (1, 40), (3, 70)):
        ids = tokens(batch, length, seed=length).cuda()
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0 if batch > 1 else 1
        poison()
        scores = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, output_logits=True, return_dict_in_generate=True, **OPTIONS
        ).logits
        found.append(torch.stack(scores).float())
        gc.collect()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mistral", "gemma2", "gemma3_text", "glm4", "exaone4"])
@pytest.mark.parametrize("weights", ["model", "int8", "w8a8"])
def test_graphs_give_what_direct_calls_give(family, weights, monkeypatch):
    model = routed(family, weights)
    with_graphs = several(model)
    without_graphs(monkeypatch)
    for found, wanted in zip(with_graphs, several(model), strict=True):
        assert found.isfinite().all()
        # A prompt that is padded to its graph's length may run another tile: the first tokens' logits tell.
        tolerance = 0.05 if weights == "model" else 0.1
        torch.testing.assert_close(found[0], wanted[0], atol=tolerance, rtol=tolerance)


def test_ten_thousand_steps_do_not_grow():
    model = routed()
    ids = tokens(1, 30).cuda()
    with torch.no_grad():
        out = model(ids)
        sizes = []
        for step in range(10_000):
            out = model(ids[:, :1], past_key_values=out.past_key_values)
            if step % 1000 == 999:
                sizes.append(torch.cuda.memory_allocated())
        assert out.logits.isfinite().all()
    engine = attachment(model).engine
    held = sum(2 * slot.cache.k.nbytes for slot in engine._memory.slots)
    # Room grows with the text, and nothing else does.
    assert sizes[-1] - sizes[0] <= held
    del out
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        model.generate(ids, max_new_tokens=8, **OPTIONS)
        gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 22)


def test_two_streams():
    model, ids = routed(), tokens(1, 30).cuda()
    wanted = model.generate(ids, max_new_tokens=20, **OPTIONS).tolist()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            assert model.generate(ids, max_new_tokens=20, **OPTIONS).tolist() == wanted


def test_captured_steps_and_prompts_follow_thresholds(monkeypatch):
    model, ids = routed(), tokens(1, 30).cuda()

    def asked():
        found = []
        for value in (0.0, 0.4, float("-inf"), -0.3, 1e9, 0.1):
            for router in attachment(model).routers():
                router.threshold = value
            # The second prompt of a length is a graph, too.
            out = model.generate(ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, **OPTIONS)
            found += out.logits
            for router in attachment(model).routers():
                router.threshold = value + 0.2
            with torch.no_grad():
                found.append(model(ids[:, :1], past_key_values=out.past_key_values).logits[:, -1])
        return torch.stack(found).float()

    with_graphs = asked()
    without_graphs(monkeypatch)
    torch.testing.assert_close(with_graphs, asked(), atol=0.05, rtol=0.05)


def test_steps_begun_ahead_give_what_steps_alone_give(monkeypatch):
    model, ids = routed(), tokens(1, 30).cuda()
    likely = int(model.generate(ids, max_new_tokens=9, **OPTIONS)[0, -1])
    options = OPTIONS | {"max_new_tokens": 40, "output_logits": True, "return_dict_in_generate": True}

    def asked():
        found = several(model)
        for more in ({"repetition_penalty": 1.5}, {"eos_token_id": likely}):
            found.append(torch.stack(model.generate(ids, **(options | more)).logits).float())
            poison()
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _: model.generate(ids, **options), range(2)))
        return [*found, *(torch.stack(each.logits).float() for each in both)]

    with_guesses = asked()
    assert attachment(model).engine._memory._next is not None
    monkeypatch.setattr(Memory, "begin", lambda *_, **__: False)
    for found, wanted in zip(with_guesses, asked(), strict=True):
        assert torch.equal(found, wanted)
