"""Static plans through the engine: what is left of the matrices gives the masked model's logits and tokens."""

import warnings

import pytest
import torch
from families import DISTINCT, STRAIGHT, make, stirred, tokens
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from wide.config import WideConfig
from wide.errors import ConfigError, UnsupportedModelError
from wide.grouping import Grouping
from wide.inference import optimize as optimize_module
from wide.inference.engine import batching
from wide.inference.operators.table import OperatorTable
from wide.inference.optimize import deoptimize, optimize
from wide.materialisation.materialise import materialise
from wide.models.attach import attach, attachment, detach, plan_for
from wide.models.discovery import discover
from wide.models.observe import bypass
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped, Stream, scale_name

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
FAMILIES = [family for family in DISTINCT if family in STRAIGHT]
# The third KV head keeps nothing and the others keep different numbers of query heads.
HEADS = torch.tensor([[1.0, 0.2, 0.0, 0.5], [0.7, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).flatten()
SIZES = {"intermediate_size": 192, "num_attention_heads": 16, "num_key_value_heads": 4}
GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def pruned(kind, family="llama", **changes):
    """Return a model with a static plan: 'width', 'depth', 'empty' (no unit stays), 'stream' or 'weights'."""
    model = stirred(make(family, **{**STRAIGHT.get(family, {}), **SIZES, **changes}))
    dense, generator = LayerPlan(attention=Dense(), ffn=Dense()), torch.Generator().manual_seed(0)
    layers, tensors, stream, weights = [dense] * 2, {}, None, {}
    if kind == "depth":
        layers = [LayerPlan(attention=Skipped(), ffn=Dense()), LayerPlan(attention=Dense(), ffn=Skipped())]
    elif kind in ("width", "empty"):
        spec = discover(model)[1]
        channels = torch.rand(spec.ffn.width, generator=generator).round() * 1.25
        channels[0] = 1.0
        for name, scale in (("attention", HEADS), ("ffn", channels)):
            tensors[scale_name(1, name)] = scale * (kind == "width")
        kept = {name.split(".")[2]: int((scale != 0).sum()) for name, scale in tensors.items()}
        layers[1] = LayerPlan(
            attention=Kept(
                grouping=Grouping(spec.attention.query_width, spec.attention.head_dim), kept=kept["attention"]
            ),
            ffn=Kept(grouping=Grouping(spec.ffn.width, 1), kept=kept["ffn"]),
        )
    elif kind == "stream":
        stream = Stream(width=32, kept=20)
    elif kind == "weights":
        name = "model.layers.0.mlp.down_proj.weight"
        weights = {name: model.state_dict()[name] * 1.5}
    plan = Plan(tuple(layers), stream)
    for name, shape in plan.tensor_shapes().items():
        if name not in tensors:
            tensors[name] = torch.linalg.qr(torch.randn(shape, generator=generator))[0]
    return attach(model, plan, tensors=tensors, weights=weights)


def widths(model):
    layer = attachment(model).engine.decoder.layers[1]
    return layer.attention.query.outputs // layer.attention.head_dim, layer.ffn.down.weight.shape[1]


@pytest.mark.filterwarnings("error:wide.*masked model computes it")
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("width", family) for family in FAMILIES),
        *((kind, "llama") for kind in ("depth", "empty", "stream", "weights")),
        ("depth", "cohere2"),
        ("stream", "qwen3"),
        ("stream", "phi3"),
    ],
)
def test_logits_and_tokens_are_those_of_the_masked_model(kind, family):
    model, ids = pruned(kind, family), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = [{}, {"attention_mask": mask}]
    with torch.no_grad():
        wanted, dense = model(ids).logits, None
        texts = [model.generate(ids, **GREEDY, **more) for more in asked]
        with bypass(model):
            dense = model(ids).logits
    assert not torch.allclose(wanted, dense, **CLOSE)
    optimize(model, backend="torch")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, **CLOSE)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
        torch.testing.assert_close(embedded.logits, wanted, **CLOSE)
    assert all(
        torch.equal(model.generate(ids, **GREEDY, **more), text) for more, text in zip(asked, texts, strict=True)
    )
    if kind == "width":
        norms_width = attachment(model).specs[1].attention.q_norm == "width"
        assert widths(model) == (16 if norms_width else 12, 128)
    deoptimize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, **CLOSE)
        torch.testing.assert_close(detach(model)(ids).logits, dense, **CLOSE)


def _text(model, prompt, **more):
    return model.generate(torch.tensor([prompt]), **GREEDY | more)[0, len(prompt) :].tolist()


# The kernels run in Triton's interpreter.
@pytest.mark.batches_on_cpu
@pytest.mark.parametrize(("kind", "backend"), [("width", "triton"), ("depth", "torch"), ("stream", "torch")])
def test_kernels_and_requests_at_once_give_the_masked_models_tokens(kind, backend, monkeypatch):
    model = pruned(kind, head_dim=16)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 3)]
    # The interpreter takes most of a second a step.
    new = {"max_new_tokens": 2 if backend == "triton" else 3}
    wanted = [_text(model, each, **new) for each in prompts]
    monkeypatch.setattr(optimize_module, "half_obstacle", lambda device, dtype: None)
    optimize(model, table=OperatorTable(backend=backend))
    assert [_text(model, each, **new) for each in prompts] == wanted
    monkeypatch.setattr(batching, "_attend_masked", None)
    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    greedy = GenerationConfig(**GREEDY | new | {"eos_token_id": -1})
    found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=settings)
    assert [each.generated_tokens for each in found.values()] == wanted


def test_changes_and_the_dense_model_are_followed():
    model, ids = pruned("width"), tokens(1, 6)
    with torch.no_grad(), bypass(model):
        dense = model(ids).logits
    optimize(model, backend="torch")
    with torch.no_grad():
        with bypass(model), pytest.warns(UserWarning, match="the dense model behind a static plan"):
            torch.testing.assert_close(model(ids).logits, dense, **CLOSE)
        attachment(model).static_gates()[0].scale.mul_(2.0)
        model.model.layers[1].mlp.down_proj.weight.mul_(0.5)
        found = model(ids).logits
        torch.testing.assert_close(found, deoptimize(model)(ids).logits, **CLOSE)


def test_what_the_engine_does_not_run_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="weights='int8' is for routers"):
        optimize(pruned("width"), backend="torch", weights="int8")
    with pytest.raises(ConfigError, match="unknown weights 'int9'"):
        optimize(pruned("width"), weights="int9")
    with pytest.raises(ConfigError, match="a sample tells what routers execute, and this plan has none"):
        optimize(pruned("width"), sample=tokens(1, 4))
    with pytest.raises(UnsupportedModelError, match="cut already"):
        optimize(materialise(pruned("width")))
    model = make("llama")
    routed = plan_for(WideConfig(ffn_group_size=16), discover(model)).layers[0]
    mixed = Plan((routed, LayerPlan(attention=Skipped(), ffn=Dense())))
    with pytest.raises(UnsupportedModelError, match="has routers and also prunes the same"):
        optimize(attach(model, mixed), backend="torch")
    spare = pruned("stream")
    plan, tensors = attachment(spare).plan, attachment(spare).static_parameters()
    gone = Plan((plan.layers[0], LayerPlan(attention=Dense(), ffn=Skipped())), plan.stream)
    with pytest.raises(UnsupportedModelError, match="sublayers left out of a projected stream"):
        optimize(attach(detach(spare), gone, tensors=tensors), backend="torch")


def test_sizes_are_padded_with_zeros():
    model = pruned("width")
    with warnings.catch_warnings():
        # Words of routers, GPUs and what pays would be wrong here.
        warnings.simplefilter("error")
        ffn = attachment(optimize(model)).engine.decoder.layers[1].ffn
    kept = int((attachment(model).static_gates()[1].scale != 0).sum())
    assert 64 < kept < 128
    assert not ffn.down.weight[:, kept:].any()
    assert not ffn.gated.gate.weight[kept:].any()
    stream = attachment(optimize(pruned("stream"), backend="torch")).engine.decoder.layers[0].attention
    assert stream.qkv.weight.shape[1] == 64
    assert not stream.qkv.weight[:, 20:].any()
