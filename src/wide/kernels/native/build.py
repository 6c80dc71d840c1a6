"""Compiles CUDA C++ with NVRTC, which CUDA builds of PyTorch bring along, and keeps the machine code on disk."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wide.errors import UnsupportedBackendError
from wide.writing import replacing

HOPPER = Path(__file__).with_name("hopper.cuh")
"""What the kernels for sm_90a share."""
PRODUCT_THREADS = 384
"""Threads of a block of a product: one warp group gathers, two multiply."""
PRODUCT_BYTES = 4 * 48 * 1024 + 32 * 1024 + 64
"""Shared memory of such a block: a ring of four stages of 48 KB, 32 KB where finished rows are rearranged, barriers."""
_NEEDS = "kernels in CUDA C++ need cuda-bindings and NVRTC, which CUDA builds of PyTorch depend on"


def cache_folder() -> Path:
    """Return where machine code and measurements are kept: $WIDE_CACHE, else wide/ in the user's cache folder."""
    folder = os.environ.get("WIDE_CACHE")
    if folder is not None:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wide"


@functools.cache
def obstacle() -> str | None:
    """Return why CUDA C++ cannot be compiled and run in this installation, or None if it can."""
    missing = _compiler_obstacle()
    if missing is not None:
        return missing
    from cuda.bindings import driver

    try:
        found, version = driver.cuDriverGetVersion()
    except Exception as error:
        return f"{_NEEDS}, and a driver, which was not found ({error})"
    major = _compiler_version()[0]
    if found != driver.CUresult.CUDA_SUCCESS or version // 1000 < major:
        return (
            f"NVRTC is of CUDA {major}, the driver only of CUDA {version // 1000}; update the driver, or install the "
            "nvidia-cuda-nvrtc of its version"
        )
    return None


@functools.cache
def _compiler_obstacle() -> str | None:
    try:
        _compiler_version()
    # Whatever a package that is missing in part raises.
    except Exception as error:
        return f"{_NEEDS}; not found ({type(error).__name__}: {error})"
    return None


@functools.cache
def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return major, minor


def cubin(
    source: Path, folder: Path, *, architecture: str, macros: Mapping[str, int | str], header: Path | None = None
) -> bytes:
    """Return the machine code of a source file, from `folder` if it was compiled before.

    Raises UnsupportedBackendError if the compiler is missing, or refuses the source, in its words.

    Args:
        source: A file of CUDA C++ that includes nothing.
        folder: Where machine code is kept; made if it does not exist. If nothing can be written there, nothing is kept.
        architecture: For example 'sm_90a'.
        header: A file that is put in front of the source, such as `HOPPER`.
    """
    missing = _compiler_obstacle()
    if missing is not None:
        raise UnsupportedBackendError(missing)
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    text = source.read_bytes()
    if header is not None:
        # Messages keep the source's own line numbers.
        text = header.read_bytes() + f'#line 1 "{source.name}"\n'.encode() + text
    key = hashlib.sha256(b"\0".join([text, repr((options, _compiler_version())).encode()])).hexdigest()
    kept = folder / f"{source.stem}-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    code = _compile(text, source.name, options)
    with contextlib.suppress(OSError), replacing(kept) as unfinished:
        unfinished.write_bytes(code)
        # The folder may be shared.
        unfinished.chmod(0o644)
    return code


def product_code(source: Path, variant: Mapping[str, int], folder: Path) -> bytes:
    """Return `cubin` of a product for Hopper; `variant` is compiled in, by the names of the source's macros."""
    macros = {**variant, "SHARED_BYTES": PRODUCT_BYTES}
    return cubin(source, folder, architecture="sm_90a", macros=macros, header=HOPPER)


def _compile(text: bytes, name: str, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    (program,) = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    words = [option.encode() for option in options]
    try:
        if nvrtc.nvrtcCompileProgram(program, len(words), words)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            said = log.rstrip(b"\0").decode(errors="replace")
            raise UnsupportedBackendError(f"NVRTC does not compile {name} with {' '.join(options)}:\n{said}")
        (size,) = _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        code = b" " * size
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise UnsupportedBackendError(f"NVRTC: {nvrtc.nvrtcGetErrorString(answer[0])[1].decode()}")
    return answer[1:]
