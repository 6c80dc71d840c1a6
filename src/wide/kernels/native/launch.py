"""Launches machine code through the driver, on the current stream of PyTorch."""

import ctypes
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.native.build import PRODUCT_BYTES, PRODUCT_THREADS, cache_folder, product_code

# Bytes that copies and maps are aligned to.
_ALIGNED = 16


class _RefusedError(Exception):
    def said(self, name: str, device: torch.device, instead: str) -> UnsupportedBackendError:
        return UnsupportedBackendError(f"{name}: the CUDA driver says on {device}: {self}; choose backend={instead!r}")


def _checked(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise _RefusedError(driver.cuGetErrorString(answer[0])[1].decode())
    return answer[1] if len(answer) > 1 else None


class Kernel:
    """One function of a piece of machine code.

    Raises UnsupportedBackendError if the driver refuses the code, a launch or a tensor map; the message names kernel,
    device and the driver's reason.

    Args:
        image: Machine code (`cubin`).
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        instead: Backend that computes the same without this kernel, for messages.
    """

    def __init__(self, image: bytes, name: str, *, threads: int, shared_bytes: int, instead: str) -> None:
        """Load the code, on the current device's context; nothing runs yet. Not while a CUDA graph is captured."""
        from cuda.bindings import driver

        self._name, self._instead = name, instead
        self._threads, self._shared_bytes = threads, shared_bytes
        self._functions: dict[int, Any] = {}
        try:
            _bind_context()
            self._library = _checked(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
            self._kernel = _checked(driver.cuLibraryGetKernel(self._library, name.encode()))
        except _RefusedError as refused:
            device = torch.device("cuda", torch.cuda.current_device())
            raise refused.said(name, device, instead) from refused

    def __call__(self, device: torch.device, blocks: int, *arguments: Any) -> None:
        """Launch so many blocks on the device's current stream.

        Of tensors the address is passed, integers as 32 bits; tensor maps go as they are.
        """
        from cuda.bindings import driver

        try:
            with torch.cuda.device(device):
                _bind_context()
                function = self._function(torch.cuda.current_device())
                values = [_as_argument(argument) for argument in arguments]
                pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
                stream = torch.cuda.current_stream().cuda_stream
                sizes = (blocks, 1, 1, self._threads, 1, 1, self._shared_bytes)
                _checked(driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(pointers), 0))
        except _RefusedError as refused:
            raise refused.said(self._name, device, self._instead) from refused

    def tensor_map(self, matrix: torch.Tensor, box_rows: int, box_columns: int) -> Any:
        """Return `tensor_map` of a matrix that this kernel reads."""
        return tensor_map(matrix, box_rows, box_columns, name=self._name, instead=self._instead)

    def _function(self, device: int) -> Any:
        from cuda.bindings import driver

        found = self._functions.get(device)
        if found is None:
            found = _checked(driver.cuKernelGetFunction(self._kernel))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(found, attribute, self._shared_bytes))
            self._functions[device] = found
        return found


def tensor_map(matrix: torch.Tensor, box_rows: int, box_columns: int, *, name: str, instead: str) -> Any:
    """Return the descriptor by which tensor-memory loads read boxes of a matrix into 128-byte swizzled lines.

    Raises UnsupportedBackendError as `Kernel` does.

    Args:
        matrix: [rows, columns] of halves or int8, columns contiguous, rows a multiple of 16 bytes apart.
        box_rows: Rows of a box, at most 256.
        box_columns: Columns of a box; 128 bytes fill a line.
        instead: As of `Kernel`.
    """
    rows, columns = matrix.shape
    stride = matrix.stride(0) * matrix.element_size()
    try:
        return _encoded(matrix.data_ptr(), rows, columns, stride, matrix.dtype, box_rows, box_columns)
    except _RefusedError as refused:
        raise refused.said(name, matrix.device, instead) from refused


@functools.cache
def product(source: Path, instead: str, **variant: int) -> Kernel:
    """Return a product for Hopper, compiled with a variant's macros and loaded when it is first used.

    Raises UnsupportedBackendError as `Kernel` does, or if the source cannot be compiled here.
    """
    code = product_code(source, variant, cache_folder() / "kernels")
    return Kernel(code, source.stem, threads=PRODUCT_THREADS, shared_bytes=PRODUCT_BYTES, instead=instead)


def misaligned(matrices: Mapping[str, torch.Tensor | None], vectors: Collection[torch.Tensor | None]) -> str | None:
    """Return why kernels that copy 16 bytes at a time cannot take these tensors of one dtype, or None."""
    given = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    dtype = next(iter(given.values())).dtype
    line = _ALIGNED // dtype.itemsize
    steps = tuple(step for matrix in given.values() for step in matrix.stride()[:-1])
    if any(step % line for step in steps):
        return f"rows {steps} elements apart do not fit; the kernel wants multiples of {line}"
    every = (*given.values(), *(vector for vector in vectors if vector is not None))
    if any(tensor.dtype != dtype or tensor.stride(-1) != 1 for tensor in every):
        return f"weights and biases must be contiguous {dtype}, got {[tensor.dtype for tensor in every]}"
    if any(matrix.data_ptr() % _ALIGNED for matrix in given.values()):
        return f"{', '.join(given)} must begin at multiples of {_ALIGNED} bytes"
    return None


def _bind_context() -> None:
    """Make the current device's primary context, PyTorch's, that of this thread; a thread of its own begins without."""
    from cuda.bindings import driver

    if int(_checked(driver.cuCtxGetCurrent())) == 0:
        device = _checked(driver.cuDeviceGet(torch.cuda.current_device()))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))


def _as_argument(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    return argument


@functools.lru_cache(maxsize=4096)
def _encoded(
    address: int, rows: int, columns: int, stride: int, dtype: torch.dtype, box_rows: int, box_columns: int
) -> Any:
    """Return a descriptor. It depends on nothing that lies at the address, so that it is never out of date."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.int8: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    found = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(stride)],
            [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    # A copy of our own, which ctypes can point to; the driver reads 128 bytes when the kernel is launched.
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(found.getPtr(), 128))
