"""The tuning table and the choice of backends."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.gemm_k import GEMM_K, GEMM_K_ROWS
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from wide.errors import ConfigError
from wide.inference.choice.tuning.tune import fastest
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice, TuningTable, bucket, shape_key, shipped_path, tuning_key

CPU = torch.device("cpu")
CASE = GEMM_MN.cases[0]


def test_rows_share_a_bucket_up_to_a_power_of_two() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 4096, 4097)] == [1, 2, 4, 4, 8, 4096, 8192]


def test_a_new_token_count_in_a_bucket_does_not_retune() -> None:
    cases = [dataclasses.replace(CASE, sizes={**CASE.sizes, "num_rows": n}) for n in (2049, 4000, 4097)]
    keys = [tuning_key("gemm_mn", CPU, case) for case in cases]
    assert keys[0] == keys[1] != keys[2]


def test_choices_survive_on_disk_and_merge(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "tuning.json"
    first, second = TuningTable(path), TuningTable(path)
    choice = Choice(backend="triton", tile=(128, 64, 4, 8, 1, 1), block_m=128, median_us=12.5)
    first.store({"a": choice})
    second.store({"b": Choice(backend="dense")})
    again = TuningTable(path)
    assert again._choices["a"] == choice
    assert again._choices["b"] == Choice(backend="dense")
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("[1, 2")
    with pytest.raises(ConfigError, match="delete it"):
        TuningTable(path)


def test_what_was_measured_is_found_by_shape(tmp_path: Path) -> None:
    table = TuningTable(tmp_path / "tuning.json")
    assert table.nearest(GEMM_MN.name, CASE, CPU, fewer_rows=True) is None
    measured = Choice(backend="triton", tile=(32, 32, 2, 4, 1, 0), block_m=32)
    table.store({tuning_key(GEMM_MN.name, CPU, CASE): measured})
    assert table.nearest(GEMM_MN.name, CASE, CPU, fewer_rows=True) == measured


def test_tuning_keeps_the_fastest() -> None:
    timed = [
        Choice(backend="dense", median_us=10.0),
        Choice(backend="triton", tile=(128, 64, 4, 8, 1, 1), block_m=128, median_us=7.0),
        Choice(backend="triton", tile=(128, 64, 4, 8, 1, 2), block_m=64, median_us=5.0),
    ]
    ((name, choice),) = fastest("gemm_mn", timed).items()
    assert (name, choice.median_us, choice.dense_us) == ("gemm_mn", 5.0, 10.0)


def test_dense_wins_a_tie_within_the_noise() -> None:
    timed = [Choice(backend="triton", median_us=9.9), Choice(backend="dense", median_us=10.0)]
    assert {choice.backend for choice in fastest("gemm_mn", timed).values()} == {"dense"}


def test_a_product_over_one_sort_is_kept_though_dense_won() -> None:
    sort: dict[str, Any] = {"backend": "cuda", "tile": (128, 256), "groups_per_block": 112, "left_to_tiles": 0.97}
    dense, once = Choice(backend="dense", median_us=10.0), Choice(**sort, median_us=10.3)
    found = fastest("gemm_k", [dense, once, Choice(backend="triton", groups_per_block=8, median_us=12.0)])
    assert found["gemm_k"].backend == "dense"
    assert found == {"gemm_k": found["gemm_k"], "gemm_k_rows": Choice(**sort, median_us=10.3, dense_us=10.0)}
    # Nothing to compare it with, and a sort of few groups, which has no masks to be alike under.
    assert "gemm_k_rows" not in fastest("gemm_k", [once])
    few = Choice(backend="cuda", tile=(128, 256), groups_per_block=8, median_us=7.0)
    assert set(fastest("gemm_k", [dense, few])) == {"gemm_k"}


def test_a_dense_product_without_a_rival_is_no_choice() -> None:
    assert fastest("gemm_mn", [Choice(backend="dense", median_us=10.0)]) == {}


def test_what_a_choice_decides_is_no_part_of_its_key() -> None:
    tiled = dataclasses.replace(CASE, sizes={**CASE.sizes, "block_m": 512, "groups_per_block": 3})
    assert shape_key("gemm_mn", tiled) == shape_key("gemm_mn", CASE)


def test_a_shipped_table_lies_below_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(backend="triton", tile=(128, 64, 4, 8, 1, 1), median_us=7.0)
    TuningTable(tmp_path / "cpu.json").store({shape_key("gemm_mn", CASE): choice})
    monkeypatch.setattr("wide.kernels.tuning.shipped_path", lambda name: tmp_path / f"{name}.json")
    monkeypatch.setattr("wide.kernels.tuning._shipped", _uncached_shipped)
    table = TuningTable(tmp_path / "tuning.json")
    assert table.nearest("gemm_mn", CASE, CPU, fewer_rows=True) == choice
    table.store({tuning_key("gemm_mn", CPU, CASE): Choice(backend="dense")})
    assert table.nearest("gemm_mn", CASE, CPU, fewer_rows=True) == Choice(backend="dense")


def _uncached_shipped(name: str) -> dict[str, Choice]:
    from wide.kernels import tuning

    return tuning._read_choices(tuning.shipped_path(name))


def test_shipped_tables_name_what_is_registered() -> None:
    operators = {o.name: o for o in (GEMM_MN, GEMM_K, GEMM_K_ROWS, GEMV_MN, GEMV_K, ATTENTION_PREFILL)}
    for path in shipped_path("x").parent.glob("*.json"):
        choices = TuningTable(path)._choices
        assert choices
        for key, choice in choices.items():
            operator = operators[key.split(" | ")[0]]
            many = choice.groups_per_block > PATTERN_GROUPS
            backends = (GEMM_K_ROWS if many else operator).backends
            assert choice.backend in (*backends, "dense"), key
