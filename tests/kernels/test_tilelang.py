"""Kernels in TileLang, without a GPU: run on the host as plain loops, and compiled to what they are written for.

On the host the same function is compiled to C++: memory of a block is memory of the one thread, parallel loops run one
after the other, products are loops. That checks what is read, skipped, masked and written where, in poisoned memory.
How threads share the work, and wait for each other, only a GPU shows.
"""

import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import described

import benchmarks.languages  # noqa: F401 - whose backends are tested here
from benchmarks.cases.attention_decode import ATTENTION_DECODE
from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from wide.errors import UnsupportedBackendError
from wide.kernels import device as kernel_device
from wide.kernels.attention_decode._triton import DecodeTile
from wide.kernels.attention_prefill._triton import PrefillTile
from wide.kernels.gemm_k._triton import KTile
from wide.kernels.gemm_mn._triton import MnTile
from wide.kernels.gemv._triton import GemvTile
from wide.kernels.native import tilelang as native
from wide.kernels.tuning import Case

installed = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None, reason="needs TileLang: pip install 'wide[tilelang]'"
)
HOST = torch.device("cpu")
# Largest shared memory of one block in bytes.
SHARED = {"sm_80": 166912, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what TileLang compiles from one run of the tests to the next."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(request.config.cache.mkdir("tilelang")))
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")


@functools.cache
def _on_host(make: Callable[..., Any], architecture: str, constants: tuple[tuple[str, Any], ...]) -> Any:
    import tilelang

    target = tilelang.tvm.target.Target("c")
    with target:
        function = make(**dict(constants))
    passes = {**native.PASSES, "tirx.disable_vectorize": True}
    return tilelang.compile(function, target=target, pass_configs=passes)


@pytest.fixture
def compiler() -> None:
    """Skip where TileLang cannot compile; asked here, since its import takes seconds, which collecting need not."""
    if reason := native.obstacle():
        pytest.skip(reason)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in TileLang on the host."""
    import tilelang.language
    from tilelang.jit.adapter import wrapper

    local = tilelang.language.alloc_local
    stands_in = {
        "alloc_shared": lambda shape, dtype: local(shape, dtype),
        "alloc_fragment": lambda shape, dtype: local(shape, dtype),
        "Parallel": lambda *sizes: tilelang.language.grid(*sizes) if sizes[1:] else tilelang.language.serial(*sizes),
        "Pipelined": lambda *ends, num_stages: tilelang.language.serial(*ends),
    }
    for name, instead in stands_in.items():
        monkeypatch.setattr(tilelang.language, name, instead)
    # Of the host's, which would forget strides.
    symbols = wrapper.TLCUDASourceWrapper.get_dynamic_symbolic_set
    monkeypatch.setattr(wrapper.TLCPUSourceWrapper, "get_dynamic_symbolic_set", symbols)
    monkeypatch.setattr(native, "_architecture", lambda device: "")
    monkeypatch.setattr(native, "compiled", _on_host)
    monkeypatch.setattr(kernel_device, "ampere_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "tilelang_missing", lambda: None)


# So small that cases have several; and the case that stands for the others: each compiles for about three seconds.
TILES: dict[str, tuple[Operator, tuple[int, ...], tuple[int, ...]]] = {
    "gemm_mn": (GEMM_MN, MnTile(16, 32, 2, 4), ()),
    "gemm_k": (GEMM_K, KTile(16, 16, 2, 4, slab=32), ()),
    "gemv_mn": (GEMV_MN, GemvTile(8, 64, 4), ()),
    "gemv_k": (GEMV_K, GemvTile(8, 16, 4), ()),
    "attention_decode": (ATTENTION_DECODE, DecodeTile(16, 2, 5, 4, 1), ()),
    "attention_prefill": (ATTENTION_PREFILL, PrefillTile(16, 16, 4, 1), (10,)),
}
CASES = [
    pytest.param(operator, tile, case, id=f"{name}-{i}", marks=() if i in usual else pytest.mark.slow)
    for name, (operator, tile, usual) in TILES.items()
    for i, case in enumerate(operator.cases)
]


@installed
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilelang

    monkeypatch.setattr(tilelang, "__version__", "9.9")
    assert "written for 0.1.15 of it, found 9.9" in str(native.obstacle.__wrapped__())


@installed
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("operator", "tile", "case"), CASES)
def test_kernels_compute_what_the_reference_does(operator: Operator, tile: tuple[int, ...], case: Case) -> None:
    case = dataclasses.replace(case, dtype=torch.float16)
    if operator.supports("tilelang", HOST, case) is not None:
        pytest.skip("not supported for this case")
    arguments = operator.build(case, HOST)
    got = operator.run("tilelang", **arguments, tile=tile)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]


@installed
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("place", [5, 7, 15])
def test_what_tensor_memory_access_loads_is_masked(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilelang.language

    monkeypatch.setattr("wide.kernels.attention_prefill._tilelang.is_for_hopper", lambda: True)
    for name in ("annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc"):
        monkeypatch.setattr(tilelang.language, name, lambda registers: None)
    operator, tile, _ = TILES["attention_prefill"]
    test_kernels_compute_what_the_reference_does(operator, tile, operator.cases[place])


def _case(sizes: dict[str, int], **options: Any) -> Case:
    return Case(sizes=sizes, dtype=torch.bfloat16, options=options)


_MN = {"num_rows": 130, "num_groups": 2, "depth": 512, "block_m": 128}
_K = {"num_rows": 130, "num_groups": 8, "width": 512, "block_m": 128, "groups_per_block": 8}
_DECODE = {"batch": 2, "key_len": 300, "num_query_heads": 32, "num_kv_heads": 8, "num_groups": 8, "head_dim": 128}
_PREFILL = {**_DECODE, "query_len": 200}
_GATED = {"gated": True, "activation": "silu"}
WRITTEN: dict[str, tuple[Operator, Case]] = {
    "gate and up": (GEMM_MN, _case({**_MN, "group_size": 128}, **_GATED)),
    "query": (GEMM_MN, _case({**_MN, "group_size": 512})),
    "groups of 32": (GEMM_MN, _case({**_MN, "group_size": 32, "block_m": 64}, biased=True, **_GATED)),
    "output": (GEMM_K, _case({**_K, "group_size": 512}, keeps_empty=True)),
    "down": (GEMM_K, _case({**_K, "group_size": 128, "groups_per_block": 4})),
    "decode": (ATTENTION_DECODE, _case(_DECODE)),
    "padded decode": (ATTENTION_DECODE, _case({**_DECODE, "padding": 3}, window=100, soft_cap=2.0)),
    "prefill": (ATTENTION_PREFILL, _case(_PREFILL)),
    "windowed prefill": (ATTENTION_PREFILL, _case(_PREFILL, window=100)),
    "packed prefill": (ATTENTION_PREFILL, _case({**_PREFILL, "batch": 1, "head_dim": 256, "requests": 3})),
    "one row": (GEMV_MN, _case({"num_rows": 1, "num_groups": 4, "group_size": 128, "width_in": 4096}, is_gated=True)),
    "four rows": (GEMV_MN, _case({"num_rows": 4, "num_groups": 4, "group_size": 128, "width_in": 4096}, is_gated=True)),
    "one row down": (GEMV_K, _case({"num_rows": 1, "num_groups": 9, "group_size": 128, "width_out": 512})),
    "four rows out": (GEMV_K, _case({"num_rows": 4, "num_groups": 8, "group_size": 512, "width_out": 512})),
    "down of groups of 32": (GEMM_K, _case({**_K, "group_size": 32, "block_m": 64})),
}
"""What is compiled, with the shapes that decide tiles; others change constants alone."""


def _makers(operator: Operator, case: Case, architecture: str, patch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Return makers of the kernels that a case launches on a GPU, with the tiles that they get there."""
    found: list[Callable[[], Any]] = []

    def asked(make: Callable[..., Any], _: str, constants: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
        found.append(functools.partial(make, **dict(constants)))
        return lambda *tensors: None

    facts = kernel_device.DeviceFacts(
        name="",
        capability=int(re.sub(r"\D", "", architecture)),
        num_sms=132,
        shared_memory_bytes=SHARED[architecture],
        l2_bytes=50 * 2**20,
    )
    # Its file has to be there before what it reads is replaced.
    assert "tilelang" in operator.backends
    for name, module in list(sys.modules.items()):
        if name.startswith(("wide.kernels.", "benchmarks.languages.")) and hasattr(module, "device_facts"):
            patch.setattr(module, "device_facts", lambda device: facts)
    for name in ("ampere_obstacle", "tilelang_missing"):
        patch.setattr(kernel_device, name, lambda *device: None)
    patch.setattr(native, "_architecture", lambda device: architecture)
    patch.setattr(native, "compiled", asked)
    operator.run("tilelang", **operator.build(case, HOST))
    return found


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED)
@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_fit_spill_nothing_and_use_tensor_cores(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tilelang
    from tilelang.contrib.nvcc import compile_cuda
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": architecture}, host={"kind": "c"})
    headers = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    makers = _makers(*WRITTEN[name], architecture, monkeypatch)
    codes = {}
    for make in makers:
        with target, tilelang.tvm.transform.PassContext(opt_level=3, config=native.PASSES):
            lowered = tilelang.lower(make(), target=target)
        for function in lowered.device_mod.functions.values():
            assert int(function.attrs.get("dyn_shared_memory_buf", 0)) <= SHARED[architecture]
        image = compile_cuda(
            lowered.kernel_source,
            "cubin",
            [f"-arch={architecture}"],
            options=["-std=c++20", "--use_fast_math", *headers],
        )
        code, usage = described(bytes(image))
        used = {name: int(value) for name, value in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
        assert used["STACK"] == used["LOCAL"] == 0, usage
        assert not re.findall(r"\b(?:STL|LDL)\b", code)
        codes[make.func.__name__] = code
    if WRITTEN[name][0] in (GEMV_MN, GEMV_K):
        return
    product = codes[f"make_{WRITTEN[name][0].name}"]
    if WRITTEN[name][0] is ATTENTION_DECODE:
        assert {"HMMA", "LDGSTS"} <= set(re.findall("HMMA|LDGSTS", product))
        return
    block_m = WRITTEN[name][1].sizes.get("block_m", 128)
    assert architecture != "sm_90a" or block_m < 128 or "HGMMA" in product
    assert "HGMMA" in product or "HMMA" in product
    # What tensor-memory access does not load goes past the registers, too, but for queries, which are loaded once.
    assert "LDGSTS" in product or (architecture == "sm_90a" and WRITTEN[name][0] is ATTENTION_PREFILL)
    if architecture == "sm_90a":
        assert "UTMALDG" in product


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("name", ["gate and up", "query", "output"])
def test_what_products_read_is_released_after_the_last(
    name: str, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tilelang

    operator, case = WRITTEN[name]
    case = dataclasses.replace(case, sizes={**case.sizes, "block_m": block_m})
    make = _makers(operator, case, "sm_90a", monkeypatch)[-1]
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host={"kind": "c"})
    with target, tilelang.tvm.transform.PassContext(opt_level=3, config=native.PASSES):
        source = tilelang.lower(make(), target=target).kernel_source
    products, releases = source[source.index("tl::wgmma_ss") :].split(".arrive();", 1)
    assert products.rindex("tl::warpgroup_wait<0>") > products.rindex("tl::wgmma_ss")
    assert "tl::wgmma_ss" not in releases


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_kernels_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    (make, *_) = _makers(*WRITTEN["output"], "sm_90a", monkeypatch)
    monkeypatch.undo()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    constants = tuple(make.keywords.items())
    native.compiled(make.func, "sm_90a", constants)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert len(kept) == 1
    native.compiled.cache_clear()
    native.compiled(make.func, "sm_90a", constants)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} == kept


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", None)
    native.obstacle.cache_clear()
    monkeypatch.setattr(kernel_device, "ampere_obstacle", lambda device: None)
    words = r"need its package, which was not found .*; install it with: pip install 'wide\[tilelang\]'"
    assert re.search(words, str(ATTENTION_PREFILL.supports("tilelang", HOST, WRITTEN["prefill"][1])))
    with pytest.raises(UnsupportedBackendError, match=rf"^attention_prefill: .*{words}; choose backend='torch'"):
        ATTENTION_PREFILL.run("tilelang", **ATTENTION_PREFILL.build(WRITTEN["prefill"][1], HOST))
    native.obstacle.cache_clear()


UNFIT: dict[str, tuple[Operator, dict[str, Any], str]] = {
    "dtype": (GEMM_MN, {"dtype": torch.float32}, r"wants half precision, .*; got torch\.float32"),
    "depth": (GEMM_MN, {"depth": 68}, "K a multiple of 8, .* K=68"),
    "groups": (GEMM_MN, {"group_size": 24}, "multiple of 16 channels .* G=24"),
    "dtype of sums": (GEMM_K, {"dtype": torch.float32}, r"wants half precision, got torch\.float32"),
    "width of sums": (GEMM_K, {"width": 40}, "multiples of 16 .* width of 40"),
}


@pytest.mark.parametrize(("operator", "changes", "words"), UNFIT.values(), ids=UNFIT)
def test_what_they_do_not_take_is_named(
    operator: Operator, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ampere_obstacle", "tilelang_missing"):
        monkeypatch.setattr(kernel_device, name, lambda *device: None)
    usual = WRITTEN["query" if operator is GEMM_MN else "output"][1]
    sizes = {name: changes.get(name, size) for name, size in usual.sizes.items()}
    case = dataclasses.replace(usual, sizes=sizes, dtype=changes.get("dtype", usual.dtype))
    assert re.search(words, str(operator.supports("tilelang", HOST, case)))
    with pytest.raises(UnsupportedBackendError, match=words):
        operator.run("tilelang", **operator.build(case, HOST))
