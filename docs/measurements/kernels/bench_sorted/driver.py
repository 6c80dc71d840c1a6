"""What of the driver's interface the harness needs, by ctypes."""

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

CUDA = ctypes.CDLL("libcuda.so.1")
BFLOAT16, SWIZZLE_128B, PROMOTE_128B, PROMOTE_256B = 9, 3, 2, 3
MAX_DYNAMIC_SHARED, CLUSTER_DIMENSION = 8, 4


class Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("number", c_uint),
    ]  # fmt: skip


def check(code, what):
    if code:
        text = c_char_p()
        CUDA.cuGetErrorString(c_int(code), byref(text))
        raise RuntimeError(f"{what}: {code} {text.value}")


class Kernel:
    def __init__(self, path, shared, name=b"down_sorted"):
        self.module, self.function, self.shared = c_void_p(), c_void_p(), shared
        image = open(path, "rb").read()
        check(CUDA.cuModuleLoadData(byref(self.module), c_char_p(image)), "cuModuleLoadData")
        check(CUDA.cuModuleGetFunction(byref(self.function), self.module, c_char_p(name)), "cuModuleGetFunction")
        check(CUDA.cuFuncSetAttribute(self.function, c_int(MAX_DYNAMIC_SHARED), c_int(shared)), "cuFuncSetAttribute")

    def clusters(self, size, sms):
        """Return how many clusters run at once."""
        if size == 1:
            return sms
        config, attribute = Config(), Attribute(CLUSTER_DIMENSION, 0)
        attribute.value[0], attribute.value[1], attribute.value[2] = size, 1, 1
        config.grid[:], config.block[:], config.shared = (sms // size * size, 1, 1), (384, 1, 1), self.shared
        config.attributes, config.number = ctypes.pointer(attribute), 1
        found = c_int()
        code = CUDA.cuOccupancyMaxActiveClusters(byref(found), self.function, byref(config))
        fallback = sms // size if size == 2 else 30
        return min(found.value, sms // size) if code == 0 and found.value > 0 else fallback

    def prepare(self, grid, arguments):
        """Return a call (stream) that launches; `arguments` are ctypes objects, kept alive here."""
        pointers = (c_void_p * len(arguments))(*[ctypes.cast(ctypes.pointer(a), c_void_p) for a in arguments])
        keep = (pointers, arguments)

        def launch(stream):
            code = CUDA.cuLaunchKernel(
                self.function, c_uint(grid), c_uint(1), c_uint(1), c_uint(384), c_uint(1), c_uint(1),
                c_uint(self.shared), c_void_p(stream), keep[0], c_void_p(0),
            )  # fmt: skip
            check(code, "cuLaunchKernel")

        return launch


def tensor_map(tensor, box_columns, box_rows, promotion=PROMOTE_256B):
    """Return the map of a row-major bfloat16 matrix as a 64-byte aligned ctypes object of 128 bytes."""
    rows, columns = tensor.shape
    assert tensor.is_contiguous() and tensor.element_size() == 2 and tensor.data_ptr() % 16 == 0 and box_rows <= 256
    room = (ctypes.c_char * 256)()
    offset = -ctypes.addressof(room) % 64
    found = (ctypes.c_char * 128).from_buffer(room, offset)
    found.room = room
    code = CUDA.cuTensorMapEncodeTiled(
        byref(found), c_int(BFLOAT16), c_uint32(2), c_void_p(tensor.data_ptr()),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(columns * 2), (c_uint32 * 2)(box_columns, box_rows),
        (c_uint32 * 2)(1, 1), c_int(0), c_int(SWIZZLE_128B), c_int(promotion), c_int(0),
    )  # fmt: skip
    check(code, "cuTensorMapEncodeTiled")
    return found


__all__ = ["Kernel", "c_int", "c_size_t", "c_void_p", "tensor_map"]
