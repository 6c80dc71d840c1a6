"""Forwards without packed sequences: nothing is read from the device, and nothing else changes."""

import threading
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from wide.config import ObjectiveConfig, WideConfig
from wide.data.batches import TokenBatch
from wide.models import packing
from wide.models.attach import attach
from wide.models.lora import add_lora
from wide.models.observe import forward_without_head
from wide.models.packing import unpacked
from wide.training.modes import training_mode
from wide.training.objective import Objective

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])


class Readings(TorchDispatchMode):
    """Counts the values of model tensors that the host asks for, which makes it wait where they are a GPU's."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Sizes of chunks are counted on the CPU everywhere.
        self.count += function is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.int64
        return function(*args, **(kwargs or {}))


def model_of(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=kinds)).eval()


def micro_batch(padding):
    ids = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, 10 - padding :] = False
    return TokenBatch(ids, ids.clone(), valid)


class Looking:
    """What every thread is told where nothing is taken for granted."""

    unpacked = property(lambda _: False, lambda _, value: None)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_micro_batch_reads_nothing_back_and_has_the_same_loss_and_gradients(kind, padding, monkeypatch):
    model = attach(model_of(kind), WideConfig(ffn_group_size=16, router_rank=4))
    add_lora(model, rank=2)
    objective = Objective(model, ObjectiveConfig(distillation=0.5))
    found = []
    for told in (Looking(), packing._TOLD):
        monkeypatch.setattr(packing, "_TOLD", told)
        with training_mode(model, routers=True, gradient_checkpointing=False):
            for _ in range(2):  # The first forward looks at what the model does with logits.
                torch.manual_seed(1)
                model.zero_grad()
                with Readings() as readings:
                    loss, _ = objective(micro_batch(padding), targets_in_step=17.0, padded=padding > 0)
                    loss.backward()
        found.append((readings.count, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]))
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    if not padding:
        kinds = 2 if kind == "gemma" else 1
        assert [count for count, _ in found] == [2 * kinds, 0]


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13") or Version(transformers.__version__) < Version("5.24"),
    reason="transformers leaves no mask out of a graph before 5.24 and torch 2.13",
)
@pytest.mark.parametrize(("kind", "masks"), [("llama", [False, False]), ("gemma", [True, False])])
def test_one_graph_of_all_layers_has_masks_only_where_a_window_needs_them(kind, masks, monkeypatch):
    has_mask = []

    def looking(graph, _inputs):
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        has_mask.extend(node.kwargs["attn_mask"] is not None for node in calls)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=looking))
    model = attach(model_of(kind), WideConfig(ffn_group_size=16, router_rank=4))
    with training_mode(model, routers=True, gradient_checkpointing=False, compile=True):
        Objective(model, ObjectiveConfig())(micro_batch(0))
    assert has_mask == masks


def test_scoring_reads_no_positions_and_packed_rows_are_still_found_elsewhere():
    model, ids = model_of("llama"), micro_batch(0).input_ids[:1]
    with torch.no_grad(), Readings() as readings:
        forward_without_head(model, ids)
        assert readings.count == 0
        alone = model(ids[:, 5:], use_cache=False).logits
        apart = []

        def packed():
            with torch.no_grad():
                apart.append(model(ids, position_ids=PACKED, use_cache=False).logits[:, 5:])

        with unpacked():
            thread = threading.Thread(target=packed)
            thread.start()
            thread.join()
        packed()
    for found in apart:
        torch.testing.assert_close(found, alone)
