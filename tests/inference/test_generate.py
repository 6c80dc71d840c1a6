"""Generation through the runtime: greedy equals generate(), sampling is reproducible, limits are named."""

import pytest
import torch
from families import make, tokens

from wide.config import WideConfig
from wide.errors import ConfigError, ShapeError
from wide.inference.decoder import Decoder
from wide.inference.generate import Sampling, choose, generate_text, generate_tokens
from wide.inference.operator_table import OperatorTable
from wide.inference.run import Run
from wide.models.attach import attach

RUN = Run(table=OperatorTable(backend="torch", few=()))


def _decoder(max_length=32):
    model = attach(make("llama"), WideConfig(ffn_group_size=16, router_rank=4))
    return model, Decoder(model, max_length=max_length)


def test_greedy_tokens_are_those_of_generate():
    model, decoder = _decoder()
    ids = tokens(1, 9)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    assert generate_tokens(decoder, [ids[0].tolist()], RUN, Sampling(max_new_tokens=8)) == [wanted]
    # A shorter neighbour does not change a sequence, nor the other way round.
    both = generate_tokens(decoder, [ids[0].tolist(), ids[0, :5].tolist()], RUN, Sampling(max_new_tokens=8))
    alone = generate_tokens(decoder, [ids[0, :5].tolist()], RUN, Sampling(max_new_tokens=8))
    assert both == [wanted, alone[0]]
    end = wanted[2]
    assert generate_tokens(decoder, [ids[0].tolist()], RUN, Sampling(max_new_tokens=8), end_tokens=(end,)) == [
        wanted[: wanted.index(end) + 1]
    ]


def test_sampling_is_reproducible_and_top_p_keeps_the_likely():
    _, decoder = _decoder()
    prompt = [tokens(1, 6)[0].tolist()]
    sampling = Sampling(max_new_tokens=6, temperature=1.5, seed=3)
    assert generate_tokens(decoder, prompt, RUN, sampling) == generate_tokens(decoder, prompt, RUN, sampling)
    logits = torch.tensor([[2.0, 1.9, -3.0, -3.0]]).repeat(200, 1)
    found = choose(logits, Sampling(temperature=1.0, top_p=0.6), torch.Generator().manual_seed(0))
    assert set(found.tolist()) == {0, 1}


def test_text_goes_in_and_comes_out(tiny_model_folder, tiny_tokenizer):
    from transformers import AutoModelForCausalLM

    decoder = Decoder(AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval(), max_length=64)
    run = Run(routed=False, table=OperatorTable(backend="torch"))
    texts = generate_text(decoder, tiny_tokenizer, ["A list", "The quick brown"], run, Sampling(max_new_tokens=5))
    assert len(texts) == 2
    assert all(isinstance(text, str) for text in texts)


def test_limits_are_named():
    _, decoder = _decoder(max_length=12)
    with pytest.raises(ShapeError, match="prompts of 1 to 4 tokens"):
        generate_tokens(decoder, [[5] * 6], RUN, Sampling(max_new_tokens=8))
    with pytest.raises(ConfigError, match="top_p"):
        Sampling(top_p=0.0)
