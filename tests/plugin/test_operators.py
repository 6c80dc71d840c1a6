"""What the plug-in runs on a GPU, through reference operators and Triton's interpreter: products, pages, prompts."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from wide.inference.operators.table import OperatorTable
from wide.inference.reading.quantising import WEIGHTS
from wide.kernels.dispatch import Backends
from wide.kernels.int8 import hadamard, quantise_int8, rotated
from wide.kernels.linear_int8.op import MAX_WHOLE_ROWS
from wide.kernels.route.reference import margins
from wide.kernels.route.weights import split_weights

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
from vllm.forward_context import override_forward_context

from wide.grouping import Grouping
from wide.plan import Routed
from wide.vllm import operators, pages, sublayers, warming
from wide.vllm.limits import Pruning
from wide.vllm.pages import _Implementation, split_step

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 48
TABLES = {"dense": OperatorTable(backend="torch"), "skipping": OperatorTable.fixed("torch")}


@pytest.fixture(params=TABLES)
def table(request, monkeypatch):
    monkeypatch.setattr(operators, "table_of", lambda *_: TABLES[request.param])


def router(groups, extra=0):
    """Return a router's weights with groups behind them that always execute."""
    made = split_weights(torch.randn(8, HIDDEN), torch.randn(2 * groups, 8), None, dtype=torch.float32)
    always = torch.cat((torch.zeros(groups), torch.full((extra,), torch.inf)))
    return made._replace(difference=functional.pad(made.difference, (0, 0, 0, extra)), offset=always)


def spread(mask, width):
    return mask.repeat_interleave(width // mask.shape[1], 1)


def stored(weight, form, rotates=1):
    """Return a weight as a format keeps it, its scales, what its rows are rotated by, and what all stand for."""
    if form == "model":
        return weight, None, None, weight
    rotation = hadamard(rotates, weight) if form == "w8a8" else None
    values, scale = quantise_int8(weight, rotation=rotation)
    return values, scale, rotation, rotated(values * scale[:, None], rotation)


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 3, 600])
def test_products_are_those_of_masked_modules(rows, form, table, poisoned_memory, monkeypatch):
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    x, padding = torch.randn(rows, HIDDEN), torch.arange(rows) >= max(1, rows - 1)
    known, real = router(6), ~padding
    both, both_scale, turn, whole = stored(torch.randn(192, HIDDEN), form, HIDDEN)
    last, last_scale, last_turn, whole_last = stored(torch.randn(HIDDEN, 96), form, 16)
    bias, last_bias = torch.randn(192), torch.randn(HIDDEN)

    def near(found, wanted, *, rounds=True):
        """Rows that are quantised are off by less than a hundredth of the largest value at each of two products."""
        coarse = rounds and form == "w8a8" and rows > MAX_WHOLE_ROWS
        torch.testing.assert_close(found, wanted, atol=wanted.abs().max().item() / 50 if coarse else 1e-3, rtol=1e-4)

    mask = margins(x, known) >= 0
    gate, up = functional.linear(x, whole, bias).chunk(2, 1)
    wanted = functional.linear(functional.silu(gate) * up * spread(mask, 96), whole_last, last_bias)
    counts = torch.zeros(2, dtype=torch.int32)
    with override_forward_context(SimpleNamespace(is_padding=padding)):
        parts = both, bias, both_scale, turn, last, last_bias, last_scale, last_turn, 0.5, form
        found = torch.ops.wide.routed_feed_forward(x, *known, counts, *parts)
        assert counts.tolist() == [mask[real].sum(), real.sum()]
        near(found[real], wanted[real])
        width = HEADS * DIM
        known, shape = router(2, extra=2), (KV_HEADS, DIM, 0.5, form)
        weight, scale, _, whole = stored(torch.randn(2 * width, HIDDEN), form)
        mask, qkv = torch.ops.wide.routed_queries(x, *known, counts, weight, None, scale, 2, *shape)
    own = margins(x, known)[:, :2] >= 0
    assert torch.equal(mask[real][:, :2], own[real])
    wanted = functional.linear(x, whole)
    near(qkv[real, width:], wanted[real, width:], rounds=False)
    seen = spread(own, width) & real[:, None]
    near(qkv[:, :width][seen], wanted[:, :width][seen], rounds=False)
    heads = torch.randn(rows, width) * spread(own, width)
    weight, scale, _, whole = stored(torch.randn(HIDDEN, width), form)
    near(torch.ops.wide.routed_output(heads, own, weight, None, scale, *shape), functional.linear(heads, whole))
    weight, scale, turn, whole = stored(torch.randn(HIDDEN, width), form, width)
    dense = torch.ops.wide.dense_linear(heads[None], weight, None, scale, form == "w8a8", turn)
    near(dense[0], functional.linear(heads, whole))


def test_rows_are_no_padding_where_vllm_does_not_keep_its_marks(table, monkeypatch):
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "0")
    x, known, counts = torch.randn(3, HIDDEN), router(2, extra=2), torch.zeros(2, dtype=torch.int32)
    with override_forward_context(SimpleNamespace(is_padding=torch.ones(3, dtype=torch.bool))):
        weight = torch.randn(2 * HEADS * DIM, HIDDEN)
        mask, _ = torch.ops.wide.routed_queries(x, *known, counts, weight, None, None, 2, KV_HEADS, DIM, 0.5, "model")
    assert torch.equal(mask, margins(x, known) >= 0)


@pytest.fixture
def layer(monkeypatch):
    """Return vLLM's implementation of attention under a table that skips, however short prompts are, without a GPU."""
    monkeypatch.setattr(pages, "_FEW_KEYS", 0)
    found = object.__new__(_Implementation)
    found.table, found.head_size, found.scale = (lambda: OperatorTable.fixed("triton")), DIM, DIM**-0.5
    found.most_tokens = 64
    return found


def attention(q, k, v, mask, *, window=None):
    """Return causal attention of the last rows over keys [T, H_k, d], zeros in skipped groups."""
    place = torch.arange(len(k))
    late = place[None] - place[len(k) - len(q) :, None]
    visible = (late <= 0) if window is None else (late <= 0) & (late > -window)
    parts = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = functional.scaled_dot_product_attention(*parts, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
    return out * spread(mask, HEADS)[..., None]


def metadata(lengths, queries, pages, **more):
    """Return what a step's metadata says of requests, whose lengths on the host may be too large."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    rows, known = int(starts[-1]), {"shared": None, "max_query_len": max(queries), "max_seq_len": max(lengths)}
    known |= {"num_actual_tokens": rows, "query_start_loc": starts, "block_table": pages, "ahead": rows, "keys": 0}
    if max(queries) > 1:
        counts = torch.tensor(queries)
        ahead, keys = split_step(torch.tensor(lengths), counts)
        known |= {"ahead": ahead, "keys": keys and keys + 7}
    return SimpleNamespace(**known | {"seq_lens": torch.tensor(lengths, dtype=torch.int32)} | more)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("queries", "cached"),
    [
        ([270], [0]),
        ([270, 3, 30], [0, 0, 0]),
        ([1, 1, 1, 1], [19, 0, 60, -1]),
        ([1, 1, 270, 30], [19, 0, 0, 0]),
        ([1, 260, 30, 1, 0], [50, 0, 31, 7, 0]),
        ([258], [33]),
    ],
    ids=["prompt", "prompts", "steps", "mixed", "cached", "chunk"],
)
def test_attention_of_a_step_is_that_of_its_requests(layer, queries, cached, window):
    size, rows = 16, sum(queries)
    layer.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    lengths = [new + old for new, old in zip(queries, cached, strict=True)]
    pages = torch.randn(100, size, KV_HEADS, 2 * DIM)
    table = torch.randperm(100)[: 20 * len(queries)].view(len(queries), 20).int()
    line = [pages[table[one].long()].flatten(0, 1)[:length] for one, length in enumerate(lengths)]
    new = torch.cat(
        [
            keys[len(keys) - count :] if len(keys) else keys.new_zeros(count, KV_HEADS, 2 * DIM)
            for keys, count in zip(line, queries, strict=True)
        ]
    )
    # Rows of padding come last, and hold anything.
    q, mask, out = (
        torch.randn(rows + 3, HEADS, DIM),
        torch.rand(rows + 3, 2) < 0.5,
        torch.full((rows + 3, HEADS, DIM), torch.nan),
    )
    known = metadata(lengths, queries, table)
    layer.forward(None, q, *torch.cat((new, new[:3])).split(DIM, -1), pages.transpose(1, 2), known, out, mask)
    for own_q, own_mask, keys, found in zip(
        q[:rows].split(queries), mask[:rows].split(queries), line, out[:rows].split(queries), strict=True
    ):
        wanted = (
            attention(own_q, *keys.split(DIM, -1), own_mask, window=window) if len(keys) else torch.zeros_like(found)
        )
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("queries", "cached"), [([600], [0]), ([1, 1, 300], [9, 4, 32]), ([1, 1], [5, 7])])
def test_no_layer_of_a_step_reads_from_the_device(layer, queries, cached, monkeypatch):
    known = metadata([new + old for new, old in zip(queries, cached, strict=True)], queries, torch.zeros(3, 40).int())
    layer.sliding_window, rows = (-1, -1), sum(queries)
    for name in ("attention_decode", "attention_prefill"):
        monkeypatch.setattr(pages, name, lambda q, *_, **__: torch.zeros_like(q))
    monkeypatch.setattr(pages, "reorder_sequences", lambda *_, **__: None)

    def refuse(*_):
        raise AssertionError("a value was read on the host")

    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    kv = torch.empty(9, 16, KV_HEADS, 2 * DIM).transpose(1, 2)
    q, k = torch.empty(rows, HEADS, DIM), torch.empty(rows, KV_HEADS, DIM)
    for _ in range(2):
        layer.forward(None, q, k, k, kv, known, torch.empty_like(q), torch.empty(rows, 2, dtype=torch.bool))
        # What layers share is worked out once.
        monkeypatch.setattr(_Implementation, "_plan", refuse)


def form_of(value):
    """Return what of an argument a compiled kernel depends on; `tests/kernels` sees to it that no number of rows is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(map(form_of, value))
    return value if isinstance(value, str | bool | None) else type(value)


@pytest.mark.parametrize("form", ["model", "w8a8"])
def test_requests_run_nothing_that_was_not_run_before(layer, form, monkeypatch):
    for name, value in (("world_size", 1), ("rank", 0)):
        monkeypatch.setattr(sublayers, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    monkeypatch.setattr(operators, "table_of", lambda *_: OperatorTable.fixed("torch"))
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    for name in ("attention_decode", "attention_prefill", "reorder_sequences", "clear_skipped"):
        run = getattr(pages, name)
        monkeypatch.setattr(pages, name, lambda *a, run=run, **k: run(*a, **k | {"backend": "torch"}))
    monkeypatch.setattr(pages, "_FEW_KEYS", 300)
    layer.sliding_window, width = (-1, -1), HEADS * DIM

    def linear(*shape):
        weight, scale, *_ = stored(torch.randn(shape), form)
        return SimpleNamespace(weight=weight, weight_scale=scale, bias=None, input_size=shape[1], tp_rank=0, tp_size=1)

    pruning = Pruning(plan=None, thresholds={}, executed=0.5, weights=form)
    ffn = SimpleNamespace(gate_up_proj=linear(192, HIDDEN), down_proj=linear(HIDDEN, 96), act_fn=None)
    attention = SimpleNamespace(
        qkv_proj=linear(2 * width, HIDDEN), o_proj=linear(HIDDEN, width), rotary_emb=None, q_size=width,
        attn=SimpleNamespace(impl=layer), kv_size=width // 2, head_dim=DIM, num_kv_heads=KV_HEADS,
    )  # fmt: skip
    layers = []
    kinds = (sublayers.FeedForward, ffn, 96, 6), (sublayers.Attention, attention, width, 2)
    for kind, dense, channels, groups in kinds:
        routed = Routed(grouping=Grouping(channels, channels // groups), rank=8)
        made = kind(dense, routed, 0.0, pruning)
        torch.nn.init.normal_(made.wide_router.down)
        torch.nn.init.normal_(made.wide_router.up)
        made.wide_router.prepare()
        made.skips, made.kind = True, groups
        layers.append(made)
    seen, run = set(), Backends.run

    def note(self, name, device, shape, *arguments, **options):
        known = tuple((key, form_of(value)) for key, value in sorted(options.items()))
        # Choices, and constants of kernels, tell apart powers of two.
        rows = (arguments[0].shape[:-1].numel() - 1).bit_length()
        seen.add((self.operator, name, rows, tuple(map(form_of, arguments)), known))
        if self.operator.startswith("attention"):
            return torch.zeros_like(arguments[0])
        return run(self, name, device, shape, *arguments, **options)

    monkeypatch.setattr(Backends, "run", note)
    most, draw = 640, random.Random(0)
    warming.warm(torch.nn.ModuleList(layers), most)
    before = set(seen)
    assert len(before) > 20
    for _ in range(25):
        queries = [1] * draw.randrange(4) + [draw.randrange(2, 200) for _ in range(draw.randrange(4))] or [1]
        cached = [draw.choice((0, 16, 40)) for _ in queries] if draw.random() < 0.5 else [0] * len(queries)
        lengths = [new + old for new, old in zip(queries, cached, strict=True)]
        step, rows = metadata(lengths, queries, torch.zeros(len(queries), 20).int()), sum(queries)
        context = SimpleNamespace(is_padding=torch.zeros(rows, dtype=torch.bool))
        with override_forward_context(context):
            x = torch.randn(rows, HIDDEN)
            layers[0].output(x)
            mask, qkv = layers[1].queries(x)
            heads = [part.unflatten(1, (-1, DIM)) for part in qkv.split(layers[1].widths, dim=-1)]
            kv = torch.zeros(1, 64, KV_HEADS, 2 * DIM).transpose(1, 2)
            out = torch.empty(rows, HEADS, DIM)
            if layer._step(kv, mask, step) is not None:
                layer.forward(None, *heads, kv, step, out, mask)
            layers[1].output(out.flatten(1), mask)
    assert not seen - before, sorted(map(str, seen - before))[:4]


def test_flash_attention_takes_memory_for_parts_of_sums_in_steps_of_single_tokens_only(monkeypatch):
    monkeypatch.setattr(
        pages.FlashAttentionMetadataBuilder, "__init__", lambda self, *_: setattr(self, "max_cudagraph_size", 6144)
    )
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    assert pages._Builder(None, [], config, torch.device("cpu")).max_cudagraph_size == 64


def test_layers_with_other_windows_do_not_share_a_step(layer):
    known = metadata([300, 300], [300, 300], torch.zeros(2, 20).int())
    found = []
    for window in (-1, 40):
        layer.sliding_window = (window, -1 if window < 0 else 0)
        found.append(layer._step(torch.empty(9, KV_HEADS, 16, 2 * DIM), torch.empty(600, 2), known).prompts["runs"])
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("queries", "cached", "skips"),
    [
        ([1100], [0], False),
        ([1, 1, 700, 300], [900, 9, 600, 0], False),
        ([600], [1500], True),
        ([1, 600], [2048, 0], True),
        ([700, 700, 700], [0, 0, 0], True),
        ([1, 1], [9, 90], True),
    ],
)
def test_prompts_skip_attention_where_they_are_long_enough_to_hide_launches(monkeypatch, layer, queries, cached, skips):
    monkeypatch.setattr(pages, "_FEW_KEYS", 2048)
    layer.sliding_window, lengths = (-1, -1), [new + old for new, old in zip(queries, cached, strict=True)]
    known, kv = metadata(lengths, queries, torch.zeros(4, 40).int()), torch.empty(9, 16, KV_HEADS, 2 * DIM)
    assert (layer._step(kv.transpose(1, 2), torch.empty(sum(queries), 2), known) is not None) == skips


def test_steps_are_split_where_prompts_begin():
    def split(lengths, queries):
        return split_step(torch.tensor(lengths), torch.tensor(queries))

    assert split([9, 4, 7, 8], [1, 1, 7, 8]) == (2, 0)
    assert split([9, 4, 7, 9, 0], [1, 1, 7, 8, 0]) == (2, 16)
    assert split([5, 9], [5, 1]) == (0, 14)


def test_vllm_says_which_rows_are_padding(monkeypatch):
    from vllm import envs

    from wide.vllm import model

    class Dense(torch.nn.Module):
        def __init__(self, *, vllm_config, prefix):
            super().__init__()
            self.model = SimpleNamespace(layers=[])

    monkeypatch.setattr(model, "read_pruning", lambda _: SimpleNamespace(weights="model"))
    monkeypatch.setattr(model, "exchange", lambda *_: None)
    monkeypatch.setattr(model.Reporting, "take_over", lambda *_: None)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "0")
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=None))
    config.scheduler_config = SimpleNamespace(max_num_batched_tokens=8)
    type("Pruned", (model._Pruned, Dense), {})(vllm_config=config)
    # Without this the marks of its warming up stay: all rows.
    assert envs.VLLM_MOE_SKIP_PADDING
