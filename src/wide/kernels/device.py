"""Facts of the device that kernels depend on."""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.native.tilelang import obstacle as tilelang_missing

HALF = (torch.float16, torch.bfloat16)
"""Dtypes that the kernels take."""
HOPPER_STEP = 64
"""Channels of halves that the kernels for Hopper multiply in one step: they take multiples of it."""


def hopper_step(dtype: torch.dtype) -> int | None:
    """Return `HOPPER_STEP`, or that of int8, which fills as many bytes; None for a dtype that they do not take."""
    return 2 * HOPPER_STEP // dtype.itemsize if dtype in (*HALF, torch.int8) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What tile choices and tables need to know of a device; of the host the name is 'cpu' and the capability 0.

    The capability is that of CUDA times ten, e.g. 90; shared memory is the largest of one block.
    """

    name: str
    capability: int
    num_sms: int
    shared_memory_bytes: int
    l2_bytes: int


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties: Any = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        name=properties.name,
        capability=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a CUDA device, or of the host for any other device."""
    if device.type != "cuda":
        return DeviceFacts(name="cpu", capability=0, num_sms=1, shared_memory_bytes=0, l2_bytes=0)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


def interprets_triton() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on the host."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_obstacle(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Return why Triton kernels cannot run on `device`, or None; `dtype` is that of matrices that they multiply."""
    if interprets_triton():
        if dtype != torch.bfloat16:
            return None
        # It keeps bfloat16 as 16-bit integers, and its matrix products multiply those: errors of 1e9 without a word.
        return "Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly; use float16 or float32"
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device (or TRITON_INTERPRET=1), not {device.type}"
    capability = device_facts(device).capability
    return None if capability >= 80 else f"Triton kernels need sm_80 or newer, this is sm_{capability}"


def fixed_backend(device: torch.device) -> str:
    """Return the backend of operators that no table chooses: Triton's on a GPU that runs it, else the reference."""
    runs_triton = device.type == "cuda" and not interprets_triton() and triton_obstacle(device) is None
    return "triton" if runs_triton else "torch"


def half_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton kernels that multiply halves cannot run, or None; in the interpreter they take float32, too."""
    return triton_obstacle(device, dtype) or half_misfit(dtype)


def half_misfit(dtype: torch.dtype) -> str | None:
    """Return why Triton kernels for half precision do not take a dtype, or None; float32 in the interpreter, too."""
    fits = dtype in HALF or (interprets_triton() and dtype == torch.float32)
    return None if fits else f"the kernels take float16 and bfloat16, got {dtype}"


def elementwise_obstacle(device: torch.device, _: torch.dtype) -> str | None:
    """Return why Triton kernels that multiply no matrices cannot run on `device`, or None if they can."""
    return triton_obstacle(device)


def halves_only(shape: Any) -> str | None:
    """Return why Triton kernels for half precision do not take a shape, or None."""
    return half_misfit(shape.dtype)


def hopper_obstacle(device: torch.device) -> str | None:
    """Return why kernels written for Hopper cannot run on `device`, or None if they can."""
    if device.type != "cuda":
        return f"this kernel needs a Hopper GPU (sm_90), not {device.type}"
    capability = device_facts(device).capability
    return None if capability == 90 else f"this kernel is for Hopper (sm_90), this is sm_{capability}"


def cuda_obstacle(device: torch.device, _: torch.dtype) -> str | None:
    """Return why kernels in CUDA C++ cannot run on `device`, or None if they can."""
    return hopper_obstacle(device) or native_obstacle()


def ampere_obstacle(device: torch.device) -> str | None:
    """Return why kernels written for Ampere and newer GPUs cannot run on `device`, or None if they can."""
    if device.type != "cuda":
        return f"this kernel needs a CUDA device, not {device.type}"
    capability = device_facts(device).capability
    return None if capability >= 80 else f"this kernel is for sm_80 and newer, this is sm_{capability}"


def tilelang_obstacle(device: torch.device, _: torch.dtype) -> str | None:
    """Return why kernels in TileLang cannot run on `device`, or None if they can."""
    return ampere_obstacle(device) or tilelang_missing()
