"""Edges of the GEMMs through their public functions: sizes, masks, poisoned inputs, tiles, refusals."""

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.device import interprets_triton
from wide.kernels.gemm_k._triton import KTile
from wide.kernels.gemm_k.op import gemm_k
from wide.kernels.gemm_mn._triton import MnTile
from wide.kernels.gemm_mn.op import gemm_mn
from wide.kernels.gemv.op import gemv_k, gemv_mn
from wide.kernels.int8 import quantise_int8
from wide.kernels.linear_int8.op import linear_int8
from wide.kernels.reorder.op import reorder, reorder_patterns

pytestmark = pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")
MASKS = ("random", "all", "none", "one row", "one group")
# Many rows in large tiles and under two masks only: the interpreter takes its time for every tile.
SHAPES = [(rows, kind, 16) for rows in (1, 17, 64, 127) for kind in MASKS]
SHAPES += [(300, "random", 128), (300, "one group", 128)]
DEPTH, SIZE, GROUPS = 48, 16, 3
NAN = float("nan")


def make_mask(kind: str, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    mask = torch.rand(num_rows, GROUPS, generator=generator) < 0.5
    if kind == "all":
        return torch.ones_like(mask)
    lone = torch.zeros_like(mask)
    if kind == "one row":
        lone[num_rows // 2] = True
    if kind == "one group":
        lone[:, 1] = True
    return mask if kind == "random" else lone


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_rows", "kind", "block_m"), SHAPES)
def test_gemm_mn_equals_masked_dense(num_rows: int, kind: str, block_m: int) -> None:
    mask = make_mask(kind, num_rows)
    x, weight = values(num_rows, DEPTH), values(GROUPS * SIZE, DEPTH, seed=1)
    # A row that executes nothing must not be needed: whatever it holds.
    x[~mask.any(1)] = NAN
    order = reorder(mask, block_m=block_m, backend="triton")
    got = gemm_mn(x, weight, order, backend="triton", mask=mask)
    wanted = torch.where(mask.repeat_interleave(SIZE, 1), x @ weight.t(), 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "kind", "block_m", "groups_per_block"),
    [
        # Each shape with one size of blocks, each mask with all of them.
        (*shape, size) if (place + place // 5) % 3 == size - 1 else pytest.param(*shape, size, marks=pytest.mark.slow)
        for place, shape in enumerate(SHAPES)
        for size in (1, 2, 3)
    ],
)
def test_gemm_k_equals_dense_on_zeros(num_rows: int, kind: str, block_m: int, groups_per_block: int) -> None:
    mask = make_mask(kind, num_rows)
    channels = mask.repeat_interleave(SIZE, 1)
    h, weight = values(num_rows, GROUPS * SIZE), values(32, GROUPS * SIZE, seed=1)
    order = reorder_patterns(
        mask,
        groups_per_block=groups_per_block,
        block_m=block_m,
        keeps_empty=groups_per_block == GROUPS,
        backend="triton",
    )
    got = gemm_k(torch.where(channels, h, NAN), weight, order, group_size=SIZE, backend="triton")
    torch.testing.assert_close(got, torch.where(channels, h, 0) @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("num_rows", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_int8_products_of_few_rows_equal_masked_dense(num_rows: int, kind: str) -> None:
    mask = make_mask(kind, num_rows)
    channels = mask.repeat_interleave(SIZE, 1)
    x, h = values(num_rows, DEPTH), values(num_rows, GROUPS * SIZE, seed=2)
    # One channel stands out, one output has no weights; what is skipped holds NaN, as does a row on its own.
    x[:, 5] *= 1e4
    x[~mask.any(1)] = h[~channels] = NAN
    x[-1] = NAN if num_rows > 1 else x[-1]
    gate, up, down = (
        values(rows, depth, seed=3) for rows, depth in ((GROUPS * SIZE, DEPTH),) * 2 + ((33, GROUPS * SIZE),)
    )
    gate[7] = down[7] = 0
    (q_gate, gate_scale), (q_up, up_scale), (q_down, down_scale) = map(quantise_int8, (gate, 2 * up, down))
    gate, up, down = q_gate * gate_scale[:, None], q_up * up_scale[:, None], q_down * down_scale[:, None]
    wanted = torch.where(channels, silu(x @ gate.t()) * (x @ up.t()), 0)
    gate_scale[~channels.any(0)] = up_scale[~channels.any(0)] = NAN
    scales: dict[str, Any] = {"scale": gate_scale, "up_weight": q_up, "up_scale": up_scale, "activation": "silu"}
    for backend in ("triton", "torch"):
        got = gemv_mn(x, q_gate, mask, zero_skipped=True, **scales, backend=backend)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-2, equal_nan=True)
        if kind == "all":
            whole = gemv_mn(x, q_gate, None, **scales, backend=backend)
            torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-2, equal_nan=True)
        got = gemv_k(h, q_down, mask, scale=down_scale, backend=backend)
        torch.testing.assert_close(got, torch.where(channels, h, 0) @ down.t(), rtol=1e-4, atol=1e-4)


def test_int8_weights_go_with_scales() -> None:
    x, weight, mask = values(1, DEPTH), values(GROUPS * SIZE, DEPTH), make_mask("all", 1)
    eight, scale = quantise_int8(weight)
    for given, factor in ((eight, None), (weight, scale)):
        with pytest.raises(ShapeError, match="int8 weights go with scales"):
            gemv_mn(x, given, mask, scale=factor, backend="triton")
    for gate, rows in (("swish", 32), ("silu", 31)):
        with pytest.raises(ShapeError, match=f"halves N, got '{gate}' and N={rows}"):
            linear_int8(x, eight[:rows], scale[:rows], gate=gate, backend="torch")


@pytest.mark.parametrize("weights_by", [0, 1, 2])
def test_gated_tiles_agree_however_weights_are_read(weights_by: int) -> None:
    mask = make_mask("random", 40)
    x, weights = values(40, DEPTH).half(), values(2, GROUPS * SIZE, DEPTH, seed=1).half() * 0.1
    order = reorder(mask, block_m=16, backend="triton")
    tile = MnTile(16, 16, 2, 4, 1, weights_by)
    options: dict[str, Any] = {"up_weight": weights[1], "activation": "silu", "mask": mask}
    got = gemm_mn(x, weights[0], order, **options, backend="triton", tile=tile)
    wanted = gemm_mn(x, weights[0], order, **options, backend="torch")
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("slab", "run", "weights_by"), [(0, 1, 1), (16, 1, 0), (32, 2, 1), (0, 3, 0), (0, 2, 1), (16, 1, 1)]
)
def test_gemm_k_slabs_runs_and_weight_reads_agree(slab: int, run: int, weights_by: int) -> None:
    mask = make_mask("random", 40)
    h, weight, bias = values(40, GROUPS * SIZE), values(48, GROUPS * SIZE, seed=1), values(48, seed=2)
    order = reorder_patterns(mask, groups_per_block=2, block_m=16, backend="triton")
    options: dict[str, Any] = {"group_size": SIZE, "bias": bias}
    tile = KTile(16, 16, 2, 4, 1, weights_by, slab, run)
    got = gemm_k(h.half(), weight.half(), order, **options, backend="triton", tile=tile)
    wanted = gemm_k(h.half(), weight.half(), order, **options, backend="torch")
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups_per_block", [2, 3])
def test_gemm_k_runs_write_every_row_even_of_nothing(kind: str, groups_per_block: int) -> None:
    mask = make_mask(kind, 17)
    channels = mask.repeat_interleave(SIZE, 1)
    h, weight = values(17, GROUPS * SIZE), values(64, GROUPS * SIZE, seed=1)
    order = reorder_patterns(
        mask, groups_per_block=groups_per_block, block_m=16, keeps_empty=groups_per_block == GROUPS, backend="triton"
    )
    tile = KTile(16, 16, 2, 4, 1, 0, 0, 4)
    got = gemm_k(torch.where(channels, h, NAN), weight, order, group_size=SIZE, backend="triton", tile=tile)
    torch.testing.assert_close(got, torch.where(channels, h, 0) @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), (256, 128)])
def test_gemm_k_tiles_that_leave_in_pieces_agree(block_m: int, block_n: int) -> None:
    mask = make_mask("random", 40)
    h, weight = values(40, GROUPS * SIZE), values(2 * block_n, GROUPS * SIZE, seed=1)
    order = reorder_patterns(mask, groups_per_block=2, block_m=block_m, backend="triton")
    tile = KTile(block_n, 16, 2, 4, 1, 0, 0, 2)
    got = gemm_k(h, weight, order, group_size=SIZE, backend="triton", tile=tile)
    wanted = gemm_k(h, weight, order, group_size=SIZE, backend="torch")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_no_slab_sees_what_an_earlier_slab_left_behind() -> None:
    mask = make_mask("random", 40)
    weight = values(48, GROUPS * SIZE, seed=1)
    # Columns of the first slab are huge, those of the others small: leftovers could not hide.
    weight[:16] *= 1e3
    h = values(40, GROUPS * SIZE)
    order = reorder_patterns(mask, groups_per_block=2, block_m=16, backend="triton")
    options: dict[str, Any] = {"group_size": SIZE, "backend": "triton"}
    alone = gemm_k(h, weight[16:], order, **options, tile=KTile(16, 16, 2, 4))
    swept = gemm_k(h, weight, order, **options, tile=KTile(16, 16, 2, 4, slab=16))
    torch.testing.assert_close(swept[:, 16:], alone, rtol=1e-3, atol=1e-3)


# Of halves, 52 make 104 bytes, which 16 does not divide; of a view only the stride tells.
@pytest.mark.parametrize(("depth", "stride"), [(52, 52), (48, 52), (52, 56)])
@pytest.mark.parametrize("weights_by", [1, 2])
def test_tiles_read_by_pointers_what_tensor_memory_access_cannot(weights_by: int, depth: int, stride: int) -> None:
    mask = make_mask("random", 40)
    x, wide = values(40, depth).half(), values(2, GROUPS * SIZE, stride, seed=1).half() * 0.1
    weights = wide[..., :depth]
    order = reorder(mask, block_m=16, backend="triton")
    options: dict[str, Any] = {"up_weight": weights[1], "activation": "silu", "mask": mask}
    got = gemm_mn(x, weights[0], order, **options, backend="triton", tile=MnTile(16, 16, 2, 4, 1, weights_by))
    wanted = gemm_mn(x, weights[0], order, **options, backend="torch")
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def test_gemm_k_tiles_read_by_pointers_what_tensor_memory_access_cannot() -> None:
    mask = make_mask("random", 40)
    h, weight = values(40, GROUPS * SIZE).half(), values(32, GROUPS * SIZE + 4, seed=1).half()[:, : GROUPS * SIZE]
    order = reorder_patterns(mask, groups_per_block=2, block_m=16, backend="triton")
    got = gemm_k(h, weight, order, group_size=SIZE, backend="triton", tile=KTile(16, 16, 2, 4, 1, 1))
    wanted = gemm_k(h, weight, order, group_size=SIZE, backend="torch")
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def test_stacked_weights_must_be_neighbours() -> None:
    mask = make_mask("random", 8)
    weight, up = values(GROUPS * SIZE, DEPTH), values(GROUPS * SIZE, DEPTH)
    with pytest.raises(ShapeError, match="behind the gate weight"):
        gemm_mn(
            values(8, DEPTH),
            weight,
            reorder(mask, block_m=16, backend="triton"),
            up_weight=up,
            backend="triton",
            tile=MnTile(16, 16, 2, 4, 1, 2),
        )


def test_refusals_name_value_and_way_out() -> None:
    mask = make_mask("random", 8)
    order = reorder(mask, block_m=16, backend="triton")
    x, weight = values(8, DEPTH), values(GROUPS * SIZE, DEPTH)
    with pytest.raises(ShapeError, match="bool mask"):
        reorder(mask.float(), backend="torch")
    with pytest.raises(ShapeError, match="power of two"):
        reorder(mask, block_m=24, backend="torch")
    with pytest.raises(ShapeError, match="one dtype"):
        gemm_mn(x.half(), weight, order, backend="triton")
    with pytest.raises(UnsupportedBackendError, match="no backend 'cutlass'"):
        gemm_mn(x, weight, order, backend="cutlass")
    with pytest.raises(UnsupportedBackendError, match="choose backend='torch'"):
        gemm_mn(x, values(GROUPS * 6, DEPTH), order, backend="triton")
    patterns = reorder_patterns(mask, groups_per_block=2, backend="triton")
    with pytest.raises(ShapeError, match="contiguous rows"):
        gemm_k(values(GROUPS * SIZE, 8).t(), weight.t().contiguous(), patterns, group_size=SIZE, backend="triton")
