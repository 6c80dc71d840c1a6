"""Layer skipping: one mask for both halves, tokens that pass a layer unchanged, and a toy that meets its target."""

import pytest
import torch
from depth_toys import counted, kept_weights, logits, train
from depth_toys import cyclic_text as blocks
from depth_toys import random_ids as ids
from recount import layer_weights
from tiny import dense_model, stage

from wide.config import ObjectiveConfig
from wide.errors import ConfigError
from wide.methods.catalogue import DLLMConfig
from wide.methods.dllm import route
from wide.methods.method import Target
from wide.methods.routed import Routing
from wide.models.adapter import load
from wide.models.attach import attach, attachment, is_attached
from wide.models.discovery import discover
from wide.models.observe import capture_routing, force_routing
from wide.plan import Following, Routed
from wide.routing import LayerRouting
from wide.training.modes import training_mode
from wide.training.objective import Objective

SETTINGS = DLLMConfig(router_rank=8)


def routed_model():
    """A model whose routers stand as they begin."""
    model = dense_model()
    asked = Routing(target=Target(sparsity=0.5), stage=stage(), objective=ObjectiveConfig())
    return attach(model, route(discover(model), SETTINGS, asked).config)


def masks(value):
    return [LayerRouting(attention=torch.full((2, 9, 1), value, dtype=torch.bool)) for _ in range(2)]


def test_executing_all_is_dense_and_skipping_all_is_the_head_on_the_embedding():
    model, tokens = routed_model(), ids()
    with force_routing(model, masks(True)):
        assert torch.equal(logits(model, tokens), logits(dense_model(), tokens))
    with force_routing(model, masks(False)):
        empty = model.lm_head(model.model.norm(model.model.embed_tokens(tokens)))
        assert torch.equal(logits(model, tokens), empty)


def test_a_skipping_token_passes_the_layer_and_stays_visible():
    model, tokens, seen = routed_model(), ids(), []
    model.model.layers[0].register_forward_hook(
        lambda _m, args, output: seen.append((args[0], output[0] if isinstance(output, tuple) else output))
    )
    wanted = masks(True)
    with force_routing(model, wanted):
        logits(model, tokens)
    wanted[0].attention[:, 4] = False
    with force_routing(model, wanted), capture_routing(model) as routing:
        logits(model, tokens)
    (_, dense), (stream, skipping) = seen
    others = torch.arange(9) != 4
    assert torch.equal(skipping[:, 4], stream[:, 4])
    assert torch.equal(skipping[:, others], dense[:, others])
    for layer in routing:
        assert torch.equal(layer.attention, layer.ffn)
    assert int((~routing[0].ffn).sum()) == 2


@pytest.mark.parametrize("cut", ["self_attn.o_proj", "mlp.down_proj", None])
def test_the_router_learns_from_both_halves(cut):
    model = routed_model()
    data = blocks().batch([0, 1])
    with torch.no_grad():
        for layer in model.model.layers:
            if cut is not None:
                layer.get_submodule(cut).weight.zero_()
    torch.manual_seed(0)
    with training_mode(model, routers=True, gradient_checkpointing=False):
        loss, _ = Objective(model, ObjectiveConfig(weight=0.0))(data)
        loss.backward()
    gradients = [router.up.grad.abs().sum() for router in attachment(model).routers()]
    assert len(gradients) == 2
    assert all(float(gradient) > 0 for gradient in gradients)


@pytest.mark.parametrize("match", ["nominal", "linear_flops"])
@pytest.mark.usefixtures("every_point")
def test_training_meets_the_target_with_the_routers_alone(match, tmp_path):
    model, text = dense_model(), blocks()
    run = {"stage": stage(steps=20, batch_size=16), "objective": ObjectiveConfig(), "output": tmp_path}
    with kept_weights(model):
        effort, deviations = train(model, route, text, Target(sparsity=0.4, match=match), SETTINGS, **run)
    for layer in attachment(model).plan.layers:
        assert isinstance(layer.attention, Routed)
        assert isinstance(layer.ffn, Following)
        assert (layer.attention.grouping.num_groups, layer.attention.rank) == (1, 8)
    found, work = counted(model, text), layer_weights(discover(model)[0])
    assert found.attention == found.ffn == found.mean
    # Keys and values are always computed.
    share = found.mean if match == "nominal" else found.mean * (work.total - work.key_value) / work.total
    assert share == pytest.approx(0.4, abs=0.02)
    assert effort.tokens_backward == 20 * 16 * 64
    assert any("evicts" in sentence for sentence in deviations)
    again = load(dense_model(), tmp_path / "adapter")
    assert torch.equal(logits(again, ids()), logits(model, ids()))


def test_errors_come_before_anything_is_attached():
    model, run = dense_model(), {"stage": stage(), "objective": ObjectiveConfig()}
    with pytest.raises(ConfigError, match="stay below"):
        train(model, route, blocks(), Target(sparsity=0.95, match="linear_flops"), SETTINGS, **run)
    assert not is_attached(model)
    with pytest.raises(ConfigError, match="router_rank"):
        DLLMConfig(router_rank=0)
