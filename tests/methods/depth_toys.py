"""Small models that have something to lose, and text that they wrote themselves."""

import copy
from contextlib import contextmanager

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wide.data.batches import TokenBlocks
from wide.data.token_stream import TokenStream
from wide.evaluation.perplexity import window_losses
from wide.methods import routed
from wide.models.cost import SkipCounter
from wide.models.discovery import discover
from wide.models.observe import capture_routing

VOCABULARY = 61


def toy_model(num_layers=4, *, seed=0, **changes):
    """Return a random float32 Llama that is sure of its next token, so that leaving a layer out costs something."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **(sizes | changes))).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            # Layers of different weight.
            layer.mlp.down_proj.weight *= 0.2 + 2 * torch.rand(())
            layer.self_attn.o_proj.weight *= 0.2 + 2 * torch.rand(())
        model.lm_head.weight *= 3
    return model


@torch.no_grad()
def own_text(model, rows, length, *, seed=0):
    """Return tokens that the model sampled, `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    while ids.shape[1] < length:
        probabilities = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids


def blocks_of(ids):
    """Return rows of tokens `[N, T]` as packed blocks, a document a row."""
    tokens = ids.flatten().numpy().astype(np.uint32)
    starts = np.arange(len(ids), dtype=np.int64) * ids.shape[1]
    return TokenBlocks(TokenStream(tokens=tokens, starts=starts, largest_id=int(ids.max())), ids.shape[1])


def cyclic_text(count=64, length=64, *, starts=(0,), vocabulary=64):
    """Return blocks in which the next token is one of three."""
    steps = np.random.default_rng(0).integers(1, 4, count * length)
    tokens = (np.cumsum(steps) % vocabulary).astype(np.uint32)
    stream = TokenStream(tokens=tokens, starts=np.array(starts, dtype=np.int64), largest_id=vocabulary - 1)
    return TokenBlocks(stream, length)


def random_text(length=512, block=16):
    """Return blocks of tokens 3 to 96."""
    ids = np.random.default_rng(0).integers(3, 97, length).astype(np.uint32)
    return TokenBlocks(TokenStream(tokens=ids, starts=np.array([0]), largest_id=96), block)


def random_ids(rows=2, length=9, vocabulary=64):
    """Return tokens, `[rows, length]`."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model, tokens, **options):
    """Return the logits of a plain forward."""
    return model(input_ids=tokens, **options).logits


@torch.no_grad()
def decoded(model, tokens, first):
    """Return the logits of cached decoding: a forward of the first tokens, then one of each further token."""
    out = model(input_ids=tokens[:, :first], use_cache=True)
    steps = [out.logits]
    for position in range(first, tokens.shape[1]):
        token = tokens[:, position : position + 1]
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        steps.append(out.logits)
    return torch.cat(steps, 1)


def counted(model, text, batch_size=16):
    """Return the sparsity of an attached model on packed text."""
    counter = SkipCounter(model)
    with capture_routing(model) as routing:
        for batch in text.in_order(batch_size):
            logits(model, batch.input_ids)
            counter.add(routing, batch.valid)
    return counter.result()


@contextmanager
def kept_weights(model):
    """Yield copies of a model's weights, which must be the same after the block."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield before
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.items())


@torch.no_grad()
def mean_nll(model, ids, batch_size=None):
    """Return the mean loss of a plain forward per predicted token, nats."""
    total = sum(
        window_losses(logits(model, rows, use_cache=False), rows)[0].sum() for rows in ids.split(batch_size or len(ids))
    )
    return float(total) / (ids.shape[0] * (ids.shape[1] - 1))


def train(model, route, blocks, target, settings, *, stage, objective, **run):
    """Train a dynamic method's routers to a target."""
    asked = routed.Routing(target=target, stage=stage, objective=objective)
    return routed.train(model, route, blocks, settings, asked, **run)


def without_layers(model, removed):
    """Return a copy with layers physically deleted."""
    shorter = copy.deepcopy(model)
    kept = [layer for index, layer in enumerate(shorter.model.layers) if index not in removed]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    shorter.model.layers = torch.nn.ModuleList(kept)
    shorter.config.num_hidden_layers = len(kept)
    return shorter


@torch.no_grad()
def silence(model, half):
    """Let a half-layer write zeros into the residual stream."""
    spec = discover(model)[half // 2]
    (spec.ffn.down if half % 2 else spec.attention.output).weight.zero_()


def snapshot(model):
    """Return everything that a method must leave as it found it."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    own = sum("forward" in m.__dict__ for m in model.modules())
    gradients = [parameter.grad for parameter in model.parameters()]
    return state, modes, flags, hooks, own, gradients


def assert_as_found(model, before):
    state, *facts, gradients = before
    now, *now_facts, now_gradients = snapshot(model)
    assert all(torch.equal(state[name], now[name]) for name in state)
    assert facts == now_facts
    assert all(old is new for old, new in zip(gradients, now_gradients, strict=True))
