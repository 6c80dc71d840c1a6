"""`wide env`: what wide runs on here, to be pasted into a report of a defect."""

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from wide.errors import UsageError
from wide.runs.process import say
from wide.version import __version__

USAGE = "usage: wide env          versions, GPUs and tables of measurements, one a line"
_DISTRIBUTIONS = (
    *("torch", "triton", "transformers", "huggingface-hub", "tokenizers", "safetensors", "numpy", "jsonargparse"),
    *("peft", "datasets", "lm-eval", "matplotlib"),
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET", "WIDE_CACHE", "HF_HOME", "HF_HUB_OFFLINE")


def run(arguments: Sequence[str]) -> None:
    if arguments:
        raise UsageError(f"cannot understand: wide env {' '.join(arguments)}; it takes no words")
    for name, value in _facts():
        say(f"{name:<22}{value}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "wide", __version__
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in _DISTRIBUTIONS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    import torch

    from wide.kernels.tuning import TuningTable

    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    yield "cuda", torch.version.cuda or "none: torch was built for the CPU"
    table = TuningTable()
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        known = "measured" if table.knows(torch.device("cuda", index)) else "not measured: wide tune does it"
        memory = facts.total_memory / 2**30
        yield f"gpu-{index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {memory:.0f} GiB; operators {known}"
    if not torch.cuda.device_count():
        yield "gpu", "none that torch can use"
    yield "own-measurements", f"{table.path}{'' if table.path.is_file() else ' (none yet)'}"
    for name in _VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
