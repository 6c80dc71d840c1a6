"""Fused execution on a GPU gives what the masked model gives, with Triton's kernels compiled, not interpreted."""

import warnings

import pytest
import torch
from families import make, tokens
from tables import fixed
from transformers import DynamicCache, StaticCache

from wide.config import WideConfig
from wide.inference.optimize import optimize
from wide.models.attach import attach
from wide.models.observe import capture_routing, force_routing

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
# Skips from few tokens on; decode steps and caches skip, too.
TABLE = fixed(query=5, attention=5, output=5, gate_up=5, down=5)
CONFIG = WideConfig(ffn_group_size=64, router_rank=16)
BATCH, LENGTH, STEPS = 2, 200, 4
PADDING = {"none": [], "left": [(0, 0, 70)], "right": [(1, 150, LENGTH)], "hole": [(0, 30, 60), (1, 0, 9)]}
CLOSE = {"atol": 0.05, "rtol": 0.05}


def routed(family, dtype=torch.bfloat16):
    special = {"query_pre_attn_scalar": 64} if family.startswith("gemma") else {}
    return attach(make(family, **(SIZES | special)).to(dtype).cuda(), CONFIG)


def valid_tokens(kind):
    valid = torch.ones(BATCH, LENGTH + STEPS, dtype=torch.long)
    for row, first, last in PADDING[kind]:
        valid[row, first:last] = 0
    return valid.cuda()


def prompt_and_steps(model, valid, cache):
    ids = tokens(BATCH, LENGTH + STEPS).cuda()
    parts = [model(ids[:, :LENGTH], attention_mask=valid[:, :LENGTH], past_key_values=cache).logits]
    for place in range(LENGTH, LENGTH + STEPS):
        seen = valid[:, : place + 1]
        parts.append(model(ids[:, place : place + 1], attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(parts, dim=1)


def masked_and_fused(model, run):
    with torch.no_grad(), capture_routing(model, history=True) as routing:
        masked = run()
    optimize(model, table=TABLE)
    with torch.no_grad(), warnings.catch_warnings(), force_routing(model, routing):
        warnings.simplefilter("ignore")
        return masked.float(), run().float()


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2", "mistral"])
def test_prompts_and_steps_are_those_of_the_masked_model(family, kind):
    model, valid = routed(family), valid_tokens(kind)
    masked, fused = masked_and_fused(model, lambda: prompt_and_steps(model, valid, DynamicCache(config=model.config)))
    assert fused[valid.bool()].isfinite().all()
    torch.testing.assert_close(fused[valid.bool()], masked[valid.bool()], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_over_a_static_cache(dtype):
    model, valid = routed("llama", dtype), valid_tokens("left")

    def run():
        return prompt_and_steps(model, valid, StaticCache(config=model.config, max_cache_len=LENGTH + STEPS))

    masked, fused = masked_and_fused(model, run)
    torch.testing.assert_close(fused[valid.bool()], masked[valid.bool()], **CLOSE)


def test_compiled_steps_in_cuda_graphs_are_those_of_the_masked_model():
    model, ids = routed("llama"), tokens(BATCH, LENGTH + STEPS).cuda()
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + STEPS)
    with torch.no_grad(), capture_routing(model, history=True) as routing:
        masked = model(ids).logits.float()
    optimize(model, table=TABLE)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad(), force_routing(model, routing):
        torch.testing.assert_close(
            model(ids[:, :LENGTH], past_key_values=cache).logits.float(), masked[:, :LENGTH], **CLOSE
        )
    with torch.no_grad():
        for place in range(LENGTH, LENGTH + STEPS):
            logits = compiled(ids[:, place : place + 1], past_key_values=cache).logits.float()
            assert logits.isfinite().all()


def test_greedy_generation_is_that_of_the_masked_model():
    model, ids = routed("llama", torch.float16), tokens(BATCH, 60).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    optimize(model, table=TABLE)
    agreement = (model.generate(ids, **options) == wanted).float().mean()
    # A near tie may flip one token, and what follows it.
    assert agreement > 0.8
