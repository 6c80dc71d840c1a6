"""The program for compute-sanitizer knows every operator and tells right from wrong."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from wide.kernels.device import interprets_triton

FILE = Path(__file__).parents[2] / "benchmarks" / "sanitize.py"


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    """Return the program as a module."""
    spec = importlib.util.spec_from_file_location("sanitize", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")
def test_right_results_are_counted_and_wrong_ones_are_red(
    sanitize: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--device", "cpu", "--operators", "clear_skipped"]
    assert sanitize.main(given) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 cases, 0 red"
    right = sanitize.OPERATORS["clear_skipped"]

    def call(backend: str, **arguments: torch.Tensor) -> torch.Tensor:
        return arguments["values"] + 1 if backend == "torch" else right.run(backend, **arguments)

    wrong = dataclasses.replace(right, call=call)
    monkeypatch.setitem(sanitize.OPERATORS, "clear_skipped", wrong)
    assert sanitize.main([*given, "--limit", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("RED clear_skipped triton inf")
    assert lines[-1] == "1 cases, 1 red"


def test_persistent_kernels_get_few_programs(sanitize: ModuleType) -> None:
    assert sanitize.few_programs(2)(torch.device("cpu")).num_sms == 2


def test_kernels_whose_programs_come_in_pairs_get_two_pairs(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wide.kernels.gemm_k import _cuda as gemm_k
    from wide.kernels.gemm_mn import _cuda

    # Put back by the fixture after the program has replaced them.
    for module in (_cuda, gemm_k):
        monkeypatch.setattr(module, "device_facts", module.device_facts)
    for given, wanted in ((1, 4), (3, 4), (6, 6)):
        sanitize.limit_programs(given)
        assert _cuda.device_facts(torch.device("cpu")).num_sms == wanted
        assert gemm_k.device_facts(torch.device("cpu")).num_sms == given


def test_unknown_operators_are_refused(sanitize: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["--operators", "gemm"])
    assert "unknown operators ['gemm']" in capsys.readouterr().err
