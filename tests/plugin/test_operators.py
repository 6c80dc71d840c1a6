"""What the plug-in runs on a GPU, through reference operators and Triton's interpreter: products, pages, prompts."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from wide.inference.operators.table import OperatorTable
from wide.kernels.route import split_weights
from wide.kernels.route.reference import margins

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
from vllm.forward_context import override_forward_context

from wide.vllm import operators

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


@pytest.mark.parametrize("rows", [1, 3, 600])
def test_products_are_those_of_masked_modules(rows, table, poisoned_memory):
    x, padding = torch.randn(rows, HIDDEN), torch.arange(rows) >= max(1, rows - 1)
    known, real = router(6), ~padding
    gate, up, last, bias = torch.randn(24, HIDDEN), torch.randn(24, HIDDEN), torch.randn(HIDDEN, 24), torch.randn(48)
    mask = margins(x, known) >= 0
    inner = functional.silu(functional.linear(x, gate, bias[:24])) * functional.linear(x, up, bias[24:])
    wanted = functional.linear(inner * spread(mask, 24), last, bias)
    with override_forward_context(SimpleNamespace(is_padding=padding)):
        found = torch.ops.wide.routed_feed_forward(x, *known, torch.cat((gate, up)), bias, last, bias, 0.5)
        torch.testing.assert_close(found[real], wanted[real], atol=1e-3, rtol=1e-4)
        width = HEADS * DIM
        known, weight = router(2, extra=2), torch.randn(2 * width, HIDDEN)
        shape = (KV_HEADS, DIM, 0.5)
        mask, qkv = torch.ops.wide.routed_queries(x, *known, weight, None, 2, *shape)
    own = margins(x, known)[:, :2] >= 0
    assert torch.equal(mask[real][:, :2], own[real])
    whole = functional.linear(x, weight)
    torch.testing.assert_close(qkv[real, width:], whole[real, width:], atol=1e-3, rtol=1e-4)
    seen = spread(own, width) & real[:, None]
    torch.testing.assert_close(qkv[:, :width][seen], whole[:, :width][seen], atol=1e-3, rtol=1e-4)
    heads, out = torch.randn(rows, width) * spread(own, width), torch.randn(HIDDEN, width)
    found = torch.ops.wide.routed_output(heads, own, out, None, *shape)
    torch.testing.assert_close(found, functional.linear(heads, out), atol=1e-3, rtol=1e-4)


@pytest.fixture
def layer():
    """Return vLLM's implementation of attention under a table that skips, without a GPU."""
    from wide.vllm.pages import _Implementation

    found = object.__new__(_Implementation)
    found.table, found.head_size, found.scale = (lambda: OperatorTable.fixed("triton")), DIM, DIM**-0.5
    return found


def attention(q, k, v, mask, *, window=None):
    """Return causal attention of the last rows over keys [T, H_k, d], zeros in skipped groups."""
    place = torch.arange(len(k))
    late = place[None] - place[len(k) - len(q) :, None]
    visible = (late <= 0) if window is None else (late <= 0) & (late > -window)
    parts = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = functional.scaled_dot_product_attention(*parts, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
    return out * spread(mask, HEADS)[..., None]


def metadata(lengths, queries, **more):
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    rows = int(starts[-1])
    known = {"num_actual_tokens": rows, "max_query_len": max(queries), "query_start_loc": starts, "bounds": None}
    return SimpleNamespace(**known | {"seq_lens": torch.tensor(lengths, dtype=torch.int32)} | more)


@pytest.mark.parametrize("window", [None, 5])
def test_steps_read_the_pages_of_executing_pairs(layer, window):
    size, lengths = 16, [20, 1, 33, 0]
    layer.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    pages = torch.randn(12, size, KV_HEADS, 2 * DIM).transpose(1, 2)
    table = torch.randperm(12).view(4, 3).int()
    q, mask = torch.randn(4, HEADS, DIM), torch.tensor([[True, False], [True, True], [False, True], [True, True]])
    out = torch.full_like(q, torch.nan)
    known = metadata(lengths, [1] * 4, block_table=table)
    layer.forward(None, q, q, q, pages, known, out, mask)
    for one, length in enumerate(lengths[:3]):
        places = pages[table[one].long()].transpose(1, 2).flatten(0, 1)[:length]
        wanted = attention(q[one : one + 1], *places.split(DIM, -1), mask[one : one + 1], window=window)
        torch.testing.assert_close(out[one : one + 1], wanted, atol=2e-3, rtol=1e-3)
    assert not out[3].any()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("queries", [[270], [270, 3, 30]])
def test_prompts_without_cached_keys_skip_in_their_own_rows(layer, queries, window):
    layer.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    rows = sum(queries)
    q, (k, v) = torch.randn(rows, HEADS, DIM), torch.randn(2, rows, KV_HEADS, DIM)
    mask, out = torch.rand(rows, 2) < 0.5, torch.full_like(q, torch.nan)
    layer.forward(None, q, k, v, None, metadata(queries, queries, is_fresh=True), out, mask)
    parts = zip(*(each.split(queries) for each in (q, k, v, mask)), strict=True)
    wanted = torch.cat([attention(*part, window=window) for part in parts])
    torch.testing.assert_close(out, wanted, atol=2e-3, rtol=1e-3)
