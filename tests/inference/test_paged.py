"""Continuous batching of an optimised model gives the masked model's tokens, and skips."""

import itertools
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from families import make, stirred, tokens
from tables import fixed
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

from wide.config import WideConfig
from wide.inference.engine import batching
from wide.inference.engine.batching import PagedView
from wide.inference.engine.memory import Memory
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import attach, attachment
from wide.models.observe import bypass

pytestmark = pytest.mark.batches_on_cpu
CONFIG = WideConfig(ffn_group_size=16)
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)
# The name of the size of a page has changed.
PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
# The kernels run in Triton's interpreter.
BACKENDS = ["torch", "triton"]
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 3, 30)]


def _settings(**more):
    return ContinuousBatchingConfig(**{PAGE: 4, "num_blocks": 64, "max_batch_tokens": 64, **more})


def _greedy(new=5):
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _alone(model, prompt, new=5):
    return model.generate(torch.tensor([prompt]), generation_config=_greedy(new))[0, len(prompt) :].tolist()


def _batch(model, prompts=PROMPTS, **more):
    found = model.generate_batch(prompts, generation_config=_greedy(), continuous_batching_config=_settings(**more))
    return [output.generated_tokens for output in found.values()]


def _never(*_args, **_options):
    raise AssertionError("the family's attention ran")


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("mistral", {"sliding_window": 6}), ("gemma2", {"sliding_window": 8}), ("granite", {})],
)
def test_tokens_are_those_of_the_masked_model(family, changes, monkeypatch):
    model = attach(stirred(make(family, **changes)), CONFIG)
    wanted = [_alone(model, prompt) for prompt in PROMPTS]
    before = model.config._attn_implementation
    optimize(model, table=SMALL)
    monkeypatch.setattr(batching, "_attend_masked", _never)
    tables, read = [], batching._read_pages
    monkeypatch.setattr(batching, "_read_pages", lambda *given: tables.append(given) or read(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert _batch(model) == wanted
        # Chunks of prompts beside requests that decode; steps that read pages in place, as on a GPU.
        assert _batch(model, max_batch_tokens=7, max_blocks_per_request=16) == wanted
        assert len(tables) > 0 or "sliding_window" in changes
    assert model.config._attn_implementation == before
    assert [_alone(model, prompt) for prompt in PROMPTS] == wanted
    deoptimize(model)
    assert "init_continuous_batching" not in vars(model)
    assert _batch(model) == wanted


def test_without_routing_it_is_the_dense_model():
    model = make("llama")
    wanted = [_alone(model, prompt) for prompt in PROMPTS]
    attach(model, CONFIG)
    # transformers runs batches in a thread of its own.
    for _ in ("masked", "optimised"):
        with bypass(model):
            assert _batch(model) == wanted
        assert _batch(model) != wanted
        optimize(model, table=SMALL) if attachment(model).engine is None else None


def test_what_the_engine_does_not_take_runs_masked_and_says_so(monkeypatch):
    # Triton's interpreter would take ten seconds.
    monkeypatch.setattr(batching, "half_obstacle", lambda *_: "slow")
    model = attach(stirred(make("llama")), CONFIG)
    wanted = [_alone(model, prompt) for prompt in PROMPTS]
    optimize(model, table=SMALL)
    model.config.output_hidden_states = True
    with pytest.warns(UserWarning, match="output_hidden_states= does not run through the engine"):
        assert _batch(model) == wanted


def test_requests_come_and_go():
    model = attach(make("llama"), CONFIG)
    draw = random.Random(0)
    shared = tokens(1, 13, seed=99)[0].tolist()
    requests = {}
    for number in range(14):
        prompt = tokens(1, draw.randint(1, 40), seed=number)[0].tolist()
        # Some begin alike, so that they share pages.
        requests[f"r{number}"] = (shared * draw.randint(0, 1) + prompt, draw.randint(1, 12))
    wanted = {name: _alone(model, *request) for name, request in requests.items()}
    optimize(model, table=SMALL)
    names, found = list(requests), {}
    draw.shuffle(names)
    door = model.continuous_batching_context_manager
    settings = _settings(max_batch_tokens=24, max_blocks_per_request=8)
    with door(generation_config=_greedy(), continuous_batching_config=settings) as manager:
        while len(found) < len(requests):
            for name in [names.pop() for _ in range(min(len(names), draw.randint(0, 3)))]:
                manager.add_request(requests[name][0], request_id=name, max_new_tokens=requests[name][1])
            output = manager.get_result(timeout=0.05 if names else 60)
            if output is not None:
                found[output.request_id] = output.generated_tokens
            elif not names:
                pytest.fail(f"no answer; {len(found)} of {len(requests)} are here")
    assert found == wanted


def _set(model, threshold):
    for router in attachment(model).routers():
        router.threshold = threshold


@pytest.mark.parametrize("keeps", [False, True])
def test_thresholds_count_from_the_next_batch_on(keeps):
    model, values = attach(make("llama"), CONFIG), (0.0, 0.3, 0.0)
    wanted = []
    for value in values:
        _set(model, value)
        wanted.append([_alone(model, prompt, 3) for prompt in PROMPTS])
    assert wanted[0] != wanted[1]
    optimize(model, table=SMALL)
    managers = []
    for value, tokens_wanted in zip(values, wanted, strict=True):
        _set(model, value)
        asked = {
            "generation_config": _greedy(3),
            "continuous_batching_config": _settings(),
            "persistent_manager": keeps,
        }
        for _ in range(2 if keeps else 1):
            found = model.generate_batch(PROMPTS, **asked)
            managers.append(getattr(model, "_cached_continuous_batching_manager", None))
            assert [output.generated_tokens for output in found.values()] == tokens_wanted
    # One that is kept serves as long as nothing changes.
    assert not keeps or all(first is second for first, second in zip(managers[::2], managers[1::2], strict=True))
    assert len(set(map(id, managers))) == (len(values) if keeps else 1)


def test_a_capture_decides_as_the_step_before_it(monkeypatch):
    model = attach(make("llama"), CONFIG)
    _set(model, 0.3)
    wanted = [_alone(model, prompt) for prompt in PROMPTS]
    _set(model, 0.0)
    optimize(model, table=SMALL)
    _set(model, 0.3)
    calls = []
    # transformers runs a step once before it captures it.
    follow = Memory.follow
    monkeypatch.setattr(Memory, "follow", lambda *given: len(calls) > 1 or calls.append(1) or follow(*given))
    assert _batch(model) == wanted


class _OnDevice(TorchDispatchMode):
    """Refuses what waits for a device, or has shapes that only values know."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", [0, 16])
def test_padded_steps_are_right_and_read_nothing_on_the_host(blocks, monkeypatch):
    model = attach(make("llama"), CONFIG)
    wanted = [_alone(model, prompt) for prompt in PROMPTS]
    optimize(model, table=SMALL)
    begin, step = ModelRunner.__init__, ModelRunner._forward_process_and_sample

    def padding(runner, *args, **kwargs):
        begin(runner, *args, **kwargs)
        runner.pad_inputs = True

    def watched(*args, **kwargs):
        with _OnDevice():
            return step(*args, **kwargs)

    # As for CUDA graphs, which capture such steps.
    monkeypatch.setattr(ModelRunner, "__init__", padding)
    monkeypatch.setattr(ModelRunner, "_forward_process_and_sample", watched)
    # Few sizes: each is run once beforehand, in the interpreter.
    intervals = {"q_padding_interval_size": 20, "kv_padding_interval_size": 64, "num_blocks": 32}
    assert _batch(model, max_batch_tokens=40, max_blocks_per_request=blocks, **intervals) == wanted


def _attended(given, q, k, v, mask, backend, window=None):
    """Return the attention output [Q, H_q, d] of a step, heads first, of layer 0."""
    view = PagedView(given)
    *memory, places = view.memory(0, k[0].transpose(0, 1)[:, None])
    for kept, new in zip(memory, (k, v), strict=True):
        kept[0].index_copy_(0, places, new[0].transpose(0, 1))
    scores = {"scale": None, "soft_cap": None, "backend": backend}
    return view.mix(0, q[0].transpose(0, 1), mask[0], window, scores, zero_skipped=True)


def _memory(lengths, size, kind):
    """Return a paged cache of one layer, pages of all requests mixed, what is not written NaN; and their tables."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // size) for length in lengths]
    free = torch.randperm(sum(counts), generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    keys, values = (torch.full((sum(counts) + 1, size, 2, 64), float("nan"), dtype=torch.float16) for _ in range(2))
    for table, length in zip(tables, lengths, strict=True):
        for place in range(length):
            for part in (keys, values):
                part[table[place // size], place % size] = torch.randn(2, 64, generator=generator)
    trash = sum(counts) * size
    if kind == "allocators":
        allocator = SimpleNamespace(
            layer_type="full_attention",
            index=0,
            write_trash_index=trash,
            get_cache_for_block_table=lambda layer: (keys, values),
        )
        cache = SimpleNamespace(layer_to_allocator={0: allocator})
    else:
        cache = SimpleNamespace(
            sliding_windows={0: 1},
            layer_index_to_group_indices={0: (0, 0)},
            block_size=size,
            write_trash_index=trash,
            key_cache=[keys.flatten(0, 1)],
            value_cache=[values.flatten(0, 1)],
        )
    return cache, keys, values, tables


def _wanted(q, keys, values, mask):
    scores = torch.einsum("hd,thd->ht", q, keys.float().repeat_interleave(2, 1)) * 64**-0.5
    out = torch.einsum("ht,thd->hd", scores.softmax(-1), values.float().repeat_interleave(2, 1))
    return torch.where(mask.repeat_interleave(2)[:, None], out, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["allocators", "groups"])
def test_decode_steps_read_pages_where_they_lie(backend, kind, poisoned_memory, monkeypatch):
    if kind == "groups":
        # More requests than the kernel takes at once.
        monkeypatch.setattr(batching, "MAX_PAIRS", 4)
    lengths, size = [9, 1, 33], 4
    cache, keys, values, tables = _memory(lengths, size, kind)
    table = torch.full((1, 4, 10), -1, dtype=torch.int32)
    for row, pages in enumerate(tables):
        table[0, row, : len(pages)] = torch.tensor(pages)
    q, k, v = (torch.randn(1, heads, 4, 64).half() for heads in (4, 2, 2))
    mask = torch.tensor([[[True, False], [True, True], [False, True], [True, True]]])
    # The last request is a padded one.
    cu = torch.tensor([0, 9, 10, 43, 43], dtype=torch.int32)
    out = _attended({"cache": cache, "cu_seq_lens_k": cu, "block_table": table}, q, k, v, mask, backend)
    for row, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        mine = [part[pages].flatten(0, 1)[:length] for part in (keys, values)]
        assert torch.equal(mine[0][-1], k[0, :, row])
        torch.testing.assert_close(
            out[row].float(), _wanted(q[0, :, row].float(), *mine, mask[0, row]), atol=2e-3, rtol=1e-2
        )
    assert not out[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("long", [3, 70])
@pytest.mark.parametrize("window", [None, 5])
def test_mixed_steps_of_prompts_and_tokens(backend, long, window, poisoned_memory):
    queries, pasts = [1, long, 1, 4], [11, 2, 0, 9]
    lengths = [past + count for past, count in zip(pasts, queries, strict=True)]
    total, padded = sum(queries), 6
    # Keys behind the last request's are padding, too.
    keys, values = (torch.randn(1, 2, sum(lengths) + 5, 64).half() for _ in range(2))
    keys[:, :, sum(lengths) :] = values[:, :, sum(lengths) :] = float("nan")
    kind = "full_attention" if window is None else "sliding_attention"
    pages = [part[0].transpose(0, 1)[:, None] for part in (keys, values)]
    allocator = SimpleNamespace(
        layer_type=kind, index=0, write_trash_index=0, get_cache_for_block_table=lambda layer: pages
    )
    cache = SimpleNamespace(layer_to_allocator={0: allocator}, update=lambda **_: (keys, values))
    q = torch.randn(1, 4, total + padded, 64).half()
    mask = torch.rand(1, total + padded, 2, generator=torch.Generator().manual_seed(1)) < 0.6
    ends = [torch.tensor([0, *counts, 0, 0]).cumsum(0).int() for counts in (queries, lengths)]
    given = {"cache": cache, "cu_seq_lens_q": ends[0], "cu_seq_lens_k": {kind: ends[1]}, "block_table": None}
    # Keys of all requests are there, new ones included: nothing is written that is read.
    nowhere = torch.full((total + padded,), keys.shape[2] - 1)
    given |= {"write_index": [nowhere], "read_index": [torch.arange(keys.shape[2])]}
    out = _attended(given, q, *(q[:, :2],) * 2, mask, backend, window)
    token = 0
    for request, count in enumerate(queries):
        for place in range(count):
            high = int(ends[1][request + 1]) - count + place + 1
            low = int(ends[1][request]) if window is None else max(int(ends[1][request]), high - window)
            seen = [part[0, :, low:high].transpose(0, 1) for part in (keys, values)]
            wanted = _wanted(q[0, :, token].float(), *seen, mask[0, token])
            torch.testing.assert_close(out[token].float(), wanted, atol=2e-3, rtol=1e-2)
            token += 1
    assert not out[total:].any()


@pytest.mark.parametrize("is_last_alone", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_requests_that_decode_beside_prompts_get_what_all_get_together(is_last_alone, skips, monkeypatch):
    """Requests of one token run apart on a GPU; padded requests and tokens stand behind."""
    for name in ("attention_decode", "attention_prefill", "reorder_sequences"):
        operator = getattr(batching, name)
        monkeypatch.setattr(
            batching, name, lambda *given, operator=operator, **how: operator(*given, **how | {"backend": "torch"})
        )
    lengths, past = [1, 60, 1, 1 if is_last_alone else 9, 0, 0], [5, 0, 11, 2, 0, 0]
    cu_q = torch.tensor([0, *itertools.accumulate(lengths)])
    cu_k = torch.tensor([0, *itertools.accumulate(map(sum, zip(lengths, past, strict=True)))])
    real, rows = int(cu_q[-1]), int(cu_q[-1]) + 5
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 4, 16, generator=draw)
    k, v = torch.randn(2, 1, int(cu_k[-1]), 2, 16, generator=draw)
    mask = torch.rand(rows, 2, generator=draw) < 0.5 if skips else None
    runs = batching._read_runs(cu_q, cu_k, rows, None)
    scores = {"scale": None, "soft_cap": None}
    found = [
        batching._attend_runs(q, k, v, mask, runs, scores | {"backend": backend}, zero_skipped=True)[:real]
        for backend in ("torch", "triton")
    ]
    torch.testing.assert_close(found[1], found[0])
