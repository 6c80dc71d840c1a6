"""Make the virtual environment that the Makefile uses: `python3 tools/setup.py .venv`.

PyTorch's default Linux build brings several gigabytes of CUDA libraries. A machine without an NVIDIA GPU gets the CPU
build instead: from a local wheel folder (pip's find-links), else from PyTorch's own index, else, with a warning, the
default build.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch>=2.11"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Create the environment and install the project with its development tools."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    # The declared minimum is what this very check enforces, before pip would with a longer message.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(f"wide needs Python 3.11 or newer, this is {platform.python_version()}; run: make PYTHON=python3.12 ...")
        return 1
    # A virtual environment does not hand its packages on to another one, so that only a base Python's torch counts.
    reuse_torch = sys.prefix == sys.base_prefix and has_torch(Path(sys.executable))
    venv.EnvBuilder(with_pip=True, clear=True, system_site_packages=reuse_torch).create(folder)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not reuse_torch:
        install_torch(python)
    print("installing wide and its tools", flush=True)
    pip(python, "-e", f"{ROOT}[dev]")
    return 0


def has_torch(python: Path) -> bool:
    """Return whether the interpreter already has a PyTorch that is new enough."""
    code = "import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def install_torch(python: Path) -> None:
    """Install PyTorch, the CPU build where there is no NVIDIA GPU."""
    if sys.platform == "darwin" or shutil.which("nvidia-smi"):
        print("installing PyTorch", flush=True)
        pip(python, TORCH)
        return
    print("no NVIDIA GPU: installing the CPU build of PyTorch", flush=True)
    # Without --no-deps a wheel folder that holds torch alone would not do.
    if pip(python, "--no-index", "--no-deps", TORCH, quiet=True):
        return
    if pip(python, "--index-url", CPU_INDEX, "--retries", "1", "--timeout", "20", TORCH, quiet=True):
        return
    print(f"warning: {CPU_INDEX} was not reached; installing the default build, a download of several gigabytes")
    pip(python, TORCH)


def pip(python: Path, *arguments: str, quiet: bool = False) -> bool:
    """Run `pip install`; with `quiet`, report failure instead of stopping."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    result = subprocess.run(command, check=False, capture_output=quiet)
    if result.returncode and not quiet:
        print(f"failed: {' '.join(command)}")
        sys.exit(result.returncode)
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
