"""Kernels on CuTe, their sources compiled for the CPU: every case of their operators, called as on a GPU.

Compiling takes half a minute a kernel: all are slow tests.
"""

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases.attention_decode import ATTENTION_DECODE
from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K, GEMM_K_ROWS
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from benchmarks.languages import cute
from benchmarks.languages.cute import CuteTile
from benchmarks.languages.gemm_k import _cute as gemm_k_cute
from benchmarks.languages.gemm_mn import _cute as gemm_mn_cute
from wide.kernels.device import DeviceFacts
from wide.kernels.native import launch
from wide.kernels.tuning import Case

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
_TOOLKIT = Path("/usr/local/cuda/include")

_COMPILES = pytest.mark.skipif(
    cute.obstacle() is not None or shutil.which("g++") is None or not _TOOLKIT.exists(),
    reason=cute.obstacle() or "no compiler of C++ (g++), or no headers of CUDA in /usr/local/cuda",
)
pytestmark = [pytest.mark.slow, _COMPILES]


@pytest.fixture(scope="module", autouse=True)
def _emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have kernels on CuTe built for the CPU, and its tensors taken."""
    folder = tmp_path_factory.mktemp("emulated")

    def build(source: Path, variant: dict[str, int], architecture: str, _: Path) -> Path:
        words = "-".join(str(value) for value in variant.values())
        made = folder / f"{source.stem}-{words}.so"
        paths = [f"-I{path}" for path in (FOLDER, *cute.includes(), _TOOLKIT, _TOOLKIT / "cccl")]
        options = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-x", "c++"]
        macros = [f"-D{name}={value}" for name, value in variant.items()]
        header = "emulated_cute_hopper.h" if "hopper" in source.stem else "emulated_cute.h"
        command = ["g++", *options, *paths, *macros, "-include", header, str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cute, "build", build)
        patched.setattr(cute, "ampere_obstacle", lambda device: None)
        yield
    cute._function.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products take a GPU for Hopper, of three clusters; instead of a tensor map comes what would be in it."""

    def encoded(address: int, rows: int, columns: int, stride: int, _: torch.dtype, *box: int) -> Any:
        return (ctypes.c_int64 * 16)(address, rows, columns, stride, *box)

    facts = DeviceFacts(name="emulated", capability=90, num_sms=7, shared_memory_bytes=232448, l2_bytes=0)
    for module in (gemm_k_cute, gemm_mn_cute):
        monkeypatch.setattr(module, "device_facts", lambda device: facts)
    monkeypatch.setattr(launch, "_encoded", encoded)


def _name(case: Case) -> str:
    return "-".join(str(fact) for fact in (*case.sizes.values(), case.active, *case.options.values()))


def _shared_out(cases: Iterable[Case], is_quick: Callable[[Case], bool]) -> list[Any]:
    """Return the cases as parameters; those that would compile one more variant are slow."""
    return [
        pytest.param(
            dataclasses.replace(case, dtype=torch.bfloat16),
            id=_name(case),
            marks=() if is_quick(case) else pytest.mark.slow,
        )
        for case in cases
    ]


_OF_HOPPER = [
    # Tiles of the rows of a cluster, which Triton would list.
    dataclasses.replace(case, sizes={**case.sizes, "block_m": 256})
    for case in (*GEMM_MN.cases, *GEMM_MN.large_cases)
    if case.sizes["group_size"] % 32 == 0
]


def _is_gated(case: Case) -> bool:
    return bool(case.options.get("gated")) and case.sizes["group_size"] == 32


@pytest.mark.parametrize("case", _shared_out(GEMM_MN.cases, _is_gated))
def test_gemm_mn(case: Case) -> None:
    _agrees(GEMM_MN, case)


@pytest.mark.parametrize("tile", [CuteTile(0, 2), CuteTile(1, 4), CuteTile(2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_levels_of_gemm_mn(tile: CuteTile, dtype: torch.dtype) -> None:
    # Tiles of 256 rows are two of the kernel's; the last has fewer rows than a fragment.
    sizes = {"num_rows": 300, "num_groups": 2, "group_size": 64, "depth": 200, "block_m": 256}
    options = {"gated": True, "activation": "silu", "biased": True}
    _agrees(GEMM_MN, Case(sizes=sizes, dtype=dtype, active=0.9, options=options), tile=tile)


def _is_silu_of_whole_tiles(case: Case) -> bool:
    return case.options.get("activation") == "silu" and case.sizes["group_size"] % 128 == 0


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("case", _shared_out(_OF_HOPPER, _is_silu_of_whole_tiles))
def test_gemm_mn_on_hopper(case: Case) -> None:
    _agrees(GEMM_MN, case)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("tile", [CuteTile(0, 2), CuteTile(1, 3), CuteTile(2, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_levels_of_gemm_mn_on_hopper(tile: CuteTile, dtype: torch.dtype) -> None:
    # A depth that is no multiple of a step; whole tiles with a remainder, and short ones alone.
    sizes = {"num_rows": 300, "num_groups": 5, "group_size": 64, "depth": 200, "block_m": 256}
    for active, gated in ((1.0, True), (0.4, True), (0.5, False)):
        options = {"gated": gated, "activation": "silu", "biased": True}
        _agrees(GEMM_MN, Case(sizes=sizes, dtype=dtype, active=active, options=options), tile=tile)


def _is_stored(case: Case) -> bool:
    return bool(case.options.get("keeps_empty")) and case.sizes["group_size"] == 32


@pytest.mark.parametrize("case", _shared_out(GEMM_K.cases, _is_stored))
def test_gemm_k(case: Case) -> None:
    _agrees(GEMM_K, case)


@pytest.mark.parametrize("case", _shared_out(GEMM_K_ROWS.cases, bool))
def test_gemm_k_rows(case: Case) -> None:
    _agrees(GEMM_K_ROWS, case)


_K_OF_HOPPER = [
    case
    for case in (*GEMM_K.large_cases, *GEMM_K_ROWS.cases, *GEMM_K_ROWS.large_cases[:1])
    if case.sizes["group_size"] % 64 == 0 and case.options.get("keeps_empty", "block_m" not in case.sizes)
]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("case", _shared_out(_K_OF_HOPPER, bool))
def test_gemm_k_on_hopper(case: Case) -> None:
    _agrees(GEMM_K if "block_m" in case.sizes else GEMM_K_ROWS, case)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_levels_of_gemm_k_on_hopper(dtype: torch.dtype) -> None:
    # A width that is no multiple of a tile's.
    names = ("num_rows", "num_groups", "group_size", "width", "block_m", "groups_per_block")
    sizes = dict(zip(names, (200, 5, 64, 312, 128, 5), strict=True))
    case = Case(sizes=sizes, dtype=dtype, active=0.1, options={"keeps_empty": True, "biased": True})
    for tile in (CuteTile(1, 2), CuteTile(2, 3)):
        _agrees(GEMM_K, case, tile=tile)


@pytest.mark.parametrize("operator", [GEMV_MN, GEMV_K], ids=lambda operator: operator.name)
@pytest.mark.parametrize("place", range(7))
def test_gemv(operator: Operator, place: int) -> None:
    _agrees(operator, dataclasses.replace(operator.cases[place], dtype=torch.bfloat16))


def _is_of_gathered_heads(case: Case) -> bool:
    return case.sizes["num_query_heads"] == 14


@pytest.mark.parametrize("case", _shared_out(ATTENTION_PREFILL.cases, _is_of_gathered_heads))
def test_attention_prefill(case: Case) -> None:
    _agrees(ATTENTION_PREFILL, case)


@pytest.mark.parametrize("tile", [CuteTile(0, 3), CuteTile(1, 2), CuteTile(2, 4)])
def test_levels_of_attention_prefill(tile: CuteTile) -> None:
    # Several tiles of each unit, the last with fewer rows than a fragment, and several steps between their edges.
    names = ("batch", "query_len", "key_len", "num_query_heads", "num_kv_heads", "num_groups", "head_dim")
    sizes = dict(zip(names, (2, 330, 400, 4, 2, 1, 64), strict=True))
    for options in ({}, {"window": 150}):
        case = Case(sizes=sizes, dtype=torch.float16, active=0.4, options=options)
        _agrees(ATTENTION_PREFILL, case, tile=tile)


@pytest.mark.parametrize("case", _shared_out(ATTENTION_DECODE.cases, bool))
def test_attention_decode(case: Case) -> None:
    _agrees(ATTENTION_DECODE, case)


def test_splits_of_attention_decode() -> None:
    # The second cache is so short that one of its two parts holds no key.
    names = ("batch", "key_len", "num_query_heads", "num_kv_heads", "num_groups", "head_dim", "ragged")
    sizes = dict(zip(names, (2, 600, 16, 1, 1, 64, 580), strict=True))
    case = Case(sizes=sizes, dtype=torch.float16, active=1.0)
    _agrees(ATTENTION_DECODE, case, tile=CuteTile(0, 3))


@pytest.mark.parametrize("keeps_empty", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_levels_of_gemm_k(keeps_empty: bool, dtype: torch.dtype) -> None:
    # Ragged in rows, groups and width.
    names = ("num_rows", "num_groups", "group_size", "width", "block_m", "groups_per_block")
    sizes = dict(zip(names, (200, 5, 72, 136, 128, 5), strict=True))
    case = Case(sizes=sizes, dtype=dtype, active=0.4, options={"keeps_empty": keeps_empty, "biased": True})
    for tile in (CuteTile(1, 2), CuteTile(2, 3)):
        _agrees(GEMM_K, case, tile=tile)


def _agrees(operator: Operator, case: Case, **options: Any) -> None:
    if operator.supports("cute", CPU, case) is not None:
        pytest.skip(str(operator.supports("cute", CPU, case)))
    arguments = operator.build(case, CPU)
    got = operator.run("cute", **arguments, **options)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]
