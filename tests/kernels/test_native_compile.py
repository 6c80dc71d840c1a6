"""Products in CUDA C++ compile without a GPU, to the instructions they are written for; code is kept on disk."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from machine_code import described

from wide.errors import UnsupportedBackendError
from wide.kernels.gemm_k import _cuda as gemm_k_cuda
from wide.kernels.gemm_mn import _cuda as gemm_mn_cuda
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemv import _cuda as gemv_cuda
from wide.kernels.native import build
from wide.kernels.native.build import PRODUCT_BYTES, PRODUCT_THREADS, cubin, product_code
from wide.kernels.reorder import _cuda as reorder_rows_cuda

# Largest shared memory of one block in bytes, and registers of a multiprocessor.
SHARED, REGISTERS = 232448, 65536


needs_compiler = pytest.mark.skipif(build._compiler_obstacle() is not None, reason=str(build._compiler_obstacle()))


def _variant(
    activation: str,
    *,
    gated: bool = False,
    biased: bool = False,
    float16: bool = False,
    int8: bool = False,
    dense: int = 0,
) -> dict[str, int]:
    return {
        "GATED": int(gated),
        "ACTIVATION": ACTIVATIONS.index(activation),
        "HAS_BIAS": int(biased),
        "HAS_UP_BIAS": int(biased and gated),
        "FLOAT16": int(float16),
        "INT8": int(int8),
        "DENSE": dense,
    }


def machine_code(variant: dict[str, int], folder: Path) -> bytes:
    """Compile GEMM-MN."""
    return product_code(gemm_mn_cuda.SOURCE, variant, folder)


PLAIN = _variant("none")
VARIANTS = {
    "gate and up": _variant("silu", gated=True),
    "query": PLAIN,
    "query with a bias": _variant("none", biased=True),
    "gate and up with everything": _variant("gelu_tanh", gated=True, biased=True, float16=True),
    "plain with everything": _variant("relu2", biased=True, float16=True),
    "int8 gate and up": _variant("silu", gated=True, int8=True),
    "int8 gate and up with everything": _variant("gelu_tanh", gated=True, biased=True, int8=True),
    "int8, dense": _variant("none", int8=True, dense=1),
}
SLOW = pytest.mark.slow
# Of each form of product one, of which two have everything; each takes two seconds.
USUAL_K = {(1, False, True), (2, True, False), (3, False, False), (4, True, True)}
USUAL = ("gate and up", "plain with everything", "int8 gate and up with everything")


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Path:
    """Return the folder in which machine code lies from one run of the tests to the next."""
    assert request.config.cache is not None
    return request.config.cache.mkdir("machine-code")


@needs_compiler
@pytest.mark.parametrize("name", [name if name in USUAL else pytest.param(name, marks=SLOW) for name in VARIANTS])
def test_variants_fit_spill_nothing_and_share_weights(name: str, kept: Path) -> None:
    variant = VARIANTS[name]
    code, usage = described(machine_code(variant, kept))
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] * PRODUCT_THREADS <= REGISTERS
    assert used["SHARED"] + PRODUCT_BYTES <= SHARED
    assert not re.findall(r"\b(?:STL|LDL)\b", code)
    # Whole tiles and the pieces of short ones, four products of 16 in a row.
    form = r"IGMMA\.64x(\d+)x32(\.S8)\.S8" if variant["INT8"] else r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?"
    products = Counter(re.findall(form, code))
    assert {kind for _, kind in products} == {".S8" if variant["INT8"] else "" if variant["FLOAT16"] else ".BF16"}
    assert {"256"} < {width for width, _ in products} <= {"256", "128", "64"}
    assert all(count % 4 == 0 for count in products.values())
    # One is waited for in each group; a branch between two of them makes the compiler wait for every one.
    assert 0 < 4 * len(re.findall(r"GMMA.*gsb0", code)) <= products.total()
    assert len(re.findall(r"UTMALDG\.2D\.MULTICAST", code)) == 2
    assert "LDGSTS" in code
    # At the two meetings of a cluster, and none where a stage is released.
    assert len(re.findall(r"MEMBAR\.\w+\.GPU", code)) <= 2


@needs_compiler
@pytest.mark.parametrize("words", [2, 3, 4])
def test_the_order_of_rows_fits_and_spills_nothing(words: int, kept: Path) -> None:
    code, usage = described(reorder_rows_cuda.machine_code(words, kept))
    functions = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert {name for name, *_ in functions} == set(reorder_rows_cuda.LAUNCHES)
    for name, *numbers in functions:
        registers, stack, shared, local = map(int, numbers)
        launch = reorder_rows_cuda.LAUNCHES[name]
        assert stack == local == 0
        assert registers * launch.threads <= REGISTERS
        assert shared + launch.shared_bytes <= SHARED
    assert not re.findall(r"\b(?:STL|LDL)\b", code)


@needs_compiler
@pytest.mark.parametrize(
    ("words", "biased", "int8"),
    [
        each
        if each in {(1, False, True), (2, True, False), (3, False, False), (4, True, True)}
        else pytest.param(*each, marks=SLOW)
        for each in product((1, 2, 3, 4), (False, True), (False, True))
    ],
)
def test_the_product_over_input_groups_fits_and_waits_once_a_step(
    words: int, biased: bool, int8: bool, kept: Path
) -> None:
    variant = {"WORDS": words, "HAS_BIAS": int(biased), "FLOAT16": int(biased), "INT8": int(int8)}
    code, usage = described(product_code(gemm_k_cuda.SOURCE, variant, kept))
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    assert used["STACK"] == used["LOCAL"] == 0
    # What warp groups ask for beyond the launch's registers they wait for in vain; the source is refused then.
    assert used["REG"] == 168
    assert used["SHARED"] + PRODUCT_BYTES <= SHARED
    assert not re.findall(r"\b(?:STL|LDL)\b", code)
    form = r"IGMMA\.64x(\d+)x32(\.S8)\.S8" if int8 else r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?"
    products = Counter(re.findall(form, code))
    assert set(products) == {("256", ".S8" if int8 else "" if biased else ".BF16")}
    assert 4 * len(re.findall(r"GMMA.*gsb0", code)) == products.total()
    assert len(re.findall(r"UTMALDG\.2D", code)) == 1
    assert "LDGSTS" in code
    assert not re.findall(r"MEMBAR\.\w+\.GPU", code)


@needs_compiler
@pytest.mark.parametrize(
    "target", [90, *(pytest.param(each, marks=SLOW) for each in (80, 89, 100, 120))], ids=lambda each: f"sm_{each}"
)
@pytest.mark.parametrize("rows", [1, 16])
def test_products_of_few_rows_convert_by_bits_and_spill_nothing(rows: int, target: int, kept: Path) -> None:
    sums, gated = {"SUMS": 1, "HAS_MASK": 1, "GROUP": 128}, {"GATED": 1, "ACTIVATION": 1, "HAS_MASK": 1}
    for chosen in (sums, gated, sums | {"ROTATES": 64}, gated | {"ROTATES": 16}):
        macros = gemv_cuda.macros(rows, float16=rows > 8, **chosen)
        code, usage = described(cubin(gemv_cuda.SOURCE, kept, architecture=f"sm_{target}", macros=macros))
        used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
        # NVRTC 13.5 keeps a pointer of sums on the stack of sm_80 and sm_89: one store and one load.
        kept_there = len(re.findall(r"\b(?:STL|LDL)\b", code))
        assert used["LOCAL"] == 0
        assert kept_there <= (2 if target < 90 and chosen == sums else 0)
        # Three blocks share a multiprocessor, or two of many rows or rotated ones.
        assert used["REG"] * 256 * (2 if rows > 8 or "ROTATES" in chosen else 3) <= REGISTERS
        assert "HMMA.16816" in code
        # A conversion instruction takes as long as eight others.
        assert not re.findall(r"I2F\.S(8|16)", code)
        assert len(re.findall(r"LDG\.E\.NA[\w.]*\.128", code)) == 8


@needs_compiler
@pytest.mark.parametrize(
    "target", [90, *(pytest.param(each, marks=SLOW) for each in (80, 89, 100, 120))], ids=lambda each: f"sm_{each}"
)
@pytest.mark.parametrize(("rows", "warps"), [(17, 8), (32, 16)])
def test_products_of_int8_rows_spill_nothing_and_convert_nothing(
    rows: int, warps: int, target: int, kept: Path
) -> None:
    for chosen in ({}, {"GATED": 1, "ACTIVATION": 1}):
        macros = gemv_cuda.macros(rows, float16=False, INT8=1, **chosen) | {"WARPS": warps}
        code, usage = described(cubin(gemv_cuda.SOURCE, kept, architecture=f"sm_{target}", macros=macros))
        used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * 32 * (warps if warps > 8 else 2 * warps) <= REGISTERS
        assert "IMMA.16832.S8.S8" in code
        assert "HMMA" not in code


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., bytes]:
    """Return what compiles a kernel that takes no time, into a folder that keeps its code."""
    source = tmp_path / "small.cu"
    source.write_text('extern "C" __global__ void small(int* to) { *to = NUMBER; }\n')
    return lambda folder, number=1: cubin(source, folder, architecture="sm_90a", macros={"NUMBER": number})


@needs_compiler
def test_code_is_compiled_once(compiled: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    code = compiled(folder)
    assert code.startswith(b"\x7fELF")
    (kept,) = folder.iterdir()
    assert re.fullmatch(r"small-[0-9a-f]{32}\.cubin", kept.name)
    monkeypatch.setattr(build, "_compile", None)
    assert compiled(folder) == code
    with pytest.raises(TypeError):
        compiled(folder, 2)


@needs_compiler
def test_what_is_written_half_is_never_read(
    compiled: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"

    def fail(self: Path, target: Path) -> None:
        raise OSError("killed before it was given its name")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        code = compiled(folder)
    assert not list(folder.iterdir())
    # Of a process that is still writing, or was killed.
    (folder / "small-left").write_bytes(code[:100])
    assert compiled(folder) == code == compiled(folder)
    assert len(list(folder.glob("*.cubin"))) == 1


@needs_compiler
def test_a_folder_that_takes_nothing_costs_a_compilation_only(compiled: Callable[..., bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    assert compiled(tmp_path / "file" / "kernels").startswith(b"\x7fELF")


@needs_compiler
def test_what_the_compiler_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { int twelve = thirteen; }\n")
    with pytest.raises(UnsupportedBackendError) as refused:
        build.cubin(source, tmp_path / "kernels", architecture="sm_90a", macros={"GATED": 1})
    words = str(refused.value)
    assert re.search(r"NVRTC does not compile broken\.cu with .*sm_90a.* -DGATED=1", words)
    assert re.search(r'broken\.cu\(1\): error: .*"thirteen" is undefined', words)
    assert "\0" not in words
    assert not (tmp_path / "kernels").exists()


@pytest.fixture
def _asked_again() -> Iterator[None]:
    """Ask for the compiler anew, in the test and after it."""
    answers = (build.obstacle, build._compiler_obstacle, build._compiler_version)
    for answer in answers:
        answer.cache_clear()
    yield
    for answer in answers:
        answer.cache_clear()


@pytest.mark.usefixtures("_asked_again")
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    words = r"kernels in CUDA C\+\+ need cuda-bindings and NVRTC.*; not found \(ModuleNotFoundError"
    assert re.match(words, str(build.obstacle()))
    with pytest.raises(UnsupportedBackendError, match=words):
        machine_code(PLAIN, tmp_path)


@needs_compiler
def test_what_is_put_in_front_is_compiled_with_a_source_and_leaves_its_line_numbers(tmp_path: Path) -> None:
    source, header = tmp_path / "kernel.cu", tmp_path / "shared.cuh"
    header.write_text("\n\n#define NUMBER 3\n")
    source.write_text('extern "C" __global__ void kernel(int* to) { *to = NUMBER; }\n')
    code = build.cubin(source, tmp_path / "kept", architecture="sm_90a", macros={}, header=header)
    header.write_text("#define NUMBER 4\n")
    assert build.cubin(source, tmp_path / "kept", architecture="sm_90a", macros={}, header=header) != code
    source.write_text("\n__global__ void broken() { int twelve = thirteen; }\n")
    with pytest.raises(UnsupportedBackendError, match=r"kernel\.cu\(2\): error"):
        build.cubin(source, tmp_path / "kept", architecture="sm_90a", macros={}, header=header)
