"""The runtime gives the model's logits: dense, routed under the same masks, and step by step after a prefill."""

import contextlib

import pytest
import torch
from families import DISTINCT, STRAIGHT, distinct, make, stirred, tokens
from tables import fixed
from torch._subclasses.fake_tensor import FakeTensorMode

from wide.config import WideConfig
from wide.errors import ShapeError, UnsupportedModelError
from wide.inference.choice.tuning.tune import tuned_layers
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.layer import ForwardOptions, force
from wide.inference.operators.table import DENSE_TABLE as UNSKIPPED
from wide.inference.operators.table import OPERATORS
from wide.models.attach import attach, attachment
from wide.models.observe import bypass, capture_routing

DENSE_TABLE = fixed("torch", query=None, attention=None, output=None, gate_up=None, down=None, few=())
SPARSE_TABLE = fixed("torch", query=1, attention=1, output=1, gate_up=1, down=1, few=OPERATORS)
MIXED_TABLE = fixed("torch", query=5, attention=1, output=None, gate_up=5, down=None, few=("gate_up",))
# As where nearly everything executes: attention over a cache skips no keys, but skipped heads must come out as zeros.
TABLES = (DENSE_TABLE, SPARSE_TABLE, MIXED_TABLE, UNSKIPPED)
SHAPES = [family for family in DISTINCT if family in STRAIGHT]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def _attached(family, **changes):
    return attach(stirred(make(family, **STRAIGHT[family])), WideConfig(ffn_group_size=16, router_rank=4, **changes))


@pytest.mark.parametrize("family", distinct(STRAIGHT))
def test_dense_and_routed_logits_are_the_models(family):
    model, ids = _attached(family), tokens(2, 12)
    with torch.no_grad(), bypass(model):
        dense = model(ids).logits
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    decoder = Decoder(model, max_length=16)
    cache = decoder.new_cache(2)
    found = decoder.prefill_logits(ids, cache, ForwardOptions(routed=False, table=DENSE_TABLE))
    torch.testing.assert_close(found, dense, **CLOSE)
    forced = force(decoder.layers, [(x.attention.flatten(0, 1), x.ffn.flatten(0, 1)) for x in routing])
    for table in TABLES:
        found = decoder.prefill_logits(ids, cache, ForwardOptions(table=table, forced=forced))
        torch.testing.assert_close(found, masked, **CLOSE)
    # The projections now view the engine's buffers, and the model still computes the same.
    with torch.no_grad(), bypass(model):
        torch.testing.assert_close(model(ids).logits, dense, **CLOSE)


@pytest.mark.parametrize(("family", "batch"), [(family, 5 if family in ("llama", "phi3") else 2) for family in SHAPES])
def test_steps_after_a_padded_prefill_equal_the_full_forward(family, batch):
    model, ids = _attached(family), tokens(batch, 12)
    decoder = Decoder(model, max_length=16)
    lengths = torch.tensor([7, 4, 6, 5, 7][:batch], dtype=torch.int32)
    for table in TABLES:
        for routed in (False, True):
            run = ForwardOptions(routed=routed, table=table)
            whole = decoder.prefill_logits(ids, decoder.new_cache(batch), run)
            cache = decoder.new_cache(batch)
            found = decoder.prefill(ids[:, :7], lengths, cache, run)
            rows = torch.arange(batch)
            torch.testing.assert_close(found, whole[rows, lengths.long() - 1], **CLOSE)
            for step in range(4):
                places = lengths.long() + step
                found = decoder.step(ids[rows, places], cache, run)
                torch.testing.assert_close(found, whole[rows, places], **CLOSE)
            assert torch.equal(cache.lengths, lengths + 4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in SHAPES), ("mistral", {"sliding_window": 4}), ("gemma2", {"sliding_window": 4})],
)
def test_tokens_behind_others_equal_the_full_forward_whoever_counts_them(family, changes):
    model = stirred(make(family, **{**STRAIGHT[family], **changes}))
    model, ids = attach(model, WideConfig(ffn_group_size=16, router_rank=4)), tokens(1, 12)
    decoder = Decoder(model, max_length=24)
    for table in TABLES:
        for routed in (False, True):
            run = ForwardOptions(routed=routed, table=table)
            whole = decoder.prefill_logits(ids, decoder.new_cache(1), run)[0]
            cache, other = decoder.new_cache(1), decoder.new_cache(1)
            for each in (cache, other):
                decoder.prompt(ids[:, :5], each, run)
            # Padding on the right is overwritten by what comes behind.
            padded = torch.cat([ids[:, 5:9], ids[:, :3]], 1)
            found = decoder.prefill(padded, torch.tensor([9]).int(), cache, run, torch.tensor([5]).int())
            torch.testing.assert_close(found, whole[None, 8], **CLOSE)
            assert cache.lengths.tolist() == [9]
            torch.testing.assert_close(decoder.step(ids[:, 9], cache, run), whole[None, 9], **CLOSE)
            stream = decoder.prompt(ids[:, 5:], other, run, past=5)
            torch.testing.assert_close(decoder.logits(stream, run), whole[5:], **CLOSE)


@pytest.mark.parametrize("attention_group_size", [8, 32])
def test_steps_without_skipped_keys_leave_zeros_in_skipped_heads(attention_group_size):
    # A head of its own for each group, so that a KV head serves several, or all heads in one.
    model, ids = _attached("llama", attention_group_size=attention_group_size), tokens(2, 9)
    decoder = Decoder(model, max_length=16)
    run = ForwardOptions(table=UNSKIPPED)
    whole = decoder.prefill_logits(ids, decoder.new_cache(2), run).view(2, 9, -1)
    cache = decoder.new_cache(2)
    decoder.prefill(ids[:, :8], torch.full((2,), 8, dtype=torch.int32), cache, run)
    torch.testing.assert_close(decoder.step(ids[:, 8], cache, run), whole[:, 8], **CLOSE)


@pytest.mark.parametrize(("heads", "apart"), [(4, 0), (6, 32)])
def test_races_know_where_keys_and_values_fill_no_groups_of_the_engine(heads, apart):
    shape = STRAIGHT["llama"] | {
        "hidden_size": 48,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    model = attach(stirred(make("llama", **shape)), WideConfig(ffn_group_size=16, router_rank=4))
    state = attachment(model)
    (layer,) = set(tuned_layers(state.specs, state.plan))
    assert layer.sizes.apart("query", 1) == apart
    extra = {each.attention.router.extra for each in Decoder(model, max_length=16).layers}
    assert (extra == {0}) == bool(apart)


@pytest.mark.parametrize("router_input", ["normed", "residual"])
def test_the_runtimes_own_routers_decide_as_the_models(router_input):
    model = _attached("llama", router_input=router_input, router_bias=True)
    ids = tokens(1, 10)
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    decoder = Decoder(model, max_length=16)
    record = []
    run = ForwardOptions(table=SPARSE_TABLE, record=record)
    torch.testing.assert_close(decoder.prefill_logits(ids, decoder.new_cache(1), run), masked, **CLOSE)
    for (attention, ffn), layer in zip(record, routing, strict=True):
        assert torch.equal(attention, layer.attention[0])
        assert torch.equal(ffn, layer.ffn[0])


def test_weights_are_shared_not_copied():
    model = _attached("llama")
    decoder = Decoder(model, max_length=8)
    layer, own = model.model.layers[0], decoder.layers[0]
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        assert linear.weight.untyped_storage().data_ptr() == own.attention.qkv.weight.untyped_storage().data_ptr()
    assert layer.mlp.up_proj.weight.data_ptr() == own.ffn.gated.up.weight.data_ptr()
    assert layer.mlp.down_proj.weight.data_ptr() == own.ffn.down.weight.data_ptr()


def test_other_structures_are_refused_with_the_reason():
    with pytest.raises(UnsupportedModelError, match="no operator for the activation"):
        Decoder(attach(make("apertus"), WideConfig(ffn_group_size=16)), max_length=16)


def test_another_dtype_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"in torch.float64; the engine takes .*bfloat16"):
        Decoder(_attached("llama").double(), max_length=16)


class _Shifted(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def _turned_backwards(q, k, cos, sin):
    return q * cos - q.roll(1, -1) * sin, k


def test_parts_that_nobody_reads_are_refused_by_name(monkeypatch):
    def refused(change, reason):
        model = make("llama")
        change(model.model, model.model.layers[1])
        with pytest.raises(UnsupportedModelError, match=reason):
            Decoder(attach(model, WideConfig(ffn_group_size=16)), max_length=16)

    linear = torch.nn.Linear(32, 32)
    refused(lambda base, layer: layer.add_module("further", linear), "layer 1 has further")
    refused(lambda base, layer: layer.self_attn.add_module("gate", linear), "attention has gate")
    refused(lambda base, layer: layer.mlp.register_parameter("scale", linear.weight), "FFN has scale")
    refused(lambda base, layer: setattr(layer, "beta", 0.5), "layer 1 has beta")
    refused(lambda base, layer: base.add_module("embed_norm", linear), "LlamaModel has embed_norm")
    refused(lambda base, layer: setattr(base, "embed_tokens", _Shifted(97, 32)), "_Shifted computes more")
    refused(lambda base, layer: setattr(layer.self_attn, "is_causal", False), "looks at later tokens")
    refused(lambda base, layer: setattr(layer, "post_attention_layernorm", layer.input_layernorm), "logits differ")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", _turned_backwards)
    refused(lambda base, layer: None, "in a way that the engine does not know")


def test_training_mode_and_overlong_prompts_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
        Decoder(_attached("llama").train(), max_length=16)
    decoder = Decoder(_attached("llama"), max_length=8)
    with pytest.raises(ShapeError, match="do not fit a cache of 1 x 8"):
        decoder.prefill_logits(tokens(1, 9), decoder.new_cache(1), ForwardOptions(routed=False, table=DENSE_TABLE))


class _Late:
    """In the place of a second stream: masks hold nothing that is true before somebody waits for them."""

    def __init__(self):
        self.runs, self.begun, self._copy, self.joined = False, 0, None, contextlib.nullcontext

    def begin(self, call):
        true = call()
        out = torch.rand(true.shape) < 0.5
        self.runs, self.begun, self._copy = True, self.begun + 1, lambda: out.copy_(true)
        return out

    def wait(self):
        if self.runs:
            self._copy()
            self.runs = False


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("table", [DENSE_TABLE, fixed("torch", query=None, output=1, gate_up=1, down=1), UNSKIPPED])
def test_masks_that_come_late_are_waited_for(family, table):
    decoder, ids = Decoder(_attached(family), max_length=16), tokens(2, 12)
    run = ForwardOptions(table=table, record=[])
    expected = decoder.prefill_logits(ids, decoder.new_cache(2), run)
    late, again = _Late(), ForwardOptions(table=table, record=[])
    decoder._side = late
    found = decoder.prefill_logits(ids, decoder.new_cache(2), again)
    assert late.begun
    assert not late.runs
    for pairs in zip(run.record, again.record, strict=True):
        for before, after in zip(*pairs, strict=True):
            assert (before is after is None) or torch.equal(before, after)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "weights", "table"),
    [
        # Every two of the three.
        (("llama", "gemma3_text")[(number + place) % 2], weights, table)
        for number, weights in enumerate(("model", "int8", "w8a8"))
        for place, table in enumerate((DENSE_TABLE, SPARSE_TABLE))
    ],
)
def test_nothing_in_a_forward_waits_for_the_device(family, weights, table):
    decoder = Decoder(_attached(family), max_length=640, tables=[table] * 2, weights=weights)
    # Tensors without values: who asks for one raises.
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids, cache, run = torch.zeros(2, 300, dtype=torch.long), decoder.new_cache(2, 640), ForwardOptions()
        decoder.prefill_logits(ids, cache, run)
        decoder.logits(decoder.prompt(ids, cache, run, past=300), run)
        decoder.step(ids[:, 0], cache, run)
        one, place = decoder.new_cache(1, 640), torch.zeros(1, dtype=torch.int32)
        assert decoder.prefill(ids[:1], place, one, run, starts=place).shape == (1, len(decoder.embedding))
