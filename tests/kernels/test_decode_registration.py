"""Attention and decode GEMMs as citizens of torch: opcheck, fullgraph tracing, refusals."""

from typing import Any

import pytest
import torch

import wide.kernels.attention_prefill.op  # noqa: F401  registers its operator
from wide.errors import ShapeError
from wide.kernels.attention_decode.op import attention_decode
from wide.kernels.gemv.op import gemv_k, gemv_mn
from wide.kernels.reorder.op import reorder_sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half().to(DEVICE)


def _step(x: torch.Tensor, mask: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Run one decode step's operators."""
    q = attention_decode(x.view(2, 4, 16), cache, cache, lengths, mask, backend="triton").flatten(1)
    h = gemv_mn(q, x.new_ones(32, 64), mask, up_weight=x.new_ones(32, 64), activation="silu", backend="triton")
    return gemv_k(h, x.new_ones(64, 32), mask, backend="triton")


# Both run the same registration; the interpreter takes its time.
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_opcheck(backend: str) -> None:
    mask = torch.tensor([[True, False], [True, True]], device=DEVICE)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    order = reorder_sequences(torch.ones(2, 8, 2, dtype=torch.bool, device=DEVICE), backend="torch")
    one = reorder_sequences(torch.ones(1, 8, 2, dtype=torch.bool, device=DEVICE), backend="torch")
    ends = torch.arange(8, dtype=torch.int32, device=DEVICE)
    runs = torch.stack((ends.clamp(max=3), ends + 2))
    q, k, x, weight = _values(2, 8, 4, 16), _values(2, 9, 2, 16), _values(2, 64), _values(32, 64)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.ops.wide.attention_prefill, (q, k, k, *order), {"window": 5, "zero_skipped": True}),
        (torch.ops.wide.attention_prefill, (q[:1], k[:1], k[:1], *one), {"runs": runs, "soft_cap": 3.0}),
        (torch.ops.wide.attention_decode, (q[:, 0], k, k, lengths, mask), {"soft_cap": 3.0}),
        (torch.ops.wide.gemv_mn, (x, weight, mask), {"up_weight": weight, "activation": "silu", "zero_skipped": True}),
        (torch.ops.wide.gemv_k, (x, weight, mask), {"tile": []}),
    ]
    for operator, arguments, options in calls:
        torch.library.opcheck(operator.default, arguments, options | {"backend": backend})


def test_decode_step_traces_as_one_graph_and_gives_the_same() -> None:
    mask = torch.tensor([[True, False], [True, True]], device=DEVICE)
    arguments = (_values(2, 64), mask, _values(2, 9, 2, 16), torch.tensor([9, 4], dtype=torch.int32, device=DEVICE))
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), _step(*arguments))


@pytest.mark.parametrize("num_rows", [2, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (3, 4))])
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int) -> None:
    x, weight = _values(num_rows, 96), _values(40, 96)
    mask = torch.rand(num_rows, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
    h_mask = torch.rand(num_rows, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.5
    wide = gemv_mn(x, weight, mask, zero_skipped=True, backend="triton")
    down = gemv_k(x, weight, h_mask, backend="triton")
    for row in range(num_rows):
        part = slice(row, row + 1)
        alone = gemv_mn(x[part], weight, mask[part], zero_skipped=True, backend="triton")
        torch.testing.assert_close(wide[part], alone)
        torch.testing.assert_close(down[part], gemv_k(x[part], weight, h_mask[part], backend="triton"))


def test_wrong_inputs_are_named() -> None:
    x, weight = _values(2, 64), _values(32, 64)
    mask = torch.ones(2, 2, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ShapeError, match="1 to 4 rows"):
        gemv_mn(_values(5, 64), weight, mask, backend="triton")
    with pytest.raises(ShapeError, match="3 groups do not divide"):
        gemv_k(x, weight, torch.ones(2, 3, dtype=torch.bool, device=DEVICE), backend="triton")
    with pytest.raises(ShapeError, match="unknown activation 'tanh'"):
        gemv_mn(x, weight, mask, activation="tanh", backend="triton")
    with pytest.raises(ShapeError, match="weight must be"):
        gemv_mn(x, weight.float(), mask, backend="triton")
    with pytest.raises(ShapeError, match="up_bias goes with"):
        gemv_mn(x, weight, mask, bias=_values(32), up_weight=weight, backend="triton")
