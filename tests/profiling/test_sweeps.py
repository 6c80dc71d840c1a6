"""Which kernels over output groups the benches and `wide tune` try, by device, installation and group size."""

import pytest
import torch

from wide.kernels.gemm_mn.tiles import ClusterMnTile, HopperMnTile, MnTile
from wide.kernels.tuning import Choice
from wide.profiling import coarse, k_tiles, layer_shapes, mn_tiles, sweeps
from wide.profiling.backends import backend_of
from wide.profiling.mn_tiles import mn_hopper_tiles
from wide.profiling.sweeps import gemm_k_sweeps, gemm_mn_sweeps, mn_sweep

CPU = torch.device("cpu")
GLUON, CLUSTER = (128, HopperMnTile(2, 256, 4, 1)), (256, ClusterMnTile(256, 256))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(mn_tiles, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(mn_tiles, "native_obstacle", lambda: None)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_in_cuda_is_tried_where_groups_are_whole_tiles_of_it(monkeypatch):
    assert mn_hopper_tiles(CPU, 128, gated=True) == mn_hopper_tiles(CPU, 512, gated=False) == (GLUON, CLUSTER)
    assert mn_hopper_tiles(CPU, 64, gated=True) == ((128, HopperMnTile(2, 128, 4, 1)),)
    assert mn_hopper_tiles(CPU, 128, gated=False) == ((128, HopperMnTile(2, 128, 4, 1)),)
    monkeypatch.setattr(mn_tiles, "native_obstacle", lambda: "no compiler")
    assert mn_hopper_tiles(CPU, 128, gated=True) == (GLUON,)
    monkeypatch.setattr(mn_tiles, "hopper_obstacle", lambda device: "not a Hopper")
    assert mn_hopper_tiles(CPU, 128, gated=True) == ()


@pytest.mark.usefixtures("hopper", "host")
def test_candidates_are_named_by_their_backend_and_stand_for_it():
    tiles = ((128, MnTile(128, 64, 4, 8, 1, 2)), GLUON, CLUSTER)
    sweep = mn_sweep("q", torch.randn(8, 64), torch.randn(512, 64), None, 256, 0.5, tiles)
    names = ["dense", "128x128x64x4x8x1x2", "128xgluon 2x256x4x1", "256xcuda 256x256"]
    assert list(sweep.choices) == names
    assert [backend_of(name) for name in names] == ["dense", "triton", "gluon", "cuda"]
    assert sweep.choices["256xcuda 256x256"] == Choice(backend="cuda", tile=(256, 256), block_m=256)


@pytest.mark.usefixtures("hopper", "host")
def test_all_benches_try_it(monkeypatch):
    monkeypatch.setattr(sweeps, "FFN", 256)
    monkeypatch.setattr(sweeps, "ATTENTION_GROUP", 64)
    found = list(gemm_mn_sweeps((8,), False, (128, 0.5)))
    assert [("256xcuda 256x256" in sweep.candidates) for sweep in found] == [True, False]
    coarse_one = coarse._mn("gate_up", torch.randn(2, 256, 64), 8, 128, 0.5)
    assert list(coarse_one.choices)[-2:] == ["128xgluon 2x256x4x1", "256xcuda 256x256"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("quick", [True, False])
def test_tuning_tries_it_once_beside_the_others(quick):
    for size, gated, wanted in ((128, True, True), (64, True, False), (256, False, True), (128, False, False)):
        tiles = layer_shapes._mn_tiles(CPU, size, gated, quick)
        assert len(set(tiles)) == len(tiles)
        assert (CLUSTER in tiles) == wanted


@pytest.mark.usefixtures("hopper", "host")
def test_products_over_input_groups_are_tried_over_one_sort(monkeypatch):
    for module in (k_tiles, sweeps):
        monkeypatch.setattr(module, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(k_tiles, "native_obstacle", lambda: None)
    monkeypatch.setattr(sweeps, "FFN", 1280)
    monkeypatch.setattr(sweeps, "HIDDEN", 256)
    monkeypatch.setattr(sweeps, "ATTENTION_GROUP", 64)
    down, output = gemm_k_sweeps((8,), False, (128, 0.5))
    assert down.choices["s=10 128xcuda 128x256"] == Choice(
        backend="cuda", tile=(128, 256), block_m=128, groups_per_block=10
    )
    assert "s=4 128xcuda 128x256" in output.choices
    assert [backend_of(name) for name in (*down.candidates, *output.candidates)].count("cuda") == 2
    tried = layer_shapes._k_variants(torch.empty(256, 1280), 8, 128, 10, True)
    assert [(s, backend_of(sweeps._fields(t))) for s, _, t in tried if s > 8] == [(10, "cuda")]
