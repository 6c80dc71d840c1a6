import pytest
import torch
from depth_toys import logits
from depth_toys import random_text as text
from families import make, tokens
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from wide.errors import ConfigError, UnsupportedModelError
from wide.methods.calibration import windows
from wide.methods.catalogue import SliceGPTConfig
from wide.methods.method import Target
from wide.methods.slicegpt import decide, kept_dimensions, principal_basis, removed_share, stream_bases
from wide.models.attach import attach, detach
from wide.models.discovery import discover
from wide.models.stream import project
from wide.plan import Dense, LayerPlan, Plan, Stream

SETTINGS = SliceGPTConfig(num_windows=12, window_length=16, batch_size=5, round_to=1)


def llama(**changes):
    """A tiny Llama whose norm gains are not 1 and whose embeddings have a mean."""
    model = make("llama", initializer_range=0.3, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.model.embed_tokens.weight.add_(0.2)
    return model


def sliced_logits(model, ids, bases):
    """The sliced model written out: norms fused, weights rotated and cut, shortcuts, divisor D.

    `bases` are those of the embedding and of every half-layer; the last is the identity.
    """
    config, state = model.config, model.state_dict()
    width, head_dim, heads, kv_heads = config.hidden_size, config.head_dim, 4, 2

    def scale_free_norm(stream):
        return stream / (stream.square().sum(-1, keepdim=True) / width + config.rms_norm_eps).sqrt()

    stream = state["model.embed_tokens.weight"] @ bases[0]
    stream = stream[ids]
    cos, sin = model.model.rotary_emb(stream, position_ids=torch.arange(ids.shape[1])[None])
    for index in range(config.num_hidden_layers):
        weights = {n.split(".", 3)[3]: v for n, v in state.items() if n.startswith(f"model.layers.{index}.")}
        own, middle, end = bases[2 * index : 2 * index + 3]
        gains = weights["input_layernorm.weight"]
        normed = scale_free_norm(stream)

        def heads_of(name, count, gains=gains, own=own, normed=normed, weights=weights):
            rotated = (weights[f"self_attn.{name}.weight"] * gains) @ own
            return (normed @ rotated.T).unflatten(-1, (count, head_dim)).transpose(1, 2)

        query, key = apply_rotary_pos_emb(heads_of("q_proj", heads), heads_of("k_proj", kv_heads), cos, sin)
        attended = F.scaled_dot_product_attention(
            query, key, heads_of("v_proj", kv_heads), is_causal=True, enable_gqa=True
        )
        output = attended.transpose(1, 2).flatten(-2) @ (middle.T @ weights["self_attn.o_proj.weight"]).T
        stream = stream @ (own.T @ middle) + output
        gains = weights["post_attention_layernorm.weight"]
        normed = scale_free_norm(stream)
        gate, up = (normed @ ((weights[f"mlp.{name}.weight"] * gains) @ middle).T for name in ("gate_proj", "up_proj"))
        stream = stream @ (middle.T @ end) + (F.silu(gate) * up) @ (end.T @ weights["mlp.down_proj.weight"]).T
    return scale_free_norm(stream) @ (state["lm_head.weight"] * state["model.norm.weight"]).T


def in_order(tensors, num_layers, width, dtype=torch.float64):
    names = ["stream.embedding"]
    names += [f"layers.{index}.{half}.basis" for index in range(num_layers) for half in ("attention", "ffn")]
    return [*(tensors[name].to(dtype) for name in names[:-1]), torch.eye(width, dtype=dtype)]


def random_bases(num_layers, width, kept):
    generator = torch.Generator().manual_seed(5)
    bases = [
        torch.linalg.qr(torch.randn(width, kept, generator=generator, dtype=torch.float64))[0]
        for _ in range(2 * num_layers)
    ]
    return [*bases, torch.eye(width, dtype=torch.float64)]


@pytest.fixture
def exact_norms(monkeypatch):
    """Norms of the model in its own dtype; the library's round to float32."""

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.parametrize("kept", [1, 13, 24, 32])
def test_projecting_the_stream_equals_rotated_and_sliced_weights(exact_norms, kept):
    model = llama().double()
    ids = tokens(2, 11)
    bases = random_bases(2, 32, kept)
    expected = sliced_logits(model, ids, bases)

    def halves():
        for index, layer in enumerate(model.model.layers):
            yield layer.input_layernorm, layer.self_attn, bases[2 * index + 1]
            yield layer.post_attention_layernorm, layer.mlp, bases[2 * index + 2]

    def after(projection, seen):
        def hook(_module, _args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden = (seen[0] + hidden) @ projection - seen[0]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    handles = [model.model.embed_tokens.register_forward_hook(lambda _m, _a, out: out @ bases[0] @ bases[0].T)]
    for norm, module, basis in halves():
        seen = [None]
        handles.append(norm.register_forward_pre_hook(lambda _m, args, seen=seen: seen.__setitem__(0, args[0])))
        handles.append(module.register_forward_hook(after(basis @ basis.T, seen)))
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_decided_runs_as_the_sliced_model(exact_norms, tied):
    model = llama(tie_word_embeddings=tied, num_hidden_layers=3).double()
    decision = decide(model, text(), Target(sparsity=0.3), SETTINGS)
    assert decision.plan.stream == Stream(width=32, kept=22)
    ids = tokens(2, 11)
    expected = sliced_logits(model, ids, in_order(decision.tensors, 3, 32))
    attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
    # The bases are kept in float32, so their columns are orthonormal to about 1e-7.
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-4)


def test_nothing_sliced_is_the_dense_model():
    model = llama()
    ids = tokens(2, 11)
    dense = logits(model, ids)
    specs = discover(model)
    bases, dropped = stream_bases(model, specs, tokens(12, 16, seed=3), kept=32, batch_size=4)
    plan = Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in specs), Stream(width=32, kept=32))
    attach(model, plan, tensors=bases)
    torch.testing.assert_close(logits(model, ids), dense, rtol=0, atol=1e-3)
    assert set(dropped.values()) == {0.0}


def test_subtracting_the_mean_of_embeddings_would_change_an_rmsnorm_model():
    model = llama()
    ids = tokens(2, 11)
    dense = logits(model, ids)
    with torch.no_grad():
        model.model.embed_tokens.weight.sub_(model.model.embed_tokens.weight.mean(1, keepdim=True))
    assert float((logits(model, ids) - dense).norm() / dense.norm()) > 0.05


@pytest.mark.parametrize("width", [1, 7, 32])
def test_principal_bases_are_orthonormal_and_drop_the_least_energy(width):
    signals = [(torch.randn(3, 5, width) * torch.arange(1, width + 1)).bfloat16() for _ in range(2)]
    flat = torch.cat(signals).flatten(0, 1).double()
    energies = torch.linalg.eigvalsh(flat.T @ flat)
    before = 1.0
    for kept in range(1, width + 1):
        basis, dropped = principal_basis(signals, kept)
        torch.testing.assert_close(basis.T @ basis, torch.eye(kept, dtype=torch.float64))
        assert dropped == pytest.approx(float(energies[: width - kept].sum() / energies.sum()), abs=1e-9)
        left = float((flat - project(flat, basis)).square().sum() / flat.square().sum())
        assert left == pytest.approx(dropped, abs=1e-9)
        assert dropped <= before
        before = dropped


def test_bases_belong_to_the_stream_of_the_sliced_prefix():
    model = llama()
    decision = decide(model, text(), Target(sparsity=0.5), SETTINGS)
    ids = windows(text(), count=12, length=16, seed=42)
    layer = model.model.layers[0]
    with torch.no_grad():
        stream = model.model.embed_tokens(ids)
        position = model.model.rotary_emb(stream, position_ids=torch.arange(16)[None])
        for name, half in (
            ("stream.embedding", None),
            ("layers.0.attention.basis", lambda x: layer.self_attn(layer.input_layernorm(x), position, None)[0]),
            ("layers.0.ffn.basis", lambda x: layer.mlp(layer.post_attention_layernorm(x))),
        ):
            signal = stream if half is None else stream + half(stream)
            basis = decision.tensors[name]
            wanted, dropped = principal_basis([signal], 16)
            torch.testing.assert_close(basis @ basis.T, (wanted @ wanted.T).float(), rtol=0, atol=1e-4)
            assert decision.notes["dropped_energy"][name] == pytest.approx(dropped, rel=1e-3)
            stream = project(signal, basis).to(signal.dtype)
    assert "layers.1.ffn.basis" not in decision.tensors
    assert decision.effort.tokens_forward == 12 * 16


def test_a_stream_that_lies_in_a_subspace_is_cut_without_loss():
    model = llama()
    basis = torch.linalg.qr(torch.randn(32, 16))[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ basis @ basis.T)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(basis @ basis.T @ linear.weight)
    ids = tokens(2, 11)
    dense = logits(model, ids)
    decision = decide(model, text(), Target(sparsity=0.5), SETTINGS)
    attach(model, decision.plan, tensors=decision.tensors)
    torch.testing.assert_close(logits(model, ids), dense, rtol=0, atol=1e-3)


def specs_of(size):
    shapes = {
        "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    }
    config = LlamaConfig(**shapes[size], num_key_value_heads=8, head_dim=128, vocab_size=128)
    with torch.device("meta"):
        return discover(LlamaForCausalLM(config))


def test_the_number_of_weights_is_the_closed_form():
    specs = specs_of("8B")
    body = 6_979_321_856
    assert -removed_share(specs, 4096) * body == pytest.approx(2 * 32 * 4096**2)
    assert (1 - removed_share(specs, 3072)) * body / 1e9 == pytest.approx(5.856, abs=5e-4)
    for kept, removed in ((4096, -0.154), (3072, 0.161), (2048, 0.457)):
        assert removed_share(specs, kept) == pytest.approx(removed, abs=6e-4)


@pytest.mark.parametrize(
    ("size", "sparsity", "fraction"), [("8B", 0.25, 0.324), ("8B", 0.5, 0.536), ("3B", 0.25, 0.334), ("3B", 0.5, 0.542)]
)
def test_the_width_for_a_share_of_the_work_counts_shortcuts(size, sparsity, fraction):
    specs = specs_of(size)
    kept = kept_dimensions(specs, Target(sparsity=sparsity, match="linear_flops"), 8)
    assert kept % 8 == 0
    # The published fractions leave out the full width of the last FFN's output.
    assert 1 - kept / specs[0].hidden_size == pytest.approx(fraction, abs=3e-3)


@pytest.mark.parametrize(
    ("sparsity", "round_to", "kept"), [(0.25, 8, 24), (0.3, 8, 16), (0.3, 1, 22), (0.1, 1, 28), (0.96, 1, 1)]
)
def test_nominal_sparsity_is_the_slicing_fraction(sparsity, round_to, kept):
    assert kept_dimensions(discover(make("llama")), Target(sparsity=sparsity), round_to) == kept


def test_no_dimension_left_is_refused():
    with pytest.raises(ConfigError, match="round_to = 8"):
        decide(make("llama"), text(), Target(sparsity=0.9), SliceGPTConfig())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "granite", "cohere2"])
def test_other_streams_are_refused_before_any_text_is_read(family):
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        decide(make(family), None, Target(sparsity=0.5), SETTINGS)


def test_a_norm_that_subtracts_the_mean_is_refused():
    model = make("llama")
    model.model.layers[1].post_attention_layernorm = torch.nn.LayerNorm(32)
    with pytest.raises(UnsupportedModelError, match="LayerNorm is not an RMS norm"):
        decide(model, text(), Target(sparsity=0.5), SETTINGS)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "phi3", "smollm3", "arcee", "helium", "ernie4_5"])
def test_other_families_keep_their_weights_and_run_their_plan(family):
    model = make(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decision = decide(model.bfloat16(), text(), Target(sparsity=0.25), SETTINGS)
    attach(model, decision.plan, tensors=decision.tensors)
    assert torch.isfinite(logits(model, tokens())).all()
    detach(model)
    assert all(torch.equal(value, before[name].bfloat16()) for name, value in model.state_dict().items())
