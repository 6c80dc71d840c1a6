"""Kernels on CuTe compile without a GPU for every architecture, to tensor-core instructions, and spill nothing."""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import described

from benchmarks.languages import cute
from benchmarks.languages.attention_decode import _cute as decode_cute
from benchmarks.languages.attention_prefill import _cute as prefill_cute
from benchmarks.languages.cute import CuteTile
from benchmarks.languages.gemm_k import _cute as gemm_k_cute
from benchmarks.languages.gemm_mn import _cute as gemm_mn_cute
from wide.errors import UnsupportedBackendError

needs_compiler = pytest.mark.skipif(cute.obstacle() is not None, reason=str(cute.obstacle()))
TARGETS = (80, 89, 90, 100, 120)
# Largest shared memory of one block on the GPUs that have least, and registers of a multiprocessor.
SHARED, REGISTERS = 101376, 65536


def _mn(level: int, *, gated: bool) -> dict[str, int]:
    return gemm_mn_cute.variant(CuteTile(level), torch.bfloat16, group_size=128, block_m=128, gated=gated)


def _k(level: int, *, is_stored: bool) -> dict[str, int]:
    sizes = {"group_size": 128, "width": 4096, "block_m": 128}
    return gemm_k_cute.variant(CuteTile(level), torch.bfloat16, **sizes, is_stored=is_stored)


PRODUCTS = {
    "gate and up": (gemm_mn_cute.SOURCE, _mn(2, gated=True)),
    "query": (gemm_mn_cute.SOURCE, _mn(0, gated=False)),
    "output": (gemm_k_cute.SOURCE, _k(2, is_stored=True)),
    "down, added up": (gemm_k_cute.SOURCE, _k(1, is_stored=False)),
    "decode": (decode_cute.SOURCE, decode_cute.variant(CuteTile(0), torch.bfloat16, 128)),
    "prefill": (prefill_cute.SOURCE, prefill_cute.variant(CuteTile(), torch.bfloat16, 128)),
    "prefill of whole tiles": (prefill_cute.SOURCE, prefill_cute.variant(CuteTile(0), torch.bfloat16, 128)),
    "prefill of large heads": (prefill_cute.SOURCE, prefill_cute.variant(CuteTile(1), torch.bfloat16, 256)),
    "decode of large heads": (decode_cute.SOURCE, decode_cute.variant(CuteTile(0), torch.bfloat16, 256)),
}


def _hopper(level: int, group_size: int, activation: str, *, gated: bool, dtype: torch.dtype) -> dict[str, int]:
    sizes: dict[str, Any] = {"group_size": group_size, "gated": gated, "activation": activation}
    return gemm_mn_cute.hopper_variant(CuteTile(level), dtype, **sizes)


HOPPER = {
    "gate and up": _hopper(2, 128, "silu", gated=True, dtype=torch.bfloat16),
    "query": _hopper(1, 512, "none", gated=False, dtype=torch.float16),
    "gate and up of small groups": _hopper(0, 32, "gelu_tanh", gated=True, dtype=torch.float16),
    "query of small groups": _hopper(2, 96, "none", gated=False, dtype=torch.bfloat16),
}


def _compiled(source: Path, variant: dict[str, int], target: int, folder: Path) -> tuple[str, str]:
    made = folder / "kernel.cubin"
    paths = [f"-I{path}" for path in cute.includes()]
    options = cute.options_of(variant, cute.architecture(target))
    command = [str(cute.compiler()), *paths, *options, "-cubin", str(source), "-o", str(made)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    # As of products that wait for each other.
    assert "Performance Loss" not in said.stdout + said.stderr
    code, usage = described(made.read_bytes())
    assert not re.findall(r"\b(?:STL|LDL)\b", code)
    assert set(re.findall(r"STACK:(\d+) .*?LOCAL:(\d+)", usage)) == {("0", "0")}
    return code, usage


def _check(source: Path, variant: dict[str, int], target: int, folder: Path) -> None:
    code, usage = _compiled(source, variant, target, folder)
    assert "HMMA.16816.F32.BF16" in code
    assert {"LDGSTS", "LDSM"} <= set(re.findall(r"LDGSTS|LDSM", code))
    for registers in re.findall(r"REG:(\d+)", usage):
        assert int(registers) * variant.get("THREADS", 256) <= REGISTERS


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_use_tensor_cores_and_spill_nothing(product: str, target: int, tmp_path: Path) -> None:
    _check(*PRODUCTS[product], target, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", HOPPER.values(), ids=HOPPER)
def test_products_of_hopper_share_weights_and_wait_once_a_step(variant: dict[str, int], tmp_path: Path) -> None:
    code, usage = _compiled(gemm_mn_cute.HOPPER_SOURCE, variant, 90, tmp_path)
    # What warp groups ask for beyond the launch's registers they wait for in vain; the source is refused then.
    assert re.findall(r"REG:(\d+)", usage) == ["168"]
    products = Counter(re.findall(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?", code))
    width, kind = variant["BN"] * (1 + variant["GATED"]), "" if variant["FLOAT16"] else ".BF16"
    # Of whole tiles and of short ones, four products of 16 each, of which the last is waited for.
    assert products == {(str(width), kind): 4, (str(width // 2), kind): 4}
    assert len(re.findall(r"HGMMA.*gsb0", code)) == 2
    assert set(re.findall(r"UTMALDG\S*|LDGSTS|STSM", code)) == {"UTMALDG.2D", "UTMALDG.2D.MULTICAST", "LDGSTS", "STSM"}
    # At the two meetings of a cluster, and none where a stage is released.
    assert len(re.findall(r"MEMBAR\.\w+\.GPU", code)) <= 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "words", "dtype", "is_drawn"),
    [(2, 1, torch.bfloat16, False), (1, 4, torch.float16, True), (2, 4, torch.bfloat16, True)],
)
def test_sums_of_hopper_wait_once_a_step(
    level: int, words: int, dtype: torch.dtype, is_drawn: bool, tmp_path: Path
) -> None:
    variant = gemm_k_cute.hopper_variant(CuteTile(level), dtype, words, is_drawn=is_drawn)
    code, usage = _compiled(gemm_k_cute.HOPPER_SOURCE, variant, 90, tmp_path)
    assert re.findall(r"REG:(\d+)", usage) == ["168"]
    products = Counter(re.findall(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?", code))
    assert products == {("256", ".BF16" if dtype == torch.bfloat16 else ""): 4}
    assert len(re.findall(r"HGMMA.*gsb0", code)) == 1
    assert set(re.findall(r"UTMALDG\S*|LDGSTS|STSM", code)) == {"UTMALDG.2D", "LDGSTS", "STSM"}
    assert not re.findall(r"MEMBAR\.\w+\.GPU", code)


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute.importlib.util, "find_spec", lambda name: None)
    words = r"need nvidia-cutlass and apache-tvm-ffi: pip install nvidia-cutlass apache-tvm-ffi$"
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
