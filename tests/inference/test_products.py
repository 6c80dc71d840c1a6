"""What a table chooses reaches the operators: backend, tile, and how rows are sorted."""

from typing import Any

import pytest
import torch

from wide.inference.operators import products
from wide.inference.operators.products import GatedWeights, LinearWeights
from wide.kernels.tuning import Choice

ROWS, GROUPS, SIZE, DEPTH = 24, 3, 16, 32
CHOICES = [
    (Choice(backend="cuda", tile=(256, 256), block_m=256), "cuda", (256, 256), 256),
    (Choice(backend="triton", tile=(64, 64, 4, 4, 2, 2), block_m=64), "triton", (64, 64, 4, 4, 2, 2), 64),
    (Choice(backend="cuda"), "cuda", (), 128),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, int]]:
    """Return what products are asked for: backend, tile, rows of a tile; references compute them."""
    found: list[tuple[str, Any, int]] = []
    known = products.gemm_mn

    def noted(x: torch.Tensor, weight: torch.Tensor, order: Any, *, backend: str, tile: Any, **options: Any) -> Any:
        found.append((backend, tile, order.block_m))
        return known(x, weight, order, backend="torch", **options)

    monkeypatch.setattr(products, "gemm_mn", noted)
    return found


@pytest.mark.parametrize(("choice", "backend", "tile", "block_m"), CHOICES)
def test_choices_reach_the_products_over_output_groups(
    choice: Choice, backend: str, tile: Any, block_m: int, asked: list[tuple[str, Any, int]]
) -> None:
    x, gate, up = (torch.randn(rows, DEPTH) for rows in (ROWS, GROUPS * SIZE, GROUPS * SIZE))
    mask = torch.rand(ROWS, GROUPS) < 0.5
    LinearWeights(gate).output_groups(x, mask, choice, sorts="torch")
    GatedWeights.of_rows(LinearWeights(torch.cat((gate, up))), len(gate), "silu").output_groups(
        x, mask, choice, sorts="torch"
    )
    assert asked == [(backend, tile, block_m)] * 2


@pytest.mark.parametrize(
    ("choice", "backend", "tile"),
    [
        (Choice(backend="cuda", tile=(128, 256), block_m=128, groups_per_block=8), "cuda", (128, 256)),
        (Choice(backend="triton", tile=(64, 64, 3, 4), block_m=64), "triton", (64, 64, 3, 4)),
        (Choice(backend="cuda"), "cuda", ()),
    ],
)
def test_choices_reach_the_products_over_input_groups(
    choice: Choice, backend: str, tile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, known = [], products.gemm_k

    def noted(h: torch.Tensor, weight: torch.Tensor, order: Any, *, backend: str, tile: Any, **options: Any) -> Any:
        found.append((backend, tile, order.block_m, order.keeps_empty))
        return known(h, weight, order, backend="torch", **options)

    monkeypatch.setattr(products, "gemm_k", noted)
    h, weight = torch.randn(ROWS, GROUPS * SIZE), torch.randn(DEPTH, GROUPS * SIZE)
    LinearWeights(weight).input_groups(h, torch.rand(ROWS, GROUPS) < 0.5, choice, sorts="torch")
    assert found == [(backend, tile, choice.block_m or 128, True)]


def test_more_groups_than_patterns_hold_go_by_rows_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found, known = [], products.gemm_k_rows

    def noted(h: torch.Tensor, weight: torch.Tensor, order: Any, *, backend: str, **options: Any) -> Any:
        found.append((backend, tuple(order.words.shape)))
        return known(h, weight, order, backend="torch", **options)

    def sort(mask: torch.Tensor, *, backend: str) -> Any:
        sorters.append(backend)
        return order_rows(mask, backend="torch")

    order_rows, sorters = products.reorder_rows, []
    monkeypatch.setattr(products, "reorder_rows", sort)
    monkeypatch.setattr(products, "gemm_k_rows", noted)
    h, weight, mask = torch.randn(ROWS, 9 * SIZE), torch.randn(DEPTH, 9 * SIZE), torch.rand(ROWS, 9) < 0.5
    choice = Choice(backend="cuda", tile=(128, 256), block_m=128, groups_per_block=9)
    holes = torch.where(mask.repeat_interleave(SIZE, 1), h, float("nan"))
    got = LinearWeights(weight).input_groups(holes, mask, choice, sorts="torch")
    torch.testing.assert_close(got, torch.where(mask.repeat_interleave(SIZE, 1), h, 0.0) @ weight.t())
    assert (found, sorters) == ([("cuda", (2, ROWS))], ["cuda"])
