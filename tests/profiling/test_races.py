"""A race compares before it times; which candidates there are, what they stand for, and which of them ships."""

import dataclasses
import math

import pytest
import torch

import benchmarks.languages  # noqa: F401 - whose backends are tried here, too
from benchmarks.operators import candidate_backend, table
from benchmarks.races import BenchRace, measure, product_race, shipped_name
from wide.inference.choice.layer_sizes import LayerSizes, candidates
from wide.inference.choice.tuning import race as racing
from wide.inference.choice.tuning.products import choice_name
from wide.inference.choice.tuning.race import launched, run
from wide.inference.choice.tuning.timing import Timing
from wide.inference.operators.products import LinearWeights
from wide.kernels import device as kernel_device
from wide.kernels.dispatch import Backends
from wide.kernels.tuning import Choice

CPU = torch.device("cpu")
CLUSTER = Choice(backend="cuda", tile=(256, 256), block_m=256)
SIZES = LayerSizes(
    hidden_size=64,
    query_width=64,
    head_dim=16,
    num_kv_heads=2,
    attention_groups=2,
    ffn_width=512,
    ffn_groups=4,
    is_gated=True,
)


@pytest.fixture
def clock(monkeypatch):
    """A clock by which candidates take as many microseconds as the numbers that their names end with."""

    def time(calls, **_):
        timing = {"low_us": 1.0, "high_us": 9.0, "num_samples": 3}
        return {name: Timing(median_us=float(name.rpartition(" ")[2]), **timing) for name in calls}

    monkeypatch.setattr(racing, "time_interleaved", time)


@pytest.fixture
def hopper(monkeypatch, triton_everywhere):
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: None)


def _fails():
    raise RuntimeError("out of resource")


def _race(**changes):
    one = torch.ones(4)
    candidates = {
        "dense 12": [lambda: one.clone()],
        "dense other 10": [lambda: one * 7],
        "good 5": [lambda: one * 1.001],
        "wrong 1": [lambda: one * 2],
        "nan 1": [lambda: one * math.nan],
        "failing 1": [_fails],
    }
    facts = {"name": "q", "candidates": candidates, "wanted": candidates["dense 12"][0], "trusted": ("dense other 10",)}
    return BenchRace(**facts | changes)


def test_what_disagrees_is_not_timed_and_what_fails_is_recorded(clock):
    records = {record["candidate"]: record for record in measure(_race(flop=1e6, bytes_moved=1e3), rounds=1)}
    assert {name for name, record in records.items() if "median_us" in record} == {
        "dense 12",
        "dense other 10",
        "good 5",
    }
    assert records["wrong 1"]["error"] == pytest.approx(1.0)
    assert records["nan 1"]["error"] == math.inf
    assert records["failing 1"]["failure"] == "RuntimeError: out of resource"
    # The fastest of the dense peers is the one to beat.
    assert {record["peer"] for record in records.values()} == {"dense other 10"}
    good = records["good 5"]
    assert (good["speedup"], good["active_tflops"], good["active_gbytes_per_s"]) == pytest.approx((2.0, 0.2, 0.2))
    text = table(list(records.values()))
    assert "RED wrong 1" in text
    assert "FAIL failing 1: RuntimeError" in text


def test_a_race_may_name_its_peer_and_what_ships(clock):
    records = {r["candidate"]: r for r in measure(_race(peer="dense 12", shipped="good 5", kind="sweep"), rounds=1)}
    assert records["good 5"]["speedup"] == pytest.approx(12 / 5)
    assert [name for name, record in records.items() if record["shipped"]] == ["good 5"]
    assert all(record["sweep"] == "q" for record in records.values())
    assert "ships" in table(list(records.values()))


def test_no_candidate_but_the_peers_is_begun_after_the_time(clock):
    assert set(run(_race(), rounds=1, until=0.0)) == {"dense 12", "dense other 10"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_a_gpu_no_kernels_are_launched():
    assert launched(lambda: torch.ones(3).sum()) == {}


def _tried(name, size, *, groups=2, quick=True, rows=64, **sizes):
    channels = "ffn" if name in ("gate_up", "down") else "attention"
    width = {"ffn": "ffn_width", "attention": "query_width"}[channels]
    layer = dataclasses.replace(SIZES, **{width: size * groups, f"{channels}_groups": groups}, **sizes)
    return candidates(name, layer, rows, CPU, quick=quick)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_in_cuda_is_tried_where_groups_are_whole_tiles_of_it(monkeypatch):
    def special(name, size):
        return [choice for choice in _tried(name, size) if choice.backend != "triton"]

    assert special("gate_up", 128) == special("query", 512) == [CLUSTER]
    assert special("gate_up", 64) == special("query", 128) == []
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: "no compiler")
    assert special("gate_up", 128) == []
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: "not a Hopper")
    assert special("gate_up", 128) == []


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("size", [16, 64, 96, 128, 256])
def test_tiles_fit_groups_and_stand_once(quick, size):
    found = _tried("gate_up", size, quick=quick)
    assert len(set(found)) == len(found)
    assert all(size % choice.tile[0] == 0 for choice in found if choice.backend == "triton")
    sums = _tried("down", size, groups=12, hidden_size=256, quick=quick)
    assert len(set(sums)) == len(sums)
    # One sort of many groups is the first, where its kernel takes them.
    assert (sums[0].groups_per_block == 12) == (size in (64, 128, 256))


@pytest.mark.usefixtures("host", "hopper")
def test_candidates_are_named_by_their_backend_and_stand_for_it():
    tried = [Choice(backend="triton", tile=(128, 64, 4, 8, 1, 2), block_m=128), CLUSTER]
    race = product_race("query", SIZES, 8, 0.5, choices=tried, device=CPU)
    names = ["dense", "128x128x64x4x8x1x2", "256xcuda 256x256"]
    assert list(race.choices) == list(race.candidates) == names
    assert [candidate_backend(name) for name in names] == ["dense", "triton", "cuda"]
    assert race.choices["256xcuda 256x256"] == CLUSTER
    assert race.name == "q G=32 p=0.5 M=8"


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["query", "gate_up"])
@pytest.mark.parametrize("zeroed", [True, False, None])
def test_products_over_output_groups_agree_where_they_execute(name, zeroed):
    race = product_race(name, SIZES, 8, 0.5, device=CPU, zeroed=zeroed)
    records = measure(race, rounds=1)
    assert all(record["error"] < 1e-2 and record["median_us"] for record in records)
    assert any(each.endswith("zeroed") for each in race.candidates) == (zeroed is None and name == "gate_up")
    moved = race.case.sizes["num_rows"] * SIZES.hidden_size * 2
    assert all(record["active_gbytes_per_s"] * record["median_us"] * 1e3 > moved for record in records)


@pytest.mark.usefixtures("host")
def test_products_over_input_groups_read_nothing_that_is_skipped():
    race = product_race("down", SIZES, 8, 0.5, device=CPU)
    records = {record["candidate"]: record for record in measure(race, rounds=1)}
    assert all(record["error"] < 1e-2 for record in records.values())
    full, zeros = (race.candidates[name][0]() for name in ("dense", "dense on zeros"))
    assert not torch.allclose(full, zeros)
    assert {name for name, choice in race.choices.items() if choice.backend == "dense"} == {"dense on zeros"}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["query", "gate_up", "down", "output"])
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_products_of_few_rows_agree_and_the_shipped_tile_is_tried_first(name, weights):
    shipped = Choice(backend="triton", tile=(4, 1024, 2), median_us=7.0)
    tried = [Choice(backend="triton", tile=(2, 512, 1))]
    sizes = dataclasses.replace(SIZES, weights=weights)
    race = product_race(name, sizes, 2, 0.5, choices=tried, device=CPU, shipped=shipped)
    records = {record["candidate"]: record for record in measure(race, rounds=1)}
    assert all(record["error"] < 1.5e-2 for record in records.values())
    assert [name for name, record in records.items() if record["shipped"]] == ["tile 4-1024-2"]
    assert {"operator", "tile 2-512-1"} <= set(records)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_queries_of_few_rows_are_charged_with_keys_and_values_that_fill_no_groups(weights, monkeypatch):
    sizes = dataclasses.replace(SIZES, query_width=96, weights=weights)
    assert sizes.apart("query", 1) == 64
    assert sizes.apart("output", 1) == sizes.apart("query", 64) == SIZES.apart("query", 1) == 0
    dense, seen = LinearWeights.dense, []
    monkeypatch.setattr(LinearWeights, "dense", lambda self, x, *rest: (seen.append(self.outputs), dense(self, x))[1])
    race = product_race("query", sizes, 1, 0.5, choices=[], device=CPU)
    assert race.case.sizes["apart"] == 64
    records = {record["candidate"]: record for record in measure(race, rounds=1)}
    assert all(record["error"] < 1.5e-2 for record in records.values())
    for name, calls in race.candidates.items():
        seen.clear()
        assert calls[0]().shape[1] == (160 if name.startswith("dense") else 96)
        # The dense product makes all three at once.
        assert seen == ([64] if name == "operator" else [160] if weights == "int8" else [])


def test_what_ships_is_a_candidate():
    choices = {
        "dense a": Choice(backend="dense"),
        "dense b": Choice(backend="dense"),
        "first": Choice(backend="triton", tile=(1,), block_m=64),
        "second": Choice(backend="triton", tile=(2,), block_m=64),
    }
    assert shipped_name(choices, None) == ""
    assert shipped_name(choices, Choice(backend="dense")) == "dense a"
    assert shipped_name(choices, Choice(backend="triton")) == "first"
    measured = Choice(backend="triton", tile=(2,), block_m=64, median_us=3.0)
    assert shipped_name(choices, measured) == "second"
    assert shipped_name(choices, dataclasses.replace(measured, backend="cuda")) == ""


def test_all_registered_backends_are_tried_under_names_of_their_own(monkeypatch):
    monkeypatch.setattr(Backends, "missing", lambda *_: None)
    sizes = dataclasses.replace(SIZES, query_width=256, head_dim=64)
    # Where it is not known as the fastest it is tried if there is time.
    assert Choice(backend="tilelang") not in candidates("attention", sizes, 64, CPU, quick=True)
    assert Choice(backend="tilelang") in candidates("attention", sizes, 64, CPU, quick=False)
    for name, rows in (("attention", 64), ("gate_up", 1), ("down", 1), ("gate_up", 64), ("down", 64)):
        found = candidates(name, sizes, rows, CPU, quick=True)
        names = [choice_name(choice) for choice in found]
        assert len(set(names)) == len(names)
        assert [candidate_backend(each) for each in names] == [choice.backend for choice in found]
        assert {"triton", "cute"} <= {choice.backend for choice in found}
