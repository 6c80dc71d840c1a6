"""Compiles kernels in TileLang when they are first used, and keeps them on disk."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from wide.kernels.native.build import cache_folder

PASSES = {"tl.disable_safe_memory_legalize": True, "tl.enable_fast_math": True}
"""Kernels guard what may lie outside; the compiler's own guards would keep it from loading gathered rows ahead.

Exponents cost one instruction instead of four, in error far below that of halves.
"""
# Others generate other code, or refuse these kernels; the extra names it, too.
_VERSION = "0.1.15"
_INSTALL = "install it with: pip install 'wide[tilelang]'"


@functools.cache
def obstacle() -> str | None:
    """Return why TileLang cannot compile in this installation, or None if it can."""
    # TileLang reads these when it is imported. What the user has set stays.
    os.environ.setdefault("TILELANG_CACHE_DIR", str(cache_folder() / "tilelang"))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    try:
        import tilelang
    # Whatever a package that is missing in part raises.
    except Exception as error:
        return (
            f"kernels in TileLang need its package, which was not found ({type(error).__name__}: {error}); {_INSTALL}"
        )
    if tilelang.__version__ != _VERSION:
        return f"kernels in TileLang were written for {_VERSION} of it, found {tilelang.__version__}; {_INSTALL}"
    if not tilelang.env.CUDA_HOME:
        return f"TileLang needs nvcc, which was not found on PATH or in CUDA_HOME; {_INSTALL}"
    return None


def kernel(make: Callable[..., Any], device: torch.device, **constants: Any) -> Callable[..., None]:
    """Return a kernel with constants compiled in, loaded at its first use; it launches on the current stream."""
    return compiled(make, _architecture(device), tuple(constants.items()))


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def compiled(
    make: Callable[..., Any], architecture: str, constants: tuple[tuple[str, Any], ...]
) -> Callable[..., None]:
    """Return a kernel for an architecture, e.g. 'sm_90a', loaded; it is compiled where no cache has it."""
    import tilelang

    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": architecture})
    with target:
        function = make(**dict(constants))
    return tilelang.compile(function, target=target, execution_backend="tvm_ffi", pass_configs=PASSES)


def is_for_hopper() -> bool:
    """Return, while a kernel is made, whether it is for sm_90, where the compiler splits threads by what they do."""
    import tilelang

    return tilelang.tvm.target.Target.current().attrs.get("arch") == "sm_90a"


def stages_ahead(num_stages: int) -> int:
    """Return, while a kernel is made, the stages of a loop whose number of steps only the device knows.

    Where threads are not split by what they do, the compiler refuses such a loop more than one.
    """
    return num_stages if is_for_hopper() else 1
