"""Threads that share one masked model get what they would get alone, and context managers act on their own thread."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from threading import Barrier, Event, Thread

import pytest
import torch
from families import make, tokens
from materialise_plans import width_plan
from plans import kept_plan, layer_skip_plan, module_skip_plan, skipped_plan, stream_plan

from wide.config import WideConfig
from wide.materialisation.materialise import materialise
from wide.models.attach import attach, attachment
from wide.models.observe import bypass, capture_routing, force_routing
from wide.models.thresholds import set_sparsity
from wide.routing import LayerRouting
from wide.training.modes import layers_run

THREADS, CALLS = 4, 100
LENGTHS = (1, 3, 7, 12, 20)


def routed(model=None):
    return attach(model or make("llama"), WideConfig(ffn_group_size=16))


def skips_layers(model=None):
    options = {"form": "dllm", "router_input": "layer_input", "evicts": True, "first_tokens": 2}
    model = model or make("llama")
    return attach(model, layer_skip_plan(model, **options))


def sliced(model):
    plan, values = width_plan(model, [[0, 1, 2], [1, 2, 3]], [40, 30])
    return materialise(attach(model, plan, tensors=values))


def planned(model, plan, tensors=None):
    return attach(model, plan, tensors=tensors)


MODELS = {
    "routed": routed,
    "residual": lambda model: attach(model, module_skip_plan(model, form="mlp", router_input="residual")),
    "layers": skips_layers,
    "kept": lambda model: planned(model, *kept_plan(model)),
    "skipped": lambda model: attach(model, skipped_plan(model, {(0, "ffn"), (1, "attention")})),
    "stream": lambda model: planned(model, *stream_plan(model, 24)),
    "sliced": sliced,
}


def at_once(run, calls=CALLS):
    """Call `run(thread, index)` for all indices from several threads together; return what they gave, by index."""
    start = Barrier(THREADS)

    def part(thread):
        start.wait()
        return {index: run(thread, index) for index in range(thread, calls, THREADS)}

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(part, range(THREADS)))
    return [parts[index % THREADS][index] for index in range(calls)]


@torch.no_grad()
def logits(model, index):
    return model(tokens(1 + index % 2, LENGTHS[index % 5], seed=index % 10)).logits


@pytest.mark.parametrize("kind", MODELS)
def test_forwards_in_threads_give_what_they_give_alone(kind):
    model = MODELS[kind](make("llama"))
    alone = [logits(model, index) for index in range(10)]
    found = at_once(lambda _, index: logits(model, index), 200 if kind == "routed" else 60)
    assert all(torch.equal(value, alone[index % 10]) for index, value in enumerate(found))


@pytest.mark.parametrize("kind", ["routed", "layers"])
def test_generation_in_threads_gives_what_it_gives_alone(kind):
    model = MODELS[kind](make("llama"))

    def generate(_, index):
        ids = tokens(1 + index % 2, LENGTHS[index % 5], seed=index % 10)
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "max_new_tokens": 4}
        return model.generate(ids, **given).tolist()

    alone = [generate(0, index) for index in range(10)]
    assert at_once(generate, 60) == alone * 6


def test_a_compiled_model_is_the_same_in_threads():
    model = routed()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = [tokens(2, 7, seed=seed) for seed in range(10)]
    with torch.no_grad():
        alone = [model(each).logits for each in ids]
        compiled(ids[0])
    found = at_once(lambda _, index: torch.no_grad()(compiled)(ids[index % 10]).logits, 40)
    for index, value in enumerate(found):
        torch.testing.assert_close(value, alone[index % 10])


def test_context_managers_act_on_their_own_thread():
    model, ids = routed(), tokens()
    forced = [LayerRouting(attention=torch.rand(2, 12, 2) < 0.5, ffn=torch.rand(2, 12, 4) < 0.5) for _ in range(2)]

    @torch.no_grad()
    def run(thread, _):
        if thread == 0:
            return model(ids).logits
        with bypass(model) if thread == 1 else force_routing(model, forced):
            if thread != 3:
                return model(ids).logits
            with capture_routing(model) as routing:
                model(ids)
            return torch.cat([mask.flatten() for layer in routing for mask in (layer.attention, layer.ffn)])

    alone = [run(thread, 0) for thread in range(THREADS)]
    assert not any(torch.equal(alone[a], alone[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(alone[3], torch.cat([m.flatten() for layer in forced for m in (layer.attention, layer.ffn)]))
    found = at_once(run)
    assert all(torch.equal(value, alone[index % THREADS]) for index, value in enumerate(found))


def test_the_dense_model_of_one_thread_leaves_replaced_weights_to_the_others():
    model = make("llama")
    dense = [logits(model, index) for index in range(10)]
    weights = {name: value.detach() * 0.5 for name, value in model.named_parameters() if "_proj" in name}
    attach(model, skipped_plan(model, set()), weights=weights)
    replaced = [logits(model, index) for index in range(10)]

    def run(thread, index):
        with bypass(model) if thread % 2 else nullcontext():
            return logits(model, index)

    for index, value in enumerate(at_once(run)):
        assert torch.equal(value, (dense if index % 2 else replaced)[index % 10])


def test_a_forward_beside_a_change_of_thresholds_runs_each_router_by_the_old_or_the_new():
    model, ids = routed(), tokens()
    routers, thresholds = attachment(model).routers(), (-9.0, 9.0)

    @torch.no_grad()
    def run():
        return model(ids).logits

    possible = []
    for mixture in product(thresholds, repeat=len(routers)):
        for router, threshold in zip(routers, mixture, strict=True):
            router.threshold = threshold
        possible.append(run())
    assert len({tuple(value.flatten().tolist()) for value in possible}) == 16
    done = Event()

    def change():
        while not done.is_set():
            for threshold in thresholds:
                set_sparsity(model, threshold=threshold)

    changing, interval = Thread(target=change), sys.getswitchinterval()
    # Of the usual five milliseconds the forwards would wait for the interpreter for up to a minute.
    sys.setswitchinterval(1e-4)
    changing.start()
    try:
        found = [run() for _ in range(2 * CALLS)]
    finally:
        done.set()
        changing.join()
        sys.setswitchinterval(interval)
    assert all(any(torch.equal(value, one) for one in possible) for value in found)
    set_sparsity(model, threshold=thresholds[0])
    assert torch.equal(run(), possible[0])


@pytest.mark.parametrize("how", ["layers", "forced"])
def test_a_layer_that_is_recomputed_in_another_thread_is_what_it_was(how):
    model, ids = skips_layers() if how == "layers" else routed(), tokens()
    model.train()
    masks = [LayerRouting(ffn=torch.rand(2, 24, 4) < 0.5) for _ in range(2)]
    found = []
    for recompute in (False, True):
        model.zero_grad()
        with layers_run(model, recompute=recompute):
            torch.manual_seed(1)
            with force_routing(model, masks) if how == "forced" else nullcontext():
                model(ids, labels=ids, use_cache=False)
                loss = model(ids, labels=ids, use_cache=False).loss
            # As on GPUs, where a thread of autograd's own runs the backward.
            backward = Thread(target=loss.backward)
            backward.start()
            backward.join()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(found[1], found[0])
