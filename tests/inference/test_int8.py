"""A model optimised with int8 weights is the masked model whose weights are those int8 values times their scales."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, STRAIGHT, distinct, make, stirred, tokens
from peft import LoraConfig, get_peft_model
from tables import fixed
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from wide.config import WideConfig
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.inference.operators import products, table
from wide.inference.optimize import deoptimize, optimize
from wide.kernels.int8 import hadamard, quantise_int8, rotated
from wide.kernels.linear_int8.op import quantise_rows
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.attach import attach, attachment
from wide.models.lora import add_lora, merge_lora

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
def rounded(model, rotates=False):
    """Give a model the weights that int8 stands for, those of the FFN rotated while they are rounded."""
    head = model.lm_head
    # The embedding stays as it is.
    head.weight = nn.Parameter(head.weight.detach().clone())
    for linear in (*linears(model), head):
        turn = turn_of(model, linear) if rotates else None
        values, scale = quantise_int8(linear.weight, rotation=turn)
        linear.weight.copy_(rotated(values * scale[:, None], turn))
    return model


def turn_of(model, linear):
    """Return what rotates inputs of a linear layer: blocks of a group for down, of all channels for gate and up."""
    ffns = [spec.ffn for spec in attachment(model).specs]
    if any(linear is ffn.down for ffn in ffns):
        return hadamard(CONFIG.ffn_group_size, linear.weight)
    return hadamard(linear.in_features, linear.weight) if any(linear in ffn.linears() for ffn in ffns) else None


def of_int8_rows(model, least):
    """Let linear layers, but those of queries, keys and values, round inputs of at least so many rows as int8 does."""

    def rounded_rows(linear, inputs):
        rows, turn = inputs[0].flatten(0, -2), turn_of(model, linear)
        if len(rows) < least:
            return None
        values, scale = quantise_rows(rows, rotation=turn, backend="torch")
        return (rotated(values * scale[:, None], turn).view_as(inputs[0]),)

    for spec in attachment(model).specs:
        for linear in (spec.attention.output, *spec.ffn.linears()):
            linear.register_forward_pre_hook(rounded_rows)
    return model


def optimised(model, **options):
    return optimize(model, **{"weights": "int8", "table": SMALL, **options})


@pytest.mark.parametrize("family", distinct(family for family in FAMILIES if family != "apertus"))
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


@pytest.mark.parametrize(
    ("family", "skipped"),
    [("llama", {}), ("phi3", {"down": 16}), ("qwen3", dict.fromkeys(("query", "output", "gate_up"))), ("phi3", {})],
)
@pytest.mark.filterwarnings("ignore:.*output_hidden_states")
@torch.no_grad()
def test_rows_of_prompts_are_rounded_too(family, skipped, monkeypatch):
    monkeypatch.setattr(products, "MAX_WHOLE_ROWS", 12)
    monkeypatch.setattr(table.linear_int8, "MAX_WHOLE_ROWS", 12)
    rules = fixed("torch", **{"query": 5, "output": 5, "gate_up": 5} | skipped)
    model = optimised(routed(family), weights="w8a8", table=rules)
    wanted, plain = of_int8_rows(rounded(routed(family), True), 13), rounded(routed(family), True)
    for ids in (tokens(2, 12), tokens(1, 13), tokens(2, 4), tokens(1, 1)):
        found, right = model(ids).logits, wanted(ids).logits
        far = (plain(ids).logits - right).norm() / right.norm()
        assert (far > 1e-3) == (ids.numel() > 12)
        # A value near the middle of two may fall either way.
        assert (found - right).norm() <= max(0.2 * far, 1e-5) * right.norm()
        masked = model(ids, output_hidden_states=True).logits
        assert (masked - right).norm() <= max(0.2 * far, 1e-5) * right.norm()


@pytest.mark.parametrize(("channels", "size"), [(192, 64), (144, 16)])
def test_a_rotation_spreads_what_stands_out(channels, size):
    x = torch.randn(8, channels, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 40
    turn, errors = hadamard(channels, x), []
    assert turn.shape == (size, size)
    assert hadamard(channels + 8, x) is None
    torch.testing.assert_close(turn.half().float() @ turn, torch.eye(size))
    for rotation in (None, turn):
        values, scale = quantise_rows(x, rotation=rotation, backend="torch")
        errors.append((rotated(values * scale[:, None], rotation) - x).norm())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.batches_on_cpu
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


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_no_tokens_are_refused_as_the_model_refuses_them(shape):
    ids = torch.zeros(shape, dtype=torch.long)
    for model in (routed(), optimised(routed())):
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            model(ids)


@torch.no_grad()
def test_weights_that_were_int8_before_keep_their_bytes():
    model = routed().to(torch.bfloat16)
    down = model.model.layers[1].mlp.down_proj
    values, scale = quantise_int8(down.weight)
    values[::2] //= 2
    down.weight.copy_(values * scale[:, None])
    down.weight_scale = scale
    optimised(model)
    assert torch.equal(attachment(model).engine.decoder.layers[1].ffn.down.weight, values)
    down.weight.mul_(3)
    model(tokens(2, 12))
    assert torch.equal(attachment(model).engine.decoder.layers[1].ffn.down.weight, quantise_int8(down.weight)[0])


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


@torch.no_grad()
def test_calls_that_the_engine_cannot_read_for_use_the_weights_of_now():
    model, plain, ids = optimised(routed()), routed(), tokens(2, 12)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    for each in (model, plain):
        each.model.layers[1].mlp.down_proj.weight[:, 3].mul_(20)
    wanted = rounded(plain)
    with pytest.warns(UserWarning, match="a hook"):
        torch.testing.assert_close(model(ids).logits, wanted(ids).logits, **CLOSE)
    handle.remove()
    for each in (model, wanted):
        each.half()
    inner = model.model(ids).last_hidden_state
    torch.testing.assert_close(inner, wanted.model(ids).last_hidden_state, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(model(ids).logits, wanted(ids).logits, atol=2e-2, rtol=2e-2)


@pytest.mark.batches_on_cpu
def test_a_running_batch_keeps_the_weights_that_its_graphs_read():
    model, ids = optimised(routed()), tokens(1, 12)
    decoder = attachment(model).engine.decoder
    # By default its cache fills the memory of the machine.
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
    how = {"generation_config": GenerationConfig(**GREEDY), "continuous_batching_config": small}
    with model.continuous_batching_context_manager(**how) as manager:
        manager.add_request(ids[0].tolist(), max_new_tokens=2)
        assert manager.get_result(timeout=60) is not None
        with torch.no_grad():
            attachment(model).routers()[0].up.mul_(-1)
        said = pytest.warns(UserWarning, match="while generate_batch runs")
        with said, pytest.raises(UnsupportedModelError, match="end that first"):
            model(ids)
        with pytest.raises(NotAttachedError, match=r"generate_batch .* runs on this model; end that first"):
            deoptimize(model)
        assert attachment(model).engine.decoder is decoder
    model(ids)
    assert attachment(model).engine.decoder is not decoder
    deoptimize(model)


@torch.no_grad()
def test_without_memory_for_its_own_weights_a_model_stays_optimised():
    model, plain, ids = optimised(routed()), routed(), tokens(2, 12)
    taken = attachment(model).engine.decoder._weights.taken
    near, uses = taken._near, []

    class Full:
        @property
        def device(self):
            uses.append(1)
            if len(uses) > 3:
                raise torch.OutOfMemoryError("full")
            return torch.device("cpu")

    taken._near = Full()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        deoptimize(model)
    assert "stays optimised" in caught.value.__notes__[0]
    wanted = rounded(routed())
    torch.testing.assert_close(model(ids).logits, wanted(ids).logits, **CLOSE)
    assert torch.equal(model.generate(ids, **GREEDY), wanted.generate(ids, **GREEDY))
    taken._near = near
    assert torch.equal(deoptimize(model)(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("weights", ["int8", "model"])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_layers_share_are_refused(weights, whole):
    model = make("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    if whole:
        second.k_proj = first.k_proj
    else:
        second.k_proj.weight = first.k_proj.weight
    with pytest.raises(UnsupportedModelError, match="layers share the weight of a projection"):
        optimised(attach(model, CONFIG), weights=weights)


def test_copies_are_refused_and_what_is_saved_are_the_originals(tmp_path):
    model, plain = optimised(routed()), routed()
    part = model.model.layers[0].mlp
    for each in (model, model.model, part):
        for copied in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, tmp_path / "model.pt")):
            with pytest.raises(NotAttachedError, match="a copy of an optimised model"):
                copied(each)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(saved[name], kept) for name, kept in plain.state_dict().items())
    whole = load_checkpoint(save_checkpoint(model, tmp_path / "whole"))
    ids = tokens(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, plain(ids).logits)
    deoptimize(model)
    assert torch.equal(copy.deepcopy(part).down_proj.weight, part.down_proj.weight)


def test_an_adapter_of_peft_says_that_int8_is_off():
    model, plain, ids = optimised(routed()), routed(), tokens(2, 12)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj"])).eval()
    with torch.no_grad():
        with pytest.warns(UserWarning, match="merge LoRA first.*its own weights compute, not int8"):
            torch.testing.assert_close(adapted(ids).logits, plain(ids).logits, **CLOSE)
        again = adapted.merge_and_unload()
        torch.testing.assert_close(again(ids).logits, rounded(plain)(ids).logits, **CLOSE)


@pytest.mark.parametrize(("weights", "rotates"), [("int8", False), ("w8a8", True)])
@torch.no_grad()
def test_merged_lora_is_rounded_with_the_weights(weights, rotates):
    models, ids = [routed(), routed()], tokens(2, 4)
    for model in models:
        generator = torch.Generator().manual_seed(3)
        for parameter in add_lora(model, rank=2).parameters():
            parameter.normal_(generator=generator)
        with pytest.raises(NotAttachedError, match="merge LoRA first"):
            optimised(model.eval(), weights=weights)
        merge_lora(model)
    model, plain = models
    torch.testing.assert_close(
        optimised(model, weights=weights)(ids).logits, rounded(plain, rotates)(ids).logits, **CLOSE
    )
    assert not torch.allclose(model(ids).logits, rounded(routed(), rotates)(ids).logits, **CLOSE)


def test_what_cannot_be_quantised_is_refused_and_left_as_it_was():
    with pytest.raises(ConfigError, match=r"unknown weights 'fp8'; choose one of \['model', 'int8', 'w8a8'\]: int8 lo"):
        optimize(routed(), table=SMALL, weights="fp8")
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


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_memory_that_is_spared_is_told(family):
    model = optimised(routed(family))
    head = model.lm_head
    kept = head.weight.nbytes if head.weight is model.model.embed_tokens.weight else 0
    assert (kept > 0) == (family == "gemma2")
    original = sum(linear.weight.nbytes for linear in (*linears(model), head))
    scales = sum(4 * linear.out_features for linear in (*linears(model), head))
    assert attachment(model).engine.decoder.saved_bytes == original - kept - original // 4 - scales
    assert attachment(optimize(routed(), table=SMALL)).engine.decoder.saved_bytes == 0
