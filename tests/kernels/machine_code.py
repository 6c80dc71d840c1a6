"""What NVIDIA's tools, which come with Triton, say of machine code."""

import hashlib
import subprocess
from pathlib import Path

import triton
from triton.runtime.cache import get_cache_manager

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_CALLS = {"code": ("nvdisasm", "-c"), "usage": ("cuobjdump", "-res-usage")}


def described(image: bytes) -> tuple[str, str]:
    """Return the instructions of a cubin, and what its functions use.

    Both are kept in Triton's cache beside what it compiled: reading machine code takes as long as making it.
    """
    cache = get_cache_manager(hashlib.sha256(image).hexdigest())
    kept = {name: cache.get_file(name) for name in _CALLS}
    if None in kept.values():
        file = cache.put(image, "kernel.cubin")
        for name, (tool, option) in _CALLS.items():
            said = subprocess.run([_TOOLS / tool, option, file], capture_output=True, text=True, check=True).stdout
            kept[name] = cache.put(said, name, binary=False)
    code, usage = (Path(kept[name]).read_text() for name in _CALLS)
    return code, usage
