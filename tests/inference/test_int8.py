"""A model optimised with int8 weights is the masked model whose weights are those int8 values times their scales."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, STRAIGHT, make, stirred, tokens
from tables import fixed
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from wide.config import WideConfig
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.inference.optimize import deoptimize, optimize
from wide.kernels.linear_int8 import quantise_int8
from wide.models.attach import attach, attachment

CONFIG = WideConfig(ffn_group_size=16, router_rank=4)
CLOSE = {"atol": 5e-5, "rtol": 2e-4}
# Twenty-four rows take the gathered operators, eight the dense products, and one to four those for few rows.
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def routed(family="llama"):
    return attach(stirred(make(family, **STRAIGHT.get(family, {}))), CONFIG)


def linears(model):
    return [linear for spec in attachment(model).specs for linear in (*spec.attention.linears(), *spec.ffn.linears())]


@torch.no_grad()
def rounded(model):
    """Give a model the weights that int8 stands for."""
    for linear in linears(model):
        values, scale = quantise_int8(linear.weight)
        linear.weight.copy_(values * scale[:, None])
    return model


def optimised(model, **options):
    return optimize(model, weights="int8", **{"table": SMALL, **options})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "apertus"])
def test_prompts_and_steps_are_those_of_rounded_weights(family):
    model, wanted = optimised(routed(family)), rounded(routed(family))
    plain = routed(family)
    with torch.no_grad():
        for ids in (tokens(2, 12), tokens(2, 4), tokens(1, 1)):
            torch.testing.assert_close(model(ids).logits, wanted(ids).logits, **CLOSE)
            assert not torch.allclose(model(ids).logits, plain(ids).logits, **CLOSE)
        # What the engine does not take runs masked, on the same weights.
        with pytest.warns(UserWarning, match="output_hidden_states"):
            found = model(tokens(2, 12), output_hidden_states=True).logits
        torch.testing.assert_close(found, wanted(tokens(2, 12)).logits, **CLOSE)
    for ids in (tokens(1, 12), tokens(3, 5)):
        assert torch.equal(model.generate(ids, **GREEDY), wanted.generate(ids, **GREEDY))
    deoptimize(model)
    assert not any("forward" in vars(linear) for linear in linears(model))
    for (name, found), kept in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(found, kept), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, transformers batches on it")
def test_batches_and_threads_give_what_calls_alone_give():
    model, wanted = optimised(routed()), rounded(routed())
    prompts = [tokens(1, length, seed=length) for length in (5, 17, 3, 30)]
    alone = [wanted.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist() for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda ids: model.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist(), prompts)
    assert list(found) == alone
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    outputs = model.generate_batch(
        [ids[0].tolist() for ids in prompts],
        generation_config=GenerationConfig(**GREEDY | {"eos_token_id": -1}),
        continuous_batching_config=ContinuousBatchingConfig(**{page: 4}, num_blocks=64, max_batch_tokens=64),
    )
    assert [output.generated_tokens for output in outputs.values()] == alone


def test_weights_and_routers_that_change_count_from_the_next_prompt_on():
    model, plain, ids = optimised(routed()), routed(), tokens(2, 12)
    changes = (
        lambda each: each.model.layers[1].mlp.down_proj.weight[:, 3].mul_(20),
        lambda each: attachment(each).routers()[0].up.mul_(-1),
    )
    for change in changes:
        with torch.no_grad():
            model(ids), change(model), change(plain)
            wanted = routed()
            wanted.load_state_dict(plain.state_dict())
            logits = rounded(wanted)(ids).logits
            with pytest.warns(UserWarning, match="output_hidden") if change is changes[0] else nullcontext():
                # Of calls that run masked, too.
                torch.testing.assert_close(model(ids, output_hidden_states=True).logits, logits, **CLOSE)
            torch.testing.assert_close(model(ids).logits, logits, **CLOSE)
    deoptimize(model)
    assert all(
        torch.equal(*pair) for pair in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


@torch.no_grad()
def test_weights_that_are_whole_again_are_quantised_again():
    model, wanted, ids = optimised(routed()), rounded(routed()), tokens(2, 12)
    weight = model.model.layers[1].mlp.down_proj.weight
    before = weight.clone()
    weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="since it was changed .* NaN"):
        assert model(ids).logits.isnan().any()
    weight.copy_(before)
    torch.testing.assert_close(model(ids).logits, wanted(ids).logits, **CLOSE)


def test_what_cannot_be_quantised_is_refused_and_left_as_it_was():
    with pytest.raises(ConfigError, match=r"unknown weights 'int4'; choose one of \['model', 'int8'\]"):
        optimize(routed(), table=SMALL, weights="int4")
    model = routed()
    last = model.model.layers[1].mlp.down_proj
    for spoil, match in (
        (lambda: last.weight.data[3].fill_(float("inf")), "layer 1: FFN: weights hold NaN or infinity"),
        (lambda: setattr(last, "forward", lambda x: x), "layer 1: FFN: .* a forward that is not its class's"),
    ):
        spoil()
        with pytest.raises(UnsupportedModelError, match=match):
            optimised(model)
        assert not attachment(model).engine
        assert [linear for linear in linears(model) if "forward" in vars(linear)] in ([], [last])
        last.weight.data.zero_()
    del last.forward
    optimised(model)
    with pytest.warns(UserWarning, match="labels="), pytest.raises(NotAttachedError, match="no gradients"):
        model(tokens(), labels=tokens()).loss.backward()


def test_memory_that_is_spared_is_told():
    model = optimised(routed())
    original = sum(linear.weight.nbytes for linear in linears(model))
    scales = sum(4 * linear.out_features for linear in linears(model))
    assert attachment(model).engine.decoder.saved_bytes == original - original // 4 - scales
    assert attachment(optimize(routed(), table=SMALL)).engine.decoder.saved_bytes == 0
