"""A backend is one file that registers itself: it is found by its name, says what it takes, and is never replaced."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from wide.errors import UnsupportedBackendError
from wide.kernels import dispatch
from wide.kernels.dispatch import AnyShape, Backends, Candidate

CPU = torch.device("cpu")
SHAPE = AnyShape(torch.float32)
OP = """
from wide.kernels.dispatch import Backends

BACKENDS = Backends("double", __package__, lambda x: x + x)
"""
FILE = """
import torch
from wide.kernels.dispatch import Candidate, require
from {root}.double.op import BACKENDS

@BACKENDS.register(
    "mine",
    needs=lambda device, dtype: None if dtype == torch.float32 else f"no {{dtype}} here",
    candidates=lambda shape, device, few: [Candidate((1,))] if few else [Candidate((1,)), Candidate((2,), 64)],
)
def double(x, *, tile=None):
    require(None if x.is_contiguous() else "rows must be contiguous")
    return x * (tile or [2])[0]
"""


def test_triton_kernels_are_compiled_for_any_number_of_rows() -> None:
    """Otherwise a server compiles one more whenever a number is a multiple of 16, or 1."""
    counts, entries = {"M", "T_q", "T_k", "num_chunks", "num_wide", "num_pairs", "bands", "max_tiles"}, 0
    for path in Path(str(dispatch.__file__)).parent.glob("*/_triton.py"):
        source = path.read_text()
        for jit, name, parameters in re.findall(r"^@triton.jit(.*)\ndef (\w+)\(([^)]*)\)", source, flags=re.MULTILINE):
            if f"{name}[" in source:
                plain = {each for each in re.findall(r"\w+(?=,|$| *\n)", parameters) if f"{each}:" not in parameters}
                assert counts & plain <= set(re.findall(r'"(\w+)"', jit)), f"{path}: {name}"
                entries += 1
    assert entries > 10


@pytest.fixture
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backends:
    """Return the backends of an operator: a reference, a file, and one whose language is not installed."""
    root = f"root_{tmp_path.name}"
    folder = tmp_path / root / "double"
    folder.mkdir(parents=True)
    (folder / "op.py").write_text(OP)
    (folder / "_mine.py").write_text(FILE.format(root=root))
    (folder / "_foreign.py").write_text("import a_language_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dispatch, "_ROOTS", {})
    dispatch.look_in(root, folder.parent)
    found: Backends = importlib.import_module(f"{root}.double.op").BACKENDS
    return found


def test_a_file_is_a_backend(backends: Backends) -> None:
    assert backends.run("mine", CPU, SHAPE, torch.ones(3), tile=[5]).tolist() == [5.0] * 3
    assert list(backends) == ["torch", "mine"]
    assert "mine" in backends
    few, more = ("mine", Candidate((1,))), ("mine", Candidate((2,), 64))
    assert list(backends.candidates(SHAPE, CPU, quick=True)) == [few]
    assert list(dict.fromkeys(backends.candidates(SHAPE, CPU, quick=False))) == [few, more]
    assert not list(backends.candidates(AnyShape(torch.float16), CPU, quick=True))


@pytest.mark.parametrize(
    ("name", "shape", "tensor", "tile", "words"),
    [
        ("mine", AnyShape(torch.float16), torch.ones(2), (), "no torch.float16 here; choose backend='torch'"),
        ("mine", SHAPE, torch.ones(2, 2).t(), (), "rows must be contiguous; choose backend='torch'"),
        (
            "yours",
            SHAPE,
            torch.ones(2),
            (),
            r"no backend 'yours', only \['torch', 'mine'\]; choose .*'torch' or 'mine'",
        ),
        ("foreign", SHAPE, torch.ones(2), (), "'foreign' cannot be imported here .*a_language_that_nobody_has"),
        ("torch", SHAPE, torch.ones(2), (3,), r"'torch' has no tiles, got \(3,\); choose backend='mine'"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(
    name: str, shape: AnyShape, tensor: torch.Tensor, tile: tuple[int, ...], words: str, backends: Backends
) -> None:
    with pytest.raises(UnsupportedBackendError, match=f"^double: .*{words}"):
        backends.run(name, CPU, shape, tensor, tile=tile)


def test_a_fault_of_a_backends_own_file_is_not_taken_for_a_missing_language(backends: Backends) -> None:
    (root,) = dispatch._ROOTS
    (dispatch._ROOTS[root] / "double" / "_broken.py").write_text(f"import {root}.nothing\n")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        backends.run("broken", CPU, SHAPE, torch.ones(2))
