"""What NVIDIA's tools, which come with Triton, say of machine code."""

import hashlib
import subprocess
from pathlib import Path

import triton
from triton.runtime.cache import get_cache_manager

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def described(image: bytes) -> tuple[str, str]:
    """Return the instructions of a cubin, and what its functions use."""
    return _said(image, "nvdisasm", "-c"), usage_of(image)


def usage_of(image: bytes) -> str:
    """Return what the functions of a cubin use. What spills has a stack, and this takes no time beside instructions."""
    return _said(image, "cuobjdump", "-res-usage")


def _said(image: bytes, tool: str, option: str) -> str:
    """Return what a tool says, kept in Triton's cache beside what that compiled: it takes as long as compiling."""
    cache = get_cache_manager(hashlib.sha256(image).hexdigest())
    kept = cache.get_file(tool)
    if kept is None:
        file = cache.put(image, "kernel.cubin")
        said = subprocess.run([_TOOLS / tool, option, file], capture_output=True, text=True, check=True).stdout
        kept = cache.put(said, tool, binary=False)
    return Path(kept).read_text()
