import pytest
import torch
from families import FAMILIES, make, tokens
from torch import nn
from torch.utils._pytree import tree_leaves

from wide.errors import DataError, UnsupportedModelError
from wide.methods.layer_runner import EditedWeights, LayerRunner
from wide.models.block_spec import plain_linear
from wide.models.discovery import discover


def stream_after_layers(model, specs, ids):
    """The output of every layer in the model's own forward."""
    seen = []

    def keep(_module, _args, output):
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = [spec.layer.register_forward_hook(keep) for spec in specs]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_give_what_the_model_gives(family):
    model = make(family)
    specs = discover(model)
    ids = tokens(5, 13)
    before = model(input_ids=ids).logits
    runner = LayerRunner(model, specs, ids, batch_size=2)
    assert [len(part) for part in runner.inputs] == [2, 2, 1]
    for spec, expected in zip(specs, stream_after_layers(model, specs, ids), strict=True):
        runner.advance(spec.index)
        torch.testing.assert_close(torch.cat(runner.inputs), expected)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_arguments_that_depend_on_tokens_are_those_of_each_micro_batch():
    model = make("gemma4_text", hidden_size_per_layer_input=8, vocab_size_per_layer_input=97)
    specs, ids = discover(model), tokens(5, 13)
    runner = LayerRunner(model, specs, ids, batch_size=2)
    for spec, expected in zip(specs, stream_after_layers(model, specs, ids), strict=True):
        runner.advance(spec.index)
        torch.testing.assert_close(torch.cat(runner.inputs), expected)


def test_arguments_that_are_equal_in_all_micro_batches_are_held_once():
    model = make("gemma3_text", sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    runner = LayerRunner(model, discover(model), tokens(6, 13), batch_size=2)
    for first, *others in zip(*runner._calls, strict=True):
        held = {id(leaf) for leaf in tree_leaves(first) if isinstance(leaf, torch.Tensor)}
        assert held
        assert all(id(leaf) in held for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor))


def test_observers_see_the_inputs_of_modules_inside_a_layer():
    model = make("llama")
    specs = discover(model)
    ids = tokens(3, 7)
    output, down = specs[1].attention.output, specs[1].ffn.down
    wanted = []
    handle = output.register_forward_pre_hook(lambda _m, args: wanted.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    runner = LayerRunner(model, specs, ids, batch_size=2)
    runner.advance(0)
    seen, widths = [], []
    runner.observe(1, {output: seen.append, down: lambda x: widths.append(x.shape[-1])})
    torch.testing.assert_close(torch.cat(seen), wanted[0])
    assert widths == [64, 64]
    torch.testing.assert_close(runner.input_inside(1, 1, output), wanted[0][2:])
    assert not output._forward_pre_hooks
    assert not down._forward_pre_hooks


def test_layers_after_a_pruned_one_run_on_its_outputs():
    model = make("llama")
    specs = discover(model)
    ids = tokens(2, 9)
    with EditedWeights(model) as weights:
        weights.set(specs[0].ffn.down, torch.zeros_like(specs[0].ffn.down.weight))
        expected = stream_after_layers(model, specs, ids)[-1]
        runner = LayerRunner(model, specs, ids, batch_size=2)
        runner.advance(0)
        runner.advance(1)
    torch.testing.assert_close(runner.inputs[0], expected)


def test_no_window_is_an_error():
    model = make("llama")
    with pytest.raises(DataError, match="at least one window"):
        LayerRunner(model, discover(model), torch.empty(0, 8, dtype=torch.int64), batch_size=2)


def test_edited_weights_come_back_bit_for_bit_even_after_an_error():
    model = make("llama").bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    down = discover(model)[0].ffn.down

    def fail():
        with EditedWeights(model) as weights:
            weights.set(down, torch.ones(down.weight.shape))
            weights.set(down, torch.zeros(down.weight.shape))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("module", [None, nn.Identity(), nn.Embedding(4, 4)])
def test_what_is_no_plain_linear_layer_is_refused_with_its_place(module):
    with pytest.raises(UnsupportedModelError, match="layer 7"):
        plain_linear(module, 7)
