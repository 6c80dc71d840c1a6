"""What reaches the driver when a kernel in CUDA C++ is launched; the driver's answers are made up, there is no GPU."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from wide.errors import UnsupportedBackendError

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is missing")

from wide.kernels.native import launch  # noqa: E402 (needs what may be missing)


@pytest.fixture
def calls(monkeypatch):
    """Replace the driver by one that says yes and notes what it was asked."""
    noted = []
    yes = driver.CUresult.CUDA_SUCCESS

    def answer(name, *values):
        def call(*arguments):
            noted.append((name, arguments))
            return (yes, *values)

        return call

    answers = {
        "cuCtxGetCurrent": [0],
        "cuDeviceGet": [0],
        "cuDevicePrimaryCtxRetain": ["context"],
        "cuCtxSetCurrent": [],
        "cuLibraryLoadData": ["library"],
        "cuLibraryGetKernel": ["kernel"],
        "cuKernelGetFunction": ["function"],
        "cuFuncSetAttribute": [],
        "cuLaunchKernel": [],
        "cuTensorMapEncodeTiled": [driver.CUtensorMap()],
    }
    for name, values in answers.items():
        monkeypatch.setattr(driver, name, answer(name, *values))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    launch._encoded.cache_clear()
    yield noted
    launch._encoded.cache_clear()


def test_arguments_reach_the_kernel_by_value(calls, monkeypatch):
    seen = {}

    def look(function, *rest):
        *sizes, stream, pointers, extra = rest
        slots = (ctypes.c_void_p * 3).from_address(pointers)
        seen.update(function=function, sizes=sizes, stream=stream, extra=extra)
        seen["pointer"] = ctypes.c_void_p.from_address(slots[0]).value
        seen["number"] = ctypes.c_int32.from_address(slots[1]).value
        seen["bytes"] = ctypes.string_at(slots[2], 128)
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuLaunchKernel", look)
    kernel = launch.Kernel(b"code", "name", threads=384, shared_bytes=1024, instead="triton")
    tensor = torch.zeros(3)
    words = (ctypes.c_char * 128).from_buffer_copy(bytes(range(128)))
    kernel(torch.device("cpu"), 132, tensor, -5, words)
    kernel(torch.device("cpu"), 132, tensor, -5, words)
    assert seen["sizes"] == [132, 1, 1, 384, 1, 1, 1024]
    assert (seen["function"], seen["stream"], seen["extra"]) == ("function", 77, 0)
    assert (seen["pointer"], seen["number"], seen["bytes"]) == (tensor.data_ptr(), -5, bytes(range(128)))
    # Looked up and given its shared memory once.
    assert [name for name, _ in calls].count("cuFuncSetAttribute") == 1


def test_a_thread_without_a_context_gets_that_of_pytorch(calls):
    launch.Kernel(b"code", "name", threads=32, shared_bytes=0, instead="triton")
    names = [name for name, _ in calls]
    assert names[:4] == ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]


def test_maps_describe_strided_matrices_and_are_made_once(calls):
    matrix = torch.zeros(10, 96, dtype=torch.bfloat16)[:, :64]
    kernel = launch.Kernel(b"code", "name", threads=32, shared_bytes=0, instead="triton")
    first, again = kernel.tensor_map(matrix, 64, 64), kernel.tensor_map(matrix, 64, 64)
    other = kernel.tensor_map(matrix[1:], 64, 64)
    made = [arguments for name, arguments in calls if name == "cuTensorMapEncodeTiled"]
    assert first is again
    assert other is not first
    assert len(made) == 2
    kind, rank, address, sizes, strides, box, *_ = made[0]
    assert (kind, rank, address) == (driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix.data_ptr())
    assert [[int(value) for value in values] for values in (sizes, strides, box)] == [[64, 10], [192], [64, 64]]


REFUSED = {
    "code": ("cuLibraryLoadData", "gemm_mn", "triton"),
    "function": ("cuKernelGetFunction", "gemm_k", "triton"),
    "launch": ("cuLaunchKernel", "gemm_k_rows", "torch"),
    "tensor map": ("cuTensorMapEncodeTiled", "gemm_k_rows", "torch"),
}


@pytest.mark.parametrize(("call", "name", "instead"), REFUSED.values(), ids=REFUSED)
def test_what_the_driver_refuses_is_said_with_kernel_device_and_way_out(calls, monkeypatch, call, name, instead):
    monkeypatch.setattr(driver, call, lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_IMAGE, None))
    monkeypatch.setattr(
        driver, "cuGetErrorString", lambda _: (driver.CUresult.CUDA_SUCCESS, b"device kernel image is invalid")
    )

    def load_and_launch():
        kernel = launch.Kernel(b"code", name, threads=32, shared_bytes=0, instead=instead)
        matrix = torch.zeros(64, 64, dtype=torch.bfloat16)
        kernel(matrix.device, 132, kernel.tensor_map(matrix, 64, 64))

    # Code is loaded on the current device, everything else goes by the tensors'.
    device = "cuda:0" if call == "cuLibraryLoadData" else "cpu"
    words = f"^{name}: .* {device}: device kernel image is invalid; choose backend='{instead}'$"
    with pytest.raises(UnsupportedBackendError, match=words):
        load_and_launch()
