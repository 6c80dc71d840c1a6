"""Kernels on CuTe compile without a GPU for every architecture, to tensor-core instructions, and spill nothing."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from machine_code import described

from wide.errors import UnsupportedBackendError
from wide.kernels.gemm_k import _cute as gemm_k_cute
from wide.kernels.gemm_mn import _cute as gemm_mn_cute
from wide.kernels.native import cute
from wide.kernels.native.cute import CuteTile

needs_compiler = pytest.mark.skipif(cute.obstacle() is not None, reason=str(cute.obstacle()))
TARGETS = (80, 89, 90, 100, 120)
# Largest shared memory of one block on the GPUs that have least, and registers of a multiprocessor.
SHARED, REGISTERS = 101376, 65536


def _mn(level: int, *, gated: bool, stages: int = 3) -> dict[str, int]:
    return gemm_mn_cute.variant(CuteTile(level, stages), torch.bfloat16, group_size=128, block_m=128, gated=gated)


def _k(level: int, *, is_stored: bool) -> dict[str, int]:
    sizes = {"group_size": 128, "width": 4096, "block_m": 128}
    return gemm_k_cute.variant(CuteTile(level), torch.bfloat16, **sizes, is_stored=is_stored)


PRODUCTS = {
    "gate and up": (gemm_mn_cute.SOURCE, _mn(2, gated=True)),
    "query": (gemm_mn_cute.SOURCE, _mn(0, gated=False)),
    "output": (gemm_k_cute.SOURCE, _k(2, is_stored=True)),
    "down, added up": (gemm_k_cute.SOURCE, _k(1, is_stored=False)),
}


def _check(source: Path, variant: dict[str, int], target: int, folder: Path) -> None:
    made = folder / "kernel.cubin"
    paths = [f"-I{path}" for path in cute.includes()]
    options = cute.options_of(variant, cute.architecture(target))
    subprocess.run([str(cute.compiler()), *paths, *options, "-cubin", str(source), "-o", str(made)], check=True)
    code, usage = described(made.read_bytes())
    assert "HMMA.16816.F32.BF16" in code
    assert {"LDGSTS", "LDSM"} <= set(re.findall(r"LDGSTS|LDSM", code))
    assert not re.findall(r"\b(?:STL|LDL)\b", code)
    for registers, stack, local in re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage):
        assert int(stack) == int(local) == 0
        assert int(registers) * variant.get("THREADS", 256) <= REGISTERS


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_use_tensor_cores_and_spill_nothing(product: str, target: int, tmp_path: Path) -> None:
    _check(*PRODUCTS[product], target, tmp_path)


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute.importlib.util, "find_spec", lambda name: None)
    words = r"need nvidia-cutlass and apache-tvm-ffi: pip install 'wide\[cute\]'$"
    assert re.search(words, str(cute.obstacle.__wrapped__()))
    monkeypatch.setattr(cute.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cute.shutil, "which", lambda *_, **__: None)
    assert "need nvcc of CUDA 12.8" in str(cute.obstacle.__wrapped__())


@needs_compiler
def test_what_the_compiler_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("void broken() { int twelve = thirteen; }\n")
    with pytest.raises(UnsupportedBackendError, match=r'(?s)broken\.cu, .*"thirteen" is undefined'):
        cute.build(source, {"LEVEL": 1}, "80", tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())
