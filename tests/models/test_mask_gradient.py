"""The mask enters once: its gradient is the paper's on executed and on skipped groups."""

import pytest
import torch
from families import make, stirred, tokens
from torch.nn import functional

import wide
from wide.config import WideConfig
from wide.models.attach import attach, attachment
from wide.models.discovery import discover
from wide.models.observe import force_routing, observe
from wide.models.router import LinearInPieces
from wide.routing import LayerRouting


def test_the_gradient_of_the_ffn_mask_is_the_papers_on_skipped_groups_too():
    torch.manual_seed(0)
    model = attach(make("llama"), WideConfig(ffn_group_size=16))
    mlp = attachment(model).specs[0].ffn.module
    router = mlp.wide_router
    x, weight = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 5, 4).clone().requires_grad_(True)
    product = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    # The formula of the paper: (phi(X Wg) * (X Wu)) masked per group, once, before the down projection.
    expected = functional.linear(
        (product.unflatten(-1, (4, 16)) * mask.unsqueeze(-1)).flatten(-2), mlp.down_proj.weight
    )
    (wanted,) = torch.autograd.grad((expected * weight).sum(), mask)

    again = mask.detach().clone().requires_grad_(True)
    router.forward = lambda _hidden: again
    out = mlp(x)
    (found,) = torch.autograd.grad((out * weight).sum(), again)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wanted)
    assert found[..., 1:3].abs().min() > 0


def test_router_gradient_through_a_hard_mask_equals_the_soft_one_of_the_same_sample():
    """Straight-through: d(loss)/d(mask) flows into the soft probabilities of the very sample that was drawn."""
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    model.train()
    with observe(model) as routing:
        torch.manual_seed(3)
        loss = model(ids, labels=ids).loss
    masks = [m for layer in routing for m in (layer.attention, layer.ffn)]
    for mask in masks:
        mask.retain_grad()
    loss.backward()
    skipped = [(m.grad[m.detach() == 0]).abs().mean() for m in masks]
    executed = [(m.grad[m.detach() == 1]).abs().mean() for m in masks]
    assert all(s > 0 for s in skipped)
    assert all(e > 0 for e in executed)


def test_forced_float_masks_pass_gradients():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens(1, 4)
    model.train()
    masks = [
        LayerRouting(attention=torch.ones(1, 4, 2, requires_grad=True), ffn=torch.zeros(1, 4, 4, requires_grad=True))
        for _ in range(2)
    ]
    with force_routing(model, masks):
        model(ids, labels=ids).loss.backward()
    assert all(layer.ffn.grad.abs().sum() > 0 and layer.attention.grad.abs().sum() > 0 for layer in masks)


@pytest.mark.parametrize("half", ["attention", "ffn"])
@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "glm4"])
def test_the_gradient_through_a_norm_behind_a_sublayer_is_that_of_the_jump(family, half):
    model, ids = attach(stirred(make(family)), WideConfig(ffn_group_size=16)).train(), tokens(1, 6)
    part, seen = dict(attachment(model).specs[0].sublayers())[half], []
    part.post_norm.register_forward_hook(lambda _norm, args, output: seen.append((args[0].detach(), output)))
    masks = [LayerRouting(attention=torch.ones(1, 6, 2), ffn=torch.ones(1, 6, 4)) for _ in range(2)]
    mask = getattr(masks[0], half)

    def run():
        with force_routing(model, masks):
            return model(ids).logits

    with torch.no_grad():
        run()
        mask[0, 0] = mask[0, 1, 1:] = 0
        wanted = run()
    mask.requires_grad_(True)
    logits = run()
    assert torch.equal(logits, wanted)
    (full, opened), _, (sizes, output) = [(x.square().mean(-1).sqrt()[0], out) for x, out in seen]
    assert torch.equal(output[0, 0], torch.zeros(32))
    slope, found = torch.autograd.grad((logits * torch.randn(logits.shape)).sum(), (output, mask))
    # To first order, of opening all groups, at the size of the rows that run, and of closing the only one that does.
    opening = (slope[0, 0] * opened[0, 0]).sum() * full[0] / sizes[1:].mean()
    torch.testing.assert_close(found[0, 0].sum(), opening, rtol=0.02, atol=0.0)
    torch.testing.assert_close(found[0, 1, 0], (slope[0, 1] * output[0, 1]).sum(), rtol=0.02, atol=1e-4)


def test_a_norm_after_a_forward_that_broke_off_gives_the_engine_its_own_values():
    model = attach(make("gemma3_text"), WideConfig(ffn_group_size=16)).train()
    breaks = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens(2, 6))
    breaks.remove()
    wide.optimize(model.eval(), backend="torch")
    assert model(tokens(3, 5)).logits.shape[:2] == (3, 5)


def test_the_norm_of_an_ffn_beside_experts_is_its_own_not_that_of_their_sum():
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    model = make("gemma4_text", **experts, hidden_size_per_layer_input=0)
    assert discover(model)[0].ffn.post_norm is model.model.layers[0].post_feedforward_layernorm_1


def test_products_of_bfloat16_pieces_are_the_float32_product():
    inputs = torch.randn(50, 64, dtype=torch.bfloat16, requires_grad=True)
    weight, slope = torch.randn(6, 64, requires_grad=True), torch.randn(50, 6)
    found = LinearInPieces.apply(inputs, weight)
    found.backward(slope)
    exact = inputs.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = functional.linear(*exact)
    wanted.backward(slope.double())
    assert (found.dtype, inputs.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for ours, theirs in ((found, wanted), (weight.grad, exact[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-4)
    assert (inputs.grad.double() - exact[0].grad).norm() < 2**-8 * exact[0].grad.norm()
