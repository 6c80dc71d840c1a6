"""The order of rows in CUDA C++, its source compiled for the CPU: the lists are the reference's."""

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from wide.kernels.reorder import rows_reference as reference
from wide.kernels.reorder.rows_reference import reorder_rows_reference

FOLDER = Path(__file__).parent
SOURCE = Path(reference.__file__).with_name("reorder_rows.cu")
SMALL, WHOLE = 4096, reference.CHUNK_ROWS
"""As few rows of a chunk as the source takes, and as many as it has."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler of C++ (g++) here")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Return what compiles the program for a number of words and of rows of a chunk, once."""
    folder = tmp_path_factory.mktemp("emulated")
    kernel = SOURCE.read_text().replace(
        "extern __shared__ __align__(16) char shared[];", "char* shared = dynamic_shared;"
    )
    (folder / "kernel.cu").write_text(kernel)
    compiler = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{folder}", f"-I{FOLDER}"]
    source = str(FOLDER / "emulated_rows.cpp")

    @functools.cache
    def compiled(words: int, chunk: int) -> Path:
        made = folder / f"{words}-{chunk}"
        subprocess.run([*compiler, f"-DCOUNT={words}", f"-DCHUNK={chunk}", source, "-o", str(made)], check=True)
        return made

    return compiled


def _rates(*few: float, rest: float, groups: int) -> torch.Tensor:
    return torch.cat([torch.tensor(few), torch.full((groups - len(few),), rest)])[torch.randperm(groups)]


@pytest.mark.parametrize(
    ("rows", "rates", "chunk"),
    [
        (1, torch.ones(1), SMALL),
        (130, torch.zeros(40), SMALL),
        (65, torch.ones(64), SMALL),
        (200, torch.linspace(0, 0.5, 9), SMALL),
        (300, _rates(0.02, 0.05, 0.4, rest=0.9, groups=100), SMALL),
        pytest.param(1300, _rates(0.1, 0.3, rest=0.97, groups=70), SMALL, marks=pytest.mark.slow, id="1300-70-4096"),
        (SMALL + 130, torch.tensor([0.1, 0.6, 0.8]), SMALL),
        # A bucket of one row behind a whole chunk, and a bucket that is a whole chunk.
        (SMALL + 1, torch.tensor([0.1, 0.6, 0.8]), SMALL),
        pytest.param(WHOLE, torch.ones(2), WHOLE, marks=pytest.mark.slow, id="whole"),
        pytest.param(WHOLE + 900, _rates(0.05, rest=0.8, groups=40), WHOLE, marks=pytest.mark.slow, id="more"),
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
def test_lists_are_the_reference_s(
    rows: int,
    rates: torch.Tensor,
    chunk: int,
    program: Callable[[int, int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ROWS", chunk)
    mask = torch.rand(rows, len(rates), generator=torch.Generator().manual_seed(rows)) < rates
    mask.numpy().astype(np.uint8).tofile(tmp_path / "mask")
    wanted = reorder_rows_reference(mask)
    made = program(len(wanted[1]), chunk)
    subprocess.run([made, str(rows), str(len(rates)), tmp_path / "mask", tmp_path / "out"], check=True)
    got = np.fromfile(tmp_path / "out", dtype=np.int32)
    ends = np.cumsum([part.numel() for part in wanted])
    assert len(got) == ends[-1]
    for part, found in zip(wanted, np.split(got, ends[:-1]), strict=True):
        assert torch.equal(part.flatten(), torch.from_numpy(found))
