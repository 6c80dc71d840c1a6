"""Decode GEMMs in CUDA C++, their source compiled for the CPU: what they give is the reference's."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases.gemv import _INT8_K, _INT8_MN, GEMV_K, GEMV_MN
from wide.kernels.gemv import _cuda
from wide.kernels.int8 import hadamard, rotated
from wide.kernels.linear_int8._cuda import linear_int8, supports
from wide.kernels.linear_int8.op import Int8Shape, quantise_rows
from wide.kernels.linear_int8.reference import linear_int8_reference

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler of C++ (g++) here")


class Emulated:
    """Stands for the kernel of a device: compiles its source for the CPU, and runs it."""

    def __init__(self, folder: Path) -> None:
        shutil.copy(_cuda.SOURCE, folder / "kernel.cu")
        for file in ("emulated.h", "emulated_gemv.cpp"):
            shutil.copy(FOLDER / file, folder)
        # Read once: reading the headers of C++ takes half of the time of a compilation.
        self.compiler = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{folder}"]
        subprocess.run([*self.compiler, "-x", "c++-header", str(folder / "emulated.h")], check=True)
        self.kernel = functools.cache(lambda _, variant: functools.partial(self.run, self.library(folder, variant)))

    def library(self, folder: Path, variant: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        path = folder / ("-".join(str(value) for _, value in variant) + ".so")
        macros = [f"-D{name}={value}" for name, value in variant]
        source = str(folder / "emulated_gemv.cpp")
        subprocess.run([*self.compiler, "-shared", *macros, source, "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))

    def run(self, library: ctypes.CDLL, _device: torch.device, blocks: int, *arguments: torch.Tensor | int) -> None:
        values = [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, torch.Tensor) else ctypes.c_int(each)
            for each in arguments
        ]
        library.run(blocks, *values)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.name}-{index}")
        for operator, cases in ((GEMV_MN, _INT8_MN), (GEMV_K, _INT8_K))
        for index, case in enumerate(cases)
    ],
)
def test_products_are_the_reference_s(operator, case, emulated, monkeypatch):
    assert _cuda.supports(operator.shape(case)) is None
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    arguments = operator.build(case, torch.device("cpu"))
    # Whatever memory held before is in no result.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **how: x.new_full(shape, float("nan"), **how))
    given = dict(arguments)
    rows = [given.pop(name) for name in ("x", "h") if name in given]
    got = getattr(_cuda, operator.name)(*rows, given.pop("weight"), given.pop("mask"), **given)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]


@pytest.mark.parametrize(
    ("operator", "case", "size"), [(GEMV_MN, _INT8_MN[2], 64), (GEMV_K, _INT8_K[1], 16)], ids=["mn", "k"]
)
def test_rows_are_rotated_as_they_are_read(operator, case, size, emulated, monkeypatch):
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    arguments = operator.build(case, torch.device("cpu"))
    (name, x), *others = arguments.items()
    rotation = hadamard(size, x)
    assert len(rotation) == size
    given = dict(others)
    got = getattr(_cuda, operator.name)(x, given.pop("weight"), given.pop("mask"), rotation=rotation, **given)
    arguments[name] = rotated(x, rotation)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]


@pytest.mark.parametrize(("rows", "dtype"), [(16, torch.float16), (9, torch.bfloat16), (5, torch.bfloat16)])
def test_as_many_rows_as_fill_two_fragments(rows, dtype, emulated, monkeypatch):
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 640, generator=generator).to(dtype)
    weight = torch.randint(-128, 128, (32, 640), generator=generator, dtype=torch.int8)
    scale = torch.rand(32, generator=generator) / 640
    got = _cuda.gemv_mn(x, weight, None, scale=scale)
    wanted = (x.float() @ weight.float().T * scale).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "width", "depth", "dtype", "has_bias", "num_sms"),
    [
        (1, 32, 64, torch.bfloat16, False, 132),
        (9, 96, 640, torch.float16, True, 132),
        # Blocks of sixteen warps, of eight, and of eight in two and four teams.
        (17, 32, 2112, torch.bfloat16, False, 132),
        (32, 96, 192, torch.bfloat16, True, 2),
        (25, 192, 640, torch.float16, False, 1),
        (30, 256, 320, torch.bfloat16, True, 1),
    ],
)
def test_int8_rows_are_multiplied_exactly(rows, width, depth, dtype, has_bias, num_sms, emulated, monkeypatch):
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    monkeypatch.setattr(_cuda, "device_facts", lambda _: SimpleNamespace(capability=80, num_sms=num_sms))
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-128, 128, (n, depth), generator=generator, dtype=torch.int8) for n in (rows, width))
    x_scale, scale = (torch.rand(n, generator=generator) * 1e-2 for n in (rows, width))
    x[0], x_scale[-1] = 127, float("nan")
    bias = torch.randn(width, generator=generator).to(dtype) * 1e4 if has_bias else None
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **how: x.new_full(shape, float("nan"), **how))
    got = _cuda.gemv_mn(x, weight, None, scale=scale, bias=bias, x_scale=x_scale, dtype=dtype)
    wanted = linear_int8_reference(x, weight, scale, bias=bias, x_scale=x_scale, dtype=dtype)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert got[-1].isnan().all()
    assert got[:-1].isfinite().all()


@pytest.mark.parametrize(("rows", "num_sms"), [(29, 132), (32, 1)])
def test_halves_of_many_rows(rows, num_sms, emulated, monkeypatch):
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    monkeypatch.setattr(_cuda, "device_facts", lambda _: SimpleNamespace(capability=80, num_sms=num_sms))
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 320, generator=generator).bfloat16()
    weight = torch.randint(-128, 128, (128, 320), generator=generator, dtype=torch.int8)
    scale = torch.rand(128, generator=generator) / 320
    got = _cuda.gemv_mn(x, weight, None, scale=scale)
    wanted = (x.float() @ weight.float().T * scale).bfloat16()
    torch.testing.assert_close(got, wanted, rtol=8e-3, atol=1e-3)


def test_a_gate_whose_half_is_no_whole_tile_is_refused():
    assert supports(Int8Shape(4, torch.bfloat16, 64, 64)) is None
    assert "N=48" in str(supports(Int8Shape(4, torch.bfloat16, 48, 64)))


@pytest.mark.parametrize(
    ("rows", "gate", "has_bias", "is_int8"),
    [(6, "relu2", True, True), (20, "silu", True, True), (20, "silu", True, False), (32, "gelu_tanh", False, False)],
)
def test_gate_and_up_are_one_launch(rows, gate, has_bias, is_int8, emulated, monkeypatch):
    monkeypatch.setattr(_cuda, "_kernel", emulated.kernel)
    monkeypatch.setattr(_cuda, "device_facts", lambda _: SimpleNamespace(capability=80, num_sms=2))
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-128, 128, (192, 128), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(192, generator=generator) / 128, torch.randn(192, generator=generator).half()
    x = torch.randn(rows, 128, generator=generator).half()
    given = {"bias": bias if has_bias else None, "gate": gate}
    if is_int8:
        x, given["x_scale"] = quantise_rows(x, backend="torch")
        given["dtype"] = torch.float16
    got = linear_int8(x, weight, scale, **given)
    torch.testing.assert_close(got, linear_int8_reference(x, weight, scale, **given), rtol=2e-3, atol=2e-3)
