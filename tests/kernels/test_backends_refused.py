"""Backends that cannot run a case are refused by name and reason, above all where wrong values would come out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.cases.attention_decode import ATTENTION_DECODE
from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from benchmarks.cases.rms_norm import RMS_NORM
from benchmarks.cases.route import NORM_ROUTE, ROUTE
from benchmarks.languages import cute
from wide.errors import UnsupportedBackendError
from wide.kernels import device as kernel_device
from wide.kernels.attention_decode.op import attention_decode
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.device import interprets_triton
from wide.kernels.gemm_k.op import gemm_k
from wide.kernels.gemm_mn.op import gemm_mn
from wide.kernels.reorder.op import reorder, reorder_patterns
from wide.kernels.reordering import SequenceReordering
from wide.kernels.route.op import norm_route, route

CPU = torch.device("cpu")


PRODUCTS: list[tuple[Operator, Callable[..., Any]]] = [
    (GEMM_MN, gemm_mn),
    (GEMM_K, gemm_k),
    (ROUTE, route),
    (NORM_ROUTE, norm_route),
    (ATTENTION_PREFILL, attention_prefill),
    (ATTENTION_DECODE, attention_decode),
]


@pytest.mark.parametrize(("operator", "call"), PRODUCTS, ids=lambda value: getattr(value, "name", "call"))
def test_products_of_bfloat16_are_refused_in_the_interpreter(
    operator: Operator, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = dataclasses.replace(operator.cases[1], dtype=torch.bfloat16)
    assert "multiplies bfloat16 wrongly" in str(operator.supports("triton", CPU, case))
    assert operator.supports("torch", CPU, case) is None
    with pytest.raises(
        UnsupportedBackendError, match="bfloat16 wrongly; use float16 or float32; choose backend='torch'"
    ):
        call(**operator.build(case, CPU), backend="triton")


@pytest.mark.parametrize(
    ("kind", "obstacle", "wanted"), [("cuda", None, "triton"), ("cuda", "old", "torch"), ("cpu", None, "torch")]
)
def test_what_no_table_chooses_is_tritons_on_a_gpu_that_runs_it(monkeypatch, kind, obstacle, wanted):
    monkeypatch.setattr(kernel_device, "triton_obstacle", lambda _: obstacle)
    monkeypatch.setattr(kernel_device, "interprets_triton", lambda: False)
    assert kernel_device.fixed_backend(torch.device(kind)) == wanted


@pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")
@pytest.mark.parametrize("operator", [RMS_NORM, GEMV_MN, GEMV_K], ids=lambda operator: operator.name)
def test_kernels_without_products_run_there_in_bfloat16(operator: Operator) -> None:
    # Those behind are large.
    for case in operator.cases[:10:3]:
        case = dataclasses.replace(case, dtype=torch.bfloat16)
        arguments = operator.build(case, CPU)
        assert operator.supports("triton", CPU, case) is None
        got = operator.run("triton", **arguments)
        # It cuts bits off where GPUs round.
        assert operator.compare(arguments, got, operator.reference(**arguments)) <= 2 * operator.tolerance[case.dtype]


def test_bfloat16_on_the_host_needs_a_gpu_or_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    case = dataclasses.replace(GEMM_MN.cases[0], dtype=torch.bfloat16)
    assert "need a CUDA device" in str(GEMM_MN.supports("triton", CPU, case))


def test_operators_take_explicit_backends_only() -> None:
    for operator, call in PRODUCTS[:2]:
        with pytest.raises(UnsupportedBackendError, match=r"no backend 'auto', only .*; choose backend='torch'"):
            call(**operator.build(operator.cases[0], CPU), backend="auto")
    assert "no backend 'auto'" in str(GEMM_MN.supports("auto", CPU, GEMM_MN.cases[0]))


def _run_cuda(
    *,
    size: int = 128,
    depth: int = 64,
    gated: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    tile: tuple[int, int] | None = None,
    x: torch.Tensor | None = None,
) -> torch.Tensor:
    weights = torch.zeros(2, 2 * size, depth, dtype=dtype)
    return gemm_mn(
        torch.zeros(8, depth, dtype=dtype) if x is None else x,
        weights[0],
        reorder(torch.ones(8, 2, dtype=torch.bool), backend="torch"),
        up_weight=weights[1] if gated else None,
        backend="cuda",
        tile=tile,
    )


WAY_OUT = r"; choose backend='torch'(, 'dense')?( or '(dense|triton)')?$"
HALVES = torch.zeros(8 * 68 + 1, dtype=torch.bfloat16)
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float32}, r"half precision.*; got torch\.float32, "),
    "depth": ({"depth": 72}, r"K a multiple of 64, .* K=72, "),
    "gated groups": ({"size": 192}, r"multiple of 128 channels if gated, .*; got .* G=192, gated"),
    "plain groups": ({"size": 384, "gated": False}, r"of 256 if not; got .* G=384, not gated"),
    "tile": ({"tile": (128, 256)}, r"the tile \(256, 256\) only, got \(128, 256\)"),
    "strides": ({"x": HALVES[:-1].view(8, 68)[:, :64]}, r"rows \(68, 64, 64\) elements apart .* multiples of 8"),
    "address": ({"x": HALVES[1:513].view(8, 64)}, r"must begin at multiples of 16 bytes"),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: None)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changes", "words"), UNFIT.values(), ids=UNFIT)
def test_what_the_kernel_in_cuda_does_not_take_is_named_with_a_way_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedBackendError, match=rf"^gemm_mn: .*{words}.*{WAY_OUT}"):
        _run_cuda(**changes)


def test_the_kernel_in_cuda_needs_a_hopper_gpu_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedBackendError, match=rf"Hopper GPU \(sm_90\), not cpu{WAY_OUT}"):
        _run_cuda()
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: "cuda-bindings is missing")
    with pytest.raises(UnsupportedBackendError, match=f"cuda-bindings is missing{WAY_OUT}"):
        _run_cuda()


@pytest.mark.usefixtures("on_hopper")
def test_what_the_kernel_in_cuda_supports_is_what_it_runs() -> None:
    sizes = {"num_rows": 8, "num_groups": 2, "group_size": 128, "depth": 64, "block_m": 128}
    gated = dataclasses.replace(GEMM_MN.cases[0], sizes=sizes, dtype=torch.bfloat16, options={"gated": True})
    assert GEMM_MN.supports("cuda", CPU, gated) is None
    for changes in (
        {"options": {}},
        {"dtype": torch.float32},
        {"sizes": {**sizes, "depth": 96}},
        {"sizes": {**sizes, "group_size": 64}},
    ):
        assert "the kernel in CUDA C++ wants" in str(
            GEMM_MN.supports("cuda", CPU, dataclasses.replace(gated, **changes))
        )
    plain = dataclasses.replace(gated, options={}, sizes={**sizes, "group_size": 256})
    assert GEMM_MN.supports("cuda", CPU, plain) is None


DECODED = {"head_dim": 64, "heads": 4, "dtype": torch.bfloat16, "tile": (0, 2)}
UNDECODED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float32}, r"half precision, .* got torch\.float32, head size 64 and 4 heads"),
    "head size": ({"head_dim": 80}, r"head sizes of \(64, 96, 128, 256\) .* head size 80"),
    "heads": ({"heads": 17}, "at most 16 query heads of a KV head and group, .* and 17 heads"),
    "tile": ({"tile": (1, 2)}, r"the levels \(0,\) and 2 to 4 stages, got CuteTile\(level=1, num_stages=2\)"),
}


@pytest.mark.parametrize(("changes", "words"), UNDECODED.values(), ids=UNDECODED)
def test_what_decode_attention_on_cute_does_not_take_is_named(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ampere_obstacle", "obstacle"):
        monkeypatch.setattr(cute, name, lambda *device: None)
    head_dim, heads, dtype, tile = (changes.get(name, usual) for name, usual in DECODED.items())
    k = torch.zeros(1, 8, 1, head_dim, dtype=dtype)
    with pytest.raises(UnsupportedBackendError, match=f"^attention_decode: .*{words}.*; choose backend='torch'"):
        attention_decode(k.new_zeros(1, heads, head_dim), k, k, torch.tensor([8]).int(), backend="cute", tile=tile)


PREFILLED = {"head_dim": 64, "heads": 4, "dtype": torch.bfloat16, "tile": (2, 2)}
UNPREFILLED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float32}, r"half precision, .* got torch\.float32, head size 64 and 4 heads"),
    "head size": ({"head_dim": 80}, r"head sizes of \(64, 96, 128, 256\) .* head size 80"),
    "heads": ({"heads": 65}, "at most 64 query heads of a KV head and group, .* and 65 heads"),
    "tile": ({"tile": (3, 2)}, r"the levels \(0, 1, 2\) and 2 to 4 stages, got CuteTile\(level=3, num_stages=2\)"),
}


@pytest.mark.parametrize(("changes", "words"), UNPREFILLED.values(), ids=UNPREFILLED)
def test_what_prefill_attention_on_cute_does_not_take_is_named(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ampere_obstacle", "obstacle"):
        monkeypatch.setattr(cute, name, lambda *device: None)
    head_dim, heads, dtype, tile = (changes.get(name, usual) for name, usual in PREFILLED.items())
    k = torch.zeros(1, 8, 1, head_dim, dtype=dtype)
    tokens = SequenceReordering(torch.arange(8).int().view(1, 1, 8), torch.tensor([[8]]).int())
    with pytest.raises(UnsupportedBackendError, match=f"^attention_prefill: .*{words}.*; choose backend='torch'"):
        attention_prefill(k.new_zeros(1, 8, heads, head_dim), k, k, tokens, backend="cute", tile=tile)


def _run_stored(
    *,
    size: int = 64,
    width: int = 256,
    groups: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    keeps_empty: bool = True,
    groups_per_block: int = 8,
    h: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    mask = torch.ones(8, groups, dtype=torch.bool)
    order = reorder_patterns(mask, groups_per_block=groups_per_block, keeps_empty=keeps_empty, backend="torch")
    weight = torch.zeros(width, groups * size, dtype=dtype)
    rows = torch.zeros(8, groups * size, dtype=dtype) if h is None else h
    return gemm_k(rows, weight, order, group_size=size, backend="cuda", **options)


UNSTORED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float32}, r"half precision.*; got torch\.float32, "),
    "groups": ({"size": 96}, r"multiple of 64 channels.* G=96, "),
    "width": ({"width": 384}, r"multiple of 256, .* width 384, so sorted"),
    "several super-blocks": ({"groups_per_block": 1}, r"one super-block of at most 8 groups .* not so sorted"),
    "empty rows": ({"keeps_empty": False}, r"that keeps empty ones.* not so sorted"),
    "tile": ({"tile": (64, 256)}, r"the tile \(128, 256\) only, got \(64, 256\)"),
    "strides": ({"size": 64, "groups": 1, "h": HALVES[:-1].view(8, 68)[:, :64]}, r"rows \(68, 64\) elements apart"),
    "address": ({"size": 64, "groups": 1, "h": HALVES[1:513].view(8, 64)}, r"must begin at multiples of 16 bytes"),
    "bias": ({"bias": torch.zeros(256)}, r"biases must be contiguous torch\.bfloat16, got .*torch\.float32"),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changes", "words"), UNSTORED.values(), ids=UNSTORED)
def test_what_the_storing_kernel_in_cuda_does_not_take_is_named_with_a_way_out(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedBackendError, match=rf"^gemm_k: .*{words}.*{WAY_OUT}"):
        _run_stored(**changes)


def test_the_storing_kernel_in_cuda_needs_a_hopper_gpu_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedBackendError, match=rf"Hopper GPU \(sm_90\), not cpu{WAY_OUT}"):
        _run_stored()
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: "cuda-bindings is missing")
    with pytest.raises(UnsupportedBackendError, match=f"cuda-bindings is missing{WAY_OUT}"):
        _run_stored()


@pytest.mark.usefixtures("on_hopper")
def test_what_the_storing_kernel_in_cuda_supports_is_what_it_runs() -> None:
    sizes = {"num_rows": 8, "num_groups": 8, "group_size": 64, "width": 256, "block_m": 128, "groups_per_block": 8}
    stored = dataclasses.replace(
        GEMM_K.cases[0], sizes=sizes, dtype=torch.bfloat16, options={"keeps_empty": True, "biased": True}
    )
    assert GEMM_K.supports("cuda", CPU, stored) is None
    for changes in (
        {"options": {}},
        {"dtype": torch.float32},
        {"sizes": {**sizes, "width": 128}},
        {"sizes": {**sizes, "num_groups": 9}},
    ):
        assert "the kernel in CUDA C++ wants" in str(
            GEMM_K.supports("cuda", CPU, dataclasses.replace(stored, **changes))
        )
