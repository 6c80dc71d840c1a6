"""FFN channels in another order: the same function, every executor, every way to save, and back bit for bit."""

import json

import pytest
import torch
from families import FAMILIES, distinct, make, tokens
from plans import kept_plan
from safetensors.torch import save_file
from torch import nn

from wide.config import WideConfig
from wide.errors import AdapterError, ConfigError, NotAttachedError, ShapeError, UnsupportedModelError
from wide.inference.engine.decoder import Decoder
from wide.inference.optimize import deoptimize, optimize
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.adapter import ORDER_FILE, load, save
from wide.models.attach import attach, attachment, detach, is_attached, plan_for
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.observe import bypass, capture_routing, force_routing
from wide.models.regroup import RegroupedChannels, order_name

CONFIG = WideConfig(ffn_group_size=16, router_rank=4, ffn_grouping="clustered")
CLOSE = {"atol": 1e-4, "rtol": 1e-3}


def orders_of(model):
    """A random order for each FFN of a model."""
    generator = torch.Generator().manual_seed(3)
    return {
        order_name(spec.index): torch.randperm(spec.ffn.width, generator=generator)
        for spec in discover(model)
        if spec.ffn is not None
    }


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def regrouped(family="llama"):
    model = make(family)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            # Families set biases to zero, which would hide one that stays behind.
            nn.init.normal_(parameter, std=0.2)
    return model, orders_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_set_of_channels_is_a_group_and_detach_puts_every_bit_back(family):
    model, orders = regrouped(family)
    ids, before = tokens(), {name: value.clone() for name, value in model.state_dict().items()}
    dense = logits(model, ids)
    attach(model, CONFIG, orders=orders)
    with bypass(model):
        torch.testing.assert_close(logits(model, ids), dense, **CLOSE)
    with capture_routing(model) as routing:
        found = logits(model, ids)
    detach(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # By hand: in the untouched model, each channel is skipped with the group that its order has put it into.
    handles = []
    for spec, layer in zip(discover(model), routing, strict=True):
        mask = layer.ffn.repeat_interleave(16, dim=-1)[..., orders[order_name(spec.index)].argsort()]

        def mask_channels(_module, args, mask=mask):
            return (args[0] * mask, *args[1:])

        handles.append(spec.ffn.down.register_forward_pre_hook(mask_channels))
        layer.ffn = torch.ones_like(layer.ffn)
    attach(model, WideConfig(ffn_group_size=16, router_rank=4))
    with force_routing(model, routing):
        torch.testing.assert_close(found, logits(model, ids), **CLOSE)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_fused_execution_and_files_keep_the_order(family, tmp_path):
    model, orders = regrouped(family)
    ids, base = tokens(), {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, CONFIG, orders=orders)
    wanted = logits(model, ids)
    save(model, tmp_path / "adapter")
    again = make(family)
    again.load_state_dict(base)
    load(again, tmp_path / "adapter")
    assert torch.equal(logits(again, ids), wanted)
    found = attachment(again).regrouped.orders()
    assert all(torch.equal(found[name], order) for name, order in orders.items())
    detach(again)
    assert all(torch.equal(value, base[name]) for name, value in again.state_dict().items())
    if family not in ("apertus", "cohere2"):
        optimize(model, backend="torch")
        torch.testing.assert_close(logits(model, ids), wanted, **CLOSE)
        deoptimize(model)
    detach(model)
    assert all(torch.equal(value, base[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_runtime_and_full_checkpoints_run_the_order(family, tmp_path):
    model, orders = regrouped(family)
    attach(model, CONFIG, orders=orders)
    ids = tokens()
    wanted = logits(model, ids)
    save_checkpoint(model, tmp_path / "full")
    again = load_checkpoint(tmp_path / "full", dtype=torch.float32)
    assert torch.equal(logits(again, ids), wanted)
    with pytest.raises(NotAttachedError, match="another order"):
        save(again, tmp_path / "adapter")
    save_checkpoint(again, tmp_path / "second")
    assert torch.equal(logits(load_checkpoint(tmp_path / "second", dtype=torch.float32), ids), wanted)
    if family == "llama":
        optimize(model, backend="torch")
        decoder = Decoder(model, max_length=32)
        assert decoder is not None


def test_lora_lives_on_the_order_and_goes_with_it(tmp_path):
    pytest.importorskip("peft")
    model, orders = regrouped()
    ids, before = tokens(), {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, CONFIG, orders=orders)
    pruned = logits(model, ids)
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.0)
    assert torch.equal(logits(model, ids), pruned)
    for parameter in handle.parameters():
        nn.init.normal_(parameter, std=0.1)
    tuned = logits(model, ids)
    save(model, tmp_path / "adapter")
    again = load(regrouped()[0], tmp_path / "adapter")
    assert torch.equal(logits(again, ids), tuned)
    with capture_routing(again) as routing:
        logits(again, ids)
    attachment(again).lora.merge()
    with force_routing(again, routing):
        torch.testing.assert_close(logits(again, ids), tuned, **CLOSE)
    detach(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_has_changed_its_dtype_is_put_back():
    model, orders = regrouped()
    wanted = {name: value.double() for name, value in model.state_dict().items()}
    attach(model, CONFIG, orders=orders)
    detach(model.double())
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_some_layers_may_keep_their_order(tmp_path):
    model, orders = regrouped()
    one = {order_name(1): orders[order_name(1)]}
    attach(model, CONFIG, orders=one)
    assert set(attachment(model).regrouped.orders()) == {order_name(1)}


def test_what_fits_no_model_is_refused_before_anything_moves():
    model, orders = regrouped()
    ids = tokens()
    dense = logits(model, ids)
    name = order_name(1)
    cases = [
        (orders | {"layers.7.ffn.order": orders[name]}, "names of this model"),
        (orders | {name: orders[name].int()}, "int64 of shape"),
        (orders | {name: orders[name][:-1]}, "int64 of shape"),
        (orders | {name: torch.zeros(64, dtype=torch.int64)}, "no permutation"),
    ]
    for wrong, reason in cases:
        with pytest.raises(ShapeError, match=reason):
            attach(model, CONFIG, orders=wrong)
    plan, scales = kept_plan(model)
    with pytest.raises(ShapeError, match="does not route"):
        attach(model, plan, tensors=scales, orders=orders)
    with pytest.raises(ConfigError, match="needs text"):
        attach(model, CONFIG)
    weights = {"model.layers.0.mlp.down_proj.weight": torch.zeros(32, 64)}
    with pytest.raises(ConfigError, match="together"):
        attach(model, CONFIG, orders=orders, weights=weights)
    assert not is_attached(model)
    assert torch.equal(logits(model, ids), dense)


class Quantised(nn.Linear):
    """A linear whose weight is a parameter of another class, as quantisers make them."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)

        class Packed(nn.Parameter):
            pass

        self.weight = Packed(linear.weight.detach())


def test_quantised_layers_and_ffns_that_know_places_are_refused_and_left_alone():
    model, orders = regrouped()
    model.model.layers[1].mlp.down_proj = Quantised(model.model.layers[1].mlp.down_proj)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*Packed.*adjacent"):
        attach(model, CONFIG, orders=orders)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    class Placed(nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x) * torch.linspace(0, 2, x.shape[-1])

    model, orders = regrouped()
    model.model.layers[1].mlp.act_fn = Placed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"another function"):
        attach(model, CONFIG, orders=orders)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not is_attached(model)


def test_weights_that_are_not_in_memory_are_refused():
    model, orders = regrouped()
    mlp = model.model.layers[1].mlp
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach().to("meta"))
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*offloaded"):
        attach(model, CONFIG, orders=orders)
    assert not is_attached(model)


def test_layers_that_share_their_ffn_are_put_back():
    model, orders = regrouped()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    before = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    specs, plan = discover(model), plan_for(CONFIG, discover(model))
    RegroupedChannels(specs, plan, {name: orders[name] for name in (order_name(0), order_name(1))}).restore()
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)


def test_damaged_orders_are_named(tmp_path):
    model, orders = regrouped()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, CONFIG, orders=orders)
    folder = save(model, tmp_path / "adapter")
    detach(model)
    # What the sha256 of the file tells is tested elsewhere.
    config = json.loads((folder / "wide_config.json").read_text())
    config.pop("files")
    (folder / "wide_config.json").write_text(json.dumps(config))
    save_file(orders | {order_name(0): torch.zeros(64, dtype=torch.int64)}, str(folder / ORDER_FILE))
    with pytest.raises(AdapterError, match=r"damaged.*no permutation"):
        load(model, folder)
    (folder / ORDER_FILE).unlink()
    with pytest.raises(AdapterError, match=r"wide_order.*missing"):
        load(model, folder)
    assert not is_attached(model)
    assert all(torch.equal(value, base[name]) for name, value in model.state_dict().items())
