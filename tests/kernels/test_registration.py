"""The operators are good citizens of torch: opcheck, fullgraph tracing, fakes of the right shape."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wide.kernels.device import interprets_triton
from wide.kernels.gemm_k.op import gemm_k, gemm_k_rows
from wide.kernels.gemm_mn.op import gemm_mn
from wide.kernels.reorder.op import reorder, reorder_patterns, reorder_rows, reorder_sequences

INTERPRETED = pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "mask": torch.rand(20, 3, generator=generator) < 0.5,
        "x": torch.randn(20, 32, generator=generator),
        "up": torch.randn(48, 32, generator=generator),
        "gate": torch.randn(48, 32, generator=generator),
        "down": torch.randn(32, 48, generator=generator),
    }


def ffn(mask: torch.Tensor, x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Run a routed FFN through the operators."""
    order = reorder(mask, block_m=16, backend="triton")
    h = gemm_mn(x, gate, order, up_weight=up, activation="silu", backend="triton")
    patterns = reorder_patterns(mask, groups_per_block=2, block_m=16, backend="triton")
    return gemm_k(h, down, patterns, group_size=16, backend="triton")


# Both run the same registration; the interpreter takes its time.
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=[INTERPRETED, pytest.mark.slow])])
def test_opcheck(backend: str) -> None:
    # opcheck compares whole outputs: with everything executing none of them is unspecified.
    data = {**_inputs(), "mask": torch.ones(32, 3, dtype=torch.bool), "x": torch.randn(32, 32)}
    order = reorder(data["mask"], block_m=16, backend=backend)
    patterns = reorder_patterns(data["mask"], groups_per_block=2, block_m=16, backend=backend)
    rows = reorder_rows(data["mask"], backend="torch")
    sums = data["x"].new_ones(32, 48), data["down"]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.ops.wide.reorder, (data["mask"], 16, backend), {}),
        (torch.ops.wide.reorder_sequences, (data["mask"].unsqueeze(0), backend), {}),
        (torch.ops.wide.reorder_patterns, (data["mask"], 16, 2, False, backend), {}),
        (torch.ops.wide.reorder_rows, (data["mask"], "torch"), {}),
        (torch.ops.wide.gemm_k_rows, (*sums, *rows), {"group_size": 16, "backend": "torch"}),
        (
            torch.ops.wide.gemm_mn,
            (data["x"], data["gate"], *order),
            {"up_weight": data["up"], "activation": "silu", "backend": backend},
        ),
        (torch.ops.wide.gemm_k, (*sums, *patterns), {"group_size": 16, "backend": backend, "tile": []}),
    ]
    for operator, arguments, options in calls:
        torch.library.opcheck(operator.default, arguments, options)


@INTERPRETED
def test_ffn_traces_as_one_graph_and_gives_the_same() -> None:
    data = _inputs()
    compiled = torch.compile(ffn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**data), ffn(**data), rtol=1e-4, atol=1e-4)


def test_fakes_have_the_shapes_of_results() -> None:
    real = reorder_sequences(_inputs()["mask"].unsqueeze(0), backend="torch")
    with FakeTensorMode() as mode:
        data = {name: mode.from_tensor(value) for name, value in _inputs().items()}
        assert ffn(**data).shape == (20, 32)
        fake = reorder_sequences(data["mask"].unsqueeze(0), backend="triton")
    assert [part.shape for part in fake] == [part.shape for part in real]


def test_fakes_of_rows_in_one_order_have_the_shapes_of_results() -> None:
    mask = torch.rand(200, 70) < 0.5
    real = reorder_rows(mask, backend="torch")
    with FakeTensorMode() as mode:
        fake = reorder_rows(mode.from_tensor(mask), backend="cuda")
        assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]
        h, weight = mode.from_tensor(torch.ones(200, 140)), mode.from_tensor(torch.ones(24, 140))
        out = gemm_k_rows(h, weight, fake, group_size=2, backend="torch")
    assert (out.shape, out.dtype) == ((200, 24), torch.float32)
