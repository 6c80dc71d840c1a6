"""What cannot run fused is refused by name before anything changes, and nothing is slower without a word."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import make, tokens
from tables import fixed
from torch import nn

from wide.config import WideConfig
from wide.errors import ConfigError, NotAttachedError, ShapeError, UnsupportedBackendError, UnsupportedModelError
from wide.inference import optimize as optimize_module
from wide.inference.choice import measured
from wide.inference.choice import sample as sample_module
from wide.inference.engine import views
from wide.inference.operators.table import DENSE_TABLE, OperatorTable
from wide.inference.optimize import deoptimize, optimize
from wide.kernels.device import DeviceFacts
from wide.kernels.reorder.rows_reference import left_to_tiles
from wide.models.attach import attach, attachment, detach
from wide.models.lora import add_lora
from wide.models.observe import bypass, capture_routing, force_routing
from wide.plan import Dense

CONFIG = WideConfig(ffn_group_size=16)
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)


def refused(model, error, match, **options):
    """Check that `optimize` refuses a model and leaves it as it was."""
    before = {name: module.forward for name, module in model.named_modules()}
    with pytest.raises(error, match=match):
        optimize(model, **(options or {"table": SMALL}))
    assert not attachment(model).engine
    assert {name: module.forward for name, module in model.named_modules()} == before


def test_weights_that_are_not_in_memory_are_refused():
    model = attach(make("llama"), CONFIG)
    model.model.layers[1].mlp.down_proj.to("meta")
    refused(model, UnsupportedModelError, "layer 1: .* meta device")


def test_dynamic_quantisation_is_named():
    model = attach(make("llama"), CONFIG)
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    refused(model, UnsupportedModelError, "a projection was replaced after .*torch.*quantized.dynamic")


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_projections_of_several_dtypes_are_refused(name):
    model = attach(make("llama"), CONFIG)
    getattr(model.model.layers[1].mlp, name).double()
    refused(model, UnsupportedModelError, "layer 1: the projections must have one dtype, got .*float64")


def test_other_classes_and_odd_biases_are_refused():
    class Linear8bitLt(nn.Linear):
        pass

    model = attach(make("llama"), CONFIG)
    model.model.layers[1].mlp.down_proj.__class__ = Linear8bitLt
    refused(model, UnsupportedModelError, "a Linear8bitLt with a Parameter weight, not a plain linear layer")

    model = attach(make("llama"), CONFIG)
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.zeros(64))
    refused(model, UnsupportedModelError, "layer 0: FFN: some of the projections have a bias")


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("keeps_parameters", [False, True])
def test_sharded_models_are_refused(keeps_parameters):
    model = attach(make("llama"), CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.fsdp.FullyShardedDataParallel(
            model, use_orig_params=keeps_parameters, device_id=torch.device("cpu")
        )
    with pytest.raises(UnsupportedModelError, match="shard"):
        optimize(model, table=SMALL)
    assert not attachment(model).engine


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = attach(make("llama"), CONFIG)
    match = "backend 'triton' cannot run on cpu: .*choose backend='torch' or 'auto'"
    refused(model, UnsupportedBackendError, match, backend="triton")
    refused(model, UnsupportedBackendError, match, table=OperatorTable.fixed())


def test_groups_that_the_kernels_do_not_take_are_refused(monkeypatch):
    monkeypatch.setattr(optimize_module, "half_obstacle", lambda device, dtype: None)
    model = attach(make("llama"), WideConfig(ffn_group_size=8))
    match = "layer 0: gate_up: the Triton backend wants groups that 16 divides .*, got groups of 8 channels"
    refused(model, UnsupportedBackendError, match, backend="triton")
    few_only = fixed(query=None, output=None, gate_up=None)
    assert attachment(optimize(model, table=few_only)).engine
    model = attach(make("llama"), CONFIG)
    assert attachment(optimize(model, backend="triton")).engine


def test_training_while_optimised_says_what_to_do():
    model, ids = optimize(attach(make("llama"), CONFIG), table=SMALL), tokens(2, 12)
    for part in (model, model.model.layers[0].mlp):
        part.train()
        with pytest.raises(NotAttachedError, match=r"call wide\.deoptimize\(model\) first, or model\.eval"):
            model(ids)
        model.eval()
    with pytest.raises(NotAttachedError, match=r"no gradients; call wide\.deoptimize"):
        model(ids).logits.sum().backward()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.requires_grad_(False)
    with pytest.raises(NotAttachedError, match="no gradients"):
        (model(inputs_embeds=embedded).logits.sum() + embedded.sum()).backward()
    with pytest.raises(NotAttachedError, match="no gradients"):
        torch.autograd.grad(model(inputs_embeds=embedded).logits.sum(), embedded)
    with torch.no_grad():
        embedded[0] = torch.nan
        wanted = model(inputs_embeds=embedded).logits[1]
    assert wanted.isfinite().all()
    # What one sequence holds is nothing to another, with a gradient asked for, too.
    torch.testing.assert_close(model(inputs_embeds=embedded).logits[1], wanted)
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match="labels="):
        model(ids, labels=ids)
    deoptimize(model)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.up_proj.parameters())


def test_auto_measures_what_nothing_is_known_of_or_says_so(monkeypatch, tmp_path):
    model = attach(make("llama"), CONFIG)
    with pytest.warns(UserWarning, match="need a GPU, not cpu"):
        deoptimize(optimize(model))

    a100 = DeviceFacts(name="NVIDIA A100", capability=80, num_sms=108, shared_memory_bytes=1 << 17, l2_bytes=1 << 25)
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path))
    monkeypatch.setattr("wide.kernels.tuning.device_facts", lambda device: a100)
    monkeypatch.setattr(measured, "triton_obstacle", lambda device: None)
    monkeypatch.setattr(optimize_module, "device_facts", lambda device: a100)
    gpu = torch.device("cuda", 0)
    assert "float32" in measured.obstacle(gpu, torch.float32)
    assert measured.obstacle(gpu, torch.bfloat16) is None
    # The table itself is asked for the host, where there is nothing to choose.
    monkeypatch.setattr(optimize_module, "measured_table", lambda sizes, **named: DENSE_TABLE)
    like = SimpleNamespace(device=gpu, dtype=torch.bfloat16)
    monkeypatch.setattr(optimize_module, "_weight", lambda specs: like)
    asked = []
    monkeypatch.setattr(optimize_module, "tune_layers", lambda layers, **named: asked.append(named))
    with pytest.warns(UserWarning, match="no operator that skips is faster"):
        deoptimize(optimize(model, executed=(0.34, 0.5)))
    assert [(each["executed"], each["seconds"]) for each in asked] == [((0.34, 0.5), 90.0)]
    model.config._name_or_path = "models/mine"
    with pytest.warns(UserWarning, match="NVIDIA A100") as caught:
        deoptimize(optimize(model, executed=(0.34, 0.5), tune=False))
    assert len(asked) == 1
    sizes = [half.grouping.group_size for _, half in attachment(model).plan.layers[0].halves()]
    command = f"wide tune --model models/mine --attention_group_size {sizes[0]} --ffn_group_size {sizes[1]}"
    assert f"`{command} --executed 0.34,0.5`" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(model, table=SMALL)


def noted_tables(monkeypatch):
    """Return a list of what is asked of the measurements: executed shares and what is left to tiles."""
    asked = []

    def table(sizes, **named):
        asked.append((named["executed"], named["left"]))
        return DENSE_TABLE

    monkeypatch.setattr(optimize_module, "measured_table", table)
    return asked


def test_a_sample_tells_what_each_layer_executes(monkeypatch):
    model, ids, asked = attach(make("llama"), CONFIG).eval(), tokens(2, 70), noted_tables(monkeypatch)
    monkeypatch.setattr(sample_module, "LEAST_TOKENS", 140)
    deoptimize(optimize(model, executed=(0.3, 0.7)))
    assert asked == [((0.3, 0.7), None)] * 2
    asked.clear()
    with torch.no_grad(), capture_routing(model) as routing:
        model(ids)
    deoptimize(optimize(model, sample=ids))
    for (executed, left), layer in zip(asked, routing, strict=True):
        assert executed == pytest.approx((layer.attention.float().mean().item(), layer.ffn.float().mean().item()))
        # A tile that is not full would say that rows are alike.
        assert left == pytest.approx(left_to_tiles(layer.ffn.flatten(0, 1)[:128]))
    asked.clear()
    optimize(model, sample=ids[:, :69])
    assert [left for _, left in asked] == [None] * 2
    assert all(executed != (0.5, 0.5) for executed, _ in asked)


def test_samples_that_are_no_token_ids_and_those_nothing_would_follow_are_refused():
    model, ids = attach(make("llama"), CONFIG).eval(), tokens(2, 9)
    for wrong in (ids[0], ids.float(), ids[:, :0], ids.short()):
        refused(model, ShapeError, r"token ids, int32 or int64 \[batch, tokens\], got torch", sample=wrong)
    refused(model, ShapeError, r"int64 \[batch, tokens\], got list; give tokenizer", sample=ids.tolist())
    refused(model, ShapeError, r"must lie in 0 to \d+, got -1 to", sample=torch.cat((ids, ids.new_full((2, 1), -1)), 1))
    with bypass(model):
        refused(model, NotAttachedError, "outside of force_routing and bypass", sample=ids)
    for options in ({"backend": "torch"}, {"table": SMALL}):
        refused(model, ConfigError, "a sample tells backend='auto'", sample=ids, **options)


def test_a_sample_knows_of_halves_without_routers(monkeypatch):
    asked, plan = noted_tables(monkeypatch), attachment(attach(make("llama"), CONFIG)).plan
    layers = tuple(replace(layer, ffn=Dense()) for layer in plan.layers)
    optimize(attach(make("llama"), replace(plan, layers=layers)).eval(), sample=tokens(1, 9))
    assert [(executed[1], left) for executed, left in asked] == [(1.0, None)] * 2


def test_a_forward_sees_the_observers_masks():
    model, ids = attach(make("llama"), CONFIG), tokens(2, 12)
    with torch.no_grad(), capture_routing(model) as wanted:
        masked = model(ids).logits
    optimize(model, table=SMALL)
    with torch.no_grad(), capture_routing(model) as found, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.attention, theirs.attention)
        assert torch.equal(mine.ffn, theirs.ffn)
    with torch.no_grad(), force_routing(model, wanted), pytest.warns(UserWarning, match="force_routing"):
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-4)


def test_one_sequence_is_put_in_order_once(monkeypatch):
    made, original = [], views.reorder_sequences
    monkeypatch.setattr(
        views, "reorder_sequences", lambda mask, backend: made.append(1) or original(mask, backend=backend)
    )
    for batch, orders in ((1, 0), (2, 2)):
        model, ids = attach(make("llama"), CONFIG), tokens(batch, 20)
        with torch.no_grad():
            masked = model(ids).logits
            torch.testing.assert_close(optimize(model, table=SMALL)(ids).logits, masked, atol=1e-5, rtol=1e-4)
        assert len(made) == orders
        made.clear()


def test_what_the_engine_does_not_know_is_refused():
    refused(attach(make("apertus"), CONFIG), UnsupportedModelError, "no operator for the activation")
    refused(attach(make("llama"), replace(CONFIG, router_input="layer_input")), UnsupportedModelError, "layer's input")
    model = attach(make("llama"), CONFIG)
    with pytest.raises(NotAttachedError, match="not optimised"):
        deoptimize(model)
    refused(model.train(), NotAttachedError, r"model\.eval")
    add_lora(model.eval(), rank=2)
    refused(model, NotAttachedError, "merge LoRA")
    model = attach(make("llama"), CONFIG)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)
    refused(model, UnsupportedModelError, "logits differ")
    model = optimize(attach(make("llama"), CONFIG), table=SMALL)
    with pytest.raises(NotAttachedError, match="deoptimize"):
        detach(model)
    with pytest.raises(NotAttachedError, match="optimised already"):
        optimize(model, table=SMALL)
    with pytest.raises(ConfigError, match="unknown backend 'cuda'"):
        optimize(deoptimize(model), backend="cuda")


def test_projections_lie_together_while_optimised_and_apart_afterwards():
    model = attach(make("llama"), CONFIG)
    mlp = model.model.layers[0].mlp
    before = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
    mine = mlp.forward = lambda x: type(mlp).forward(mlp, x)
    optimize(model, table=SMALL)
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    deoptimize(model)
    assert len({w.untyped_storage().data_ptr() for w in (mlp.gate_proj.weight, mlp.up_proj.weight)}) == 2
    assert torch.equal(mlp.gate_proj.weight, before[0])
    assert torch.equal(mlp.up_proj.weight, before[1])
    assert mlp.forward is mine


def test_transforms_and_traces_run_masked():
    model, ids = attach(make("llama"), CONFIG).requires_grad_(False), tokens(2, 12)
    embedded = model.get_input_embeddings()(ids)

    def transformed():
        each = torch.func.vmap(lambda x: model(x[None], use_cache=False).logits[0])
        slope = torch.func.grad(lambda x: model(inputs_embeds=x, use_cache=False).logits.square().mean())
        with torch.no_grad():
            traced = torch.jit.trace(lambda x: model(x, use_cache=False).logits, (ids,), check_trace=False)
            return torch.stack([each(ids), traced(ids.flip(0)).flip(0)]), slope(embedded)

    wanted = transformed()
    optimize(model, backend="torch")
    with pytest.warns(UserWarning, match="a transform of torch.func or a trace does not run through the engine"):
        torch.testing.assert_close(transformed(), wanted)


def test_a_compiled_model_runs_masked():
    model, ids = attach(make("llama", num_hidden_layers=1), CONFIG), tokens(2, 12)
    with torch.no_grad():
        masked = model(ids).logits
        optimize(model, table=SMALL)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids).logits, masked, atol=1e-5, rtol=1e-4)
