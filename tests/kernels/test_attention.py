"""What must hold for attention whatever the tensors: tiles, padding, chunks and skipped neighbours do not matter."""

import math
from typing import Any

import pytest
import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.attention_decode._triton import DecodeTile
from wide.kernels.attention_decode.op import attention_decode
from wide.kernels.attention_inputs import HeadUnits
from wide.kernels.attention_prefill._triton import PrefillTile
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.reorder.op import reorder_sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE: dict[str, Any] = {"rtol": 5e-3, "atol": 5e-3}


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half().to(DEVICE)


def _mask(*shape: int, active: float = 0.5) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(5)) < active).to(DEVICE)


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    order = reorder_sequences(mask, backend="torch")
    return attention_prefill(q, k, v, order, zero_skipped=True, backend="triton", **options)


@pytest.mark.parametrize(("query_heads", "kv_heads", "groups"), [(8, 2, 2), (8, 2, 4), (8, 4, 2), (6, 3, 2), (6, 1, 1)])
def test_heads_of_a_unit_share_group_and_kv_head(query_heads: int, kv_heads: int, groups: int) -> None:
    units = HeadUnits(num_query_heads=query_heads, num_kv_heads=kv_heads, num_groups=groups)
    for head in range(query_heads):
        unit = head // units.heads_per_unit
        assert unit * groups // units.num_units == head * groups // query_heads
        assert unit * kv_heads // units.num_units == head * kv_heads // query_heads
    assert units.num_units == math.lcm(kv_heads, groups)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShapeError, match="8 query heads cannot be shared out over 3 groups"):
        HeadUnits(num_query_heads=8, num_kv_heads=2, num_groups=3)


@pytest.mark.parametrize(
    "tile",
    [
        PrefillTile(block_m=16, block_n=16, num_warps=4, num_stages=1),
        PrefillTile(block_m=64, block_n=16, num_warps=4, num_stages=1),
        PrefillTile(block_m=32, block_n=64, num_warps=4, num_stages=1, uses_tma=True),
    ],
)
def test_prefill_does_not_depend_on_the_tile(tile: PrefillTile) -> None:
    q, k, v = _values(2, 50, 6, 64), _values(2, 61, 2, 64, seed=1), _values(2, 61, 2, 64, seed=2)
    options: dict[str, Any] = {"window": 30}
    mask = _mask(2, 50, 2)
    got = _prefill(q, k, v, mask, tile=tile, **options)
    torch.testing.assert_close(got, _prefill(q, k, v, mask, **options), **CLOSE)


def test_prefill_takes_head_major_caches_as_views() -> None:
    q, k, v = _values(2, 20, 4, 64), _values(2, 2, 33, 64, seed=1), _values(2, 2, 33, 64, seed=2)
    mask = _mask(2, 20, 2)
    views = _prefill(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    copies = _prefill(q, k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), mask)
    torch.testing.assert_close(views, copies, rtol=0, atol=0)


def test_chunks_give_what_the_whole_prompt_gives() -> None:
    q, k, v = _values(1, 48, 4, 64), _values(1, 48, 2, 64, seed=1), _values(1, 48, 2, 64, seed=2)
    mask = _mask(1, 48, 2)
    whole = _prefill(q, k, v, mask)
    first = _prefill(q[:, :19], k[:, :19], v[:, :19], mask[:, :19])
    second = _prefill(q[:, 19:], k, v, mask[:, 19:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **CLOSE)


def test_decode_is_the_last_row_of_prefill() -> None:
    q, k, v = _values(2, 30, 4, 64), _values(2, 30, 2, 64, seed=1), _values(2, 30, 2, 64, seed=2)
    mask = torch.ones(2, 30, 2, dtype=torch.bool, device=DEVICE)
    lengths = torch.full((2,), 30, dtype=torch.int32, device=DEVICE)
    rows = _prefill(q, k, v, mask, window=11)[:, -1]
    torch.testing.assert_close(attention_decode(q[:, -1], k, v, lengths, window=11, backend="triton"), rows, **CLOSE)


@pytest.mark.parametrize(("programs", "block_n"), [(1, 16), (2, 64), (7, 16), (40, 16), (40, 64)])
def test_decode_does_not_depend_on_how_work_is_shared_out(programs: int, block_n: int) -> None:
    q, k, v = _values(3, 4, 64), _values(3, 90, 2, 64, seed=1), _values(3, 90, 2, 64, seed=2)
    lengths = torch.tensor([90, 0, 37], dtype=torch.int32, device=DEVICE)
    mask = torch.tensor([[True, True], [True, False], [False, True]], device=DEVICE)
    tile = DecodeTile(block_n=block_n, min_blocks=1, programs_per_sm=programs, num_warps=4, num_stages=1)
    got = attention_decode(q, k, v, lengths, mask, backend="triton", tile=tile)
    torch.testing.assert_close(got, attention_decode(q, k, v, lengths, mask, backend="torch"), **CLOSE)
    assert not got[1].any()


def test_decode_reads_lengths_on_the_device() -> None:
    q, k, v = _values(1, 4, 64), _values(1, 40, 2, 64, seed=1), _values(1, 40, 2, 64, seed=2)
    lengths = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    for length in (1, 17, 40):
        lengths.fill_(length)
        got = attention_decode(q, k, v, lengths, backend="triton")
        wanted = attention_decode(q, k[:, :length], v[:, :length], lengths, backend="torch")
        torch.testing.assert_close(got, wanted, **CLOSE)


def test_wrong_inputs_are_named() -> None:
    q, k = _values(1, 8, 4, 64), _values(1, 8, 2, 64)
    mask = _mask(1, 8, 2)
    with pytest.raises(ShapeError, match="at least as many keys"):
        _prefill(q, k[:, :5], k[:, :5], mask)
    with pytest.raises(ShapeError, match="v must be float16"):
        _prefill(q, k, k[:, :5], mask)
    with pytest.raises(ShapeError, match="window must be positive"):
        _prefill(q, k, k, mask, window=0)
    with pytest.raises(ShapeError, match="index"):
        _prefill(q, k, k, _mask(1, 7, 2))
    with pytest.raises(UnsupportedBackendError, match="'cuda'"):
        attention_decode(q[:, 0], k, k, torch.ones(1, dtype=torch.int32, device=DEVICE), backend="cuda")
    with pytest.raises(ShapeError, match="lengths must be int32"):
        attention_decode(q[:, 0], k, k, torch.ones(1, device=DEVICE), backend="torch")
