"""CUDA graphs replay what the decoder computes."""

import pytest
import torch
from families import make, tokens
from tables import fixed

from wide.config import WideConfig
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.graphs import GraphPool, capture_prompt, capture_step
from wide.inference.engine.layer import ForwardOptions
from wide.models.attach import attach

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


@pytest.mark.gpu
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_replays_equal_direct_calls(routed, batch):
    model = make("llama", **SIZES).bfloat16().cuda()
    decoder = Decoder(attach(model, WideConfig(ffn_group_size=64, router_rank=16)), max_length=64)
    run = ForwardOptions(routed=routed, table=fixed(query=5, attention=5, output=5, gate_up=5, down=5))
    ids = tokens(batch, 24).cuda()
    lengths = torch.full((batch,), 20, dtype=torch.int32, device="cuda")
    caches, pool = (
        [decoder.new_cache(batch) for _ in range(2)],
        GraphPool(torch.device("cuda", torch.cuda.current_device())),
    )
    wanted = decoder.prefill(ids[:, :20], lengths, caches[0], run)
    prompt = capture_prompt(decoder, caches[1], 32, run, pool)
    torch.testing.assert_close(prompt(ids[:, :20], lengths), wanted)
    step = capture_step(decoder, caches[1], run, pool)
    for place in range(20, 24):
        torch.testing.assert_close(step(ids[:, place]), decoder.step(ids[:, place], caches[0], run))
    assert torch.equal(caches[0].lengths, caches[1].lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("routed", [False, True])
def test_a_graph_serves_all_numbers_of_earlier_tokens(routed):
    model = make("llama", **SIZES).bfloat16().cuda()
    decoder = Decoder(attach(model, WideConfig(ffn_group_size=64, router_rank=16)), max_length=128)
    run = ForwardOptions(routed=routed, table=fixed(query=5, attention=5, output=5, gate_up=5, down=5))
    ids, pool, prompt = tokens(1, 90).cuda(), GraphPool(torch.device("cuda", torch.cuda.current_device())), None
    caches = [decoder.new_cache(1) for _ in range(2)]
    for past, length in ((20, 11), (31, 16), (70, 1)):
        for cache in caches:
            decoder.prompt(ids[:, :past], cache, run)
        prompt = prompt or capture_prompt(decoder, caches[1], 16, run, pool, past=past)
        new, ends = ids[:, past : past + length], torch.tensor([past + length], dtype=torch.int32, device="cuda")
        wanted = decoder.logits(decoder.prompt(new, caches[0], run, past=past), run)[-1:]
        torch.testing.assert_close(prompt(new, ends, past), wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(caches[0].lengths, caches[1].lengths)
