"""Builds kernels on CuTe when they are first used: CUTLASS's headers, the machine's nvcc, bound by TVM-FFI."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.ahead import stand_in
from wide.errors import UnsupportedBackendError
from wide.kernels.device import ampere_obstacle
from wide.kernels.dispatch import require
from wide.kernels.native.build import cache_folder
from wide.writing import replacing

_HEADERS = [Path(__file__).with_name(name) for name in ("cute.cuh", "cute_hopper.cuh")]
_PACKAGES = {"cutlass_library": "nvidia-cutlass", "tvm_ffi": "apache-tvm-ffi"}


class CuteTile(NamedTuple):
    """How a product on CuTe skips and loads; its rows, channels and steps follow from the shape.

    Args:
        level: Of skipping inside a tile, as the paper counts: 0 none but of whole tiles, 1 loads of rows that do not
            execute, 2 products of 16 such rows, too; of 64 where wgmma multiplies.
        num_stages: Of the ring in shared memory, 2 to 4; 0 is the kernel's own number.
    """

    level: int = 2
    num_stages: int = 0


LEVELS = (0, 1, 2)
STAGES = (2, 3, 4)


def cute_tile(
    tile: Sequence[int] | None, levels: tuple[int, ...] = LEVELS, default: CuteTile | None = None
) -> CuteTile:
    """Return the tile of a call.

    Args:
        tile: Its fields; empty takes the default.
        levels: Which the operator has.
        default: None = level 2.

    Raises:
        UnfitError: If no kernel on CuTe has it.
    """
    chosen = CuteTile(*tile) if tile else default or CuteTile()
    if chosen.level not in levels or chosen.num_stages not in (0, *STAGES):
        require(f"on CuTe it has the levels {levels} and {STAGES[0]} to {STAGES[-1]} stages, got {chosen}")
    return chosen


def cute_obstacle(device: torch.device, _: torch.dtype) -> str | None:
    """Return why kernels on CuTe cannot run on `device`, or None if they can."""
    return ampere_obstacle(device) or obstacle()


@functools.cache
def obstacle() -> str | None:
    """Return why kernels on CuTe cannot be built in this installation, or None if they can."""
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"kernels on CuTe need {' and '.join(missing)}: pip install {' '.join(missing)}"
    if compiler() is None:
        return (
            "kernels on CuTe need nvcc of CUDA 12.8 or newer, on PATH or in $CUDA_HOME/bin: conda install -c nvidia "
            "cuda-nvcc, or https://developer.nvidia.com/cuda-downloads"
        )
    return None


def compiler() -> str | None:
    """Return the path of nvcc, or None."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def includes() -> list[Path]:
    """Return the folders of headers that sources include: ours, CUTLASS's and TVM-FFI's."""
    return [_HEADERS[0].parent, _package("cutlass_library") / "source" / "include", _package("tvm_ffi") / "include"]


def architecture(capability: int) -> str:
    """Return nvcc's name of an architecture with all of its instructions, '90a' for 90."""
    return f"{capability}a" if capability in (90, 100, 103) else str(capability)


def function(source: Path, device: torch.device, **variant: int) -> Callable[..., None]:
    """Return the function of a source that bears its folder's name, built and loaded when it is first asked for.

    It runs on the current stream of its tensors' device.

    Args:
        source: Its file.
        device: Where it is to run.
        variant: What is compiled in, as the source names it.

    Raises:
        UnsupportedBackendError: If it cannot be built, in the compiler's words.
    """
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    asked = (source, 10 * major + minor, tuple(variant.items()))
    return stand_in(f"{source.stem} {variant}", _library, *asked) or _function(*asked)


@functools.cache
def _function(source: Path, capability: int, variant: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    from tvm_ffi import load_module

    library = _library(source, capability, variant)
    return getattr(load_module(str(library)), source.parent.name)  # type: ignore[no-any-return]


def _library(source: Path, capability: int, variant: tuple[tuple[str, int], ...]) -> Path:
    return build(source, dict(variant), architecture(capability), cache_folder() / "kernels")


def build(source: Path, variant: Mapping[str, int], architecture: str, folder: Path) -> Path:
    """Return the library that a source makes, in `folder`; compiled if it is not there.

    Args:
        source: Its file.
        variant: Macros.
        architecture: For example '90a'.
        folder: Where libraries are kept; made if it does not exist.

    Raises:
        UnsupportedBackendError: If something is missing, or nvcc refuses the source, in its words.
    """
    missing = obstacle()
    if missing is not None:
        raise UnsupportedBackendError(missing)
    options = [*options_of(variant, architecture), "-shared", "-Xcompiler=-fPIC", "-ltvm_ffi"]
    packages = [importlib.metadata.version(name) for name in _PACKAGES.values()]
    text = b"".join(path.read_bytes() for path in (source, *_HEADERS))
    key = hashlib.sha256(text + repr((options, packages, _compiler_version())).encode()).hexdigest()
    kept = folder / f"{source.stem}-{architecture}-{key[:32]}.so"
    if not kept.exists():
        # Another process may build the same, and a crash leaves no half a library.
        with replacing(kept) as made:
            paths = [f"-I{path}" for path in includes()] + [f"-L{_package('tvm_ffi') / 'lib'}"]
            said = subprocess.run(
                [str(compiler()), *paths, *options, str(source), "-o", str(made)], capture_output=True, text=True
            )
            if said.returncode:
                raise UnsupportedBackendError(f"nvcc does not compile {source.name}, {options}:\n{said.stderr}")
    return kept


def options_of(variant: Mapping[str, int], architecture: str) -> list[str]:
    """Return what nvcc is told beside where files are."""
    return [
        "-std=c++17",
        "-O3",
        # Float32's denormals round to nothing in half precision, but cost exponentials three more instructions.
        "-ftz=true",
        "--expt-relaxed-constexpr",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        *(f"-D{name}={value}" for name, value in sorted(variant.items())),
    ]


def _package(module: str) -> Path:
    """Return the folder of a package that is there, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return Path(str(spec.origin)).parent


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
