"""The tuning table and the choice of backends."""

import dataclasses
from pathlib import Path

import pytest
import torch

from wide.errors import ConfigError, UnsupportedBackendError
from wide.kernels.gemm_mn import GEMM_MN
from wide.kernels.kernel_set import KernelSet
from wide.kernels.reorder import REORDER
from wide.kernels.tuning import Choice, TuningTable, bucket, tuning_key

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
    first.store("a", choice)
    second.store("b", Choice(backend="dense"))
    again = TuningTable(path)
    assert again.lookup("a") == choice
    assert again.lookup("b") == Choice(backend="dense")
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("[1, 2")
    with pytest.raises(ConfigError, match="delete it"):
        TuningTable(path)


def test_auto_follows_the_table_and_else_never_loses_to_dense(tmp_path: Path) -> None:
    table = TuningTable(tmp_path / "tuning.json")
    kernels = KernelSet(device=CPU, table=table)
    assert kernels.choose(GEMM_MN, CASE).backend == "dense"
    measured = Choice(backend="triton", tile=(32, 32, 2, 4, 1, 0), block_m=32)
    table.store(tuning_key(GEMM_MN.name, CPU, CASE), measured)
    assert kernels.choose(GEMM_MN, CASE) == measured
    assert kernels.choose(REORDER, REORDER.cases[0]).backend == "triton"


def test_named_backends_run_or_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TuningTable(tmp_path / "tuning.json")
    assert KernelSet(device=CPU, backend="torch", table=table).choose(GEMM_MN, CASE) == Choice(backend="torch")
    with pytest.raises(ConfigError, match="has no backend"):
        KernelSet(device=CPU, backend="cuda", table=table).choose(GEMM_MN, CASE)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedBackendError, match="CUDA device"):
        KernelSet(device=CPU, backend="triton", table=table).choose(GEMM_MN, CASE)
