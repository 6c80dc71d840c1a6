"""A tiny attached model and deterministic batches for the tests of this room."""

import os
import traceback

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wide.config import StageConfig, WideConfig
from wide.data.batches import IGNORED, TokenBatch
from wide.models.attach import attach

VOCABULARY = 64
# Importing everything again takes longer than what such processes do.
FORKS = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that was used allows no fork; hide it")
CONFIG = WideConfig(ffn_group_size=16, router_rank=4)


def dense_model(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def routed_model(**changes):
    model = attach(dense_model(**changes), CONFIG)
    return model


def batch(rows=4, length=16, *, seed=0, padding=0):
    """Random tokens; the last `padding` positions of every row are padding."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    valid = torch.ones_like(ids, dtype=torch.bool)
    if padding:
        valid[:, -padding:] = False
    return TokenBatch(input_ids=ids, labels=ids.masked_fill(~valid, IGNORED), valid=valid)


class RandomSource:
    """Batches by step, the same for everyone who asks; text that repeats, so that there is something to learn."""

    sequence_length = 16

    def batch_at(self, step, *, batch_size, rank=0, world=1):
        whole = batch(batch_size, self.sequence_length, seed=step % 7)
        share = batch_size // world
        part = slice(rank * share, (rank + 1) * share)
        return TokenBatch(input_ids=whole.input_ids[part], labels=whole.labels[part], valid=whole.valid[part])


def stage(**changes):
    return StageConfig(**({"steps": 12, "batch_size": 4, "sequence_length": 16, "learning_rate": 1e-2} | changes))


def in_child(work):
    """Run `work` in a forked process and return how it ended: its exit status, or minus a signal."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def freeze_noise(model):
    """Make sampling deterministic and equal for a token whatever its batch: noise from the router's own input."""
    import types

    from wide.models.attach import attachment
    from wide.models.router import EXECUTE, SKIP

    def forward(self, hidden):
        logits = self.logits(hidden)
        soft = torch.softmax(logits / self.control.sampling.temperature, -1)
        hard = (logits[..., EXECUTE] >= logits[..., SKIP]).float()
        mask = hard - soft[..., EXECUTE].detach() + soft[..., EXECUTE]
        if self.control.observed is not None:
            seen = self.control.observed[self.layer_index]
            setattr(seen, self.half_layer, mask)
            setattr(seen, f"{self.half_layer}_margin", logits[..., EXECUTE] - logits[..., SKIP])
        return mask

    for router in attachment(model).routers():
        router.forward = types.MethodType(forward, router)
    return model
