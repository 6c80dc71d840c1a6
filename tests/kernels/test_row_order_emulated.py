"""The order of rows in CUDA C++, its source compiled for the CPU: the lists are the reference's."""

import shutil
import subprocess
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
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiled programs, one for each number of words."""
    folder = tmp_path_factory.mktemp("emulated")
    kernel = SOURCE.read_text().replace(
        "extern __shared__ __align__(16) char shared[];", "char* shared = dynamic_shared;"
    )
    (folder / "kernel.cu").write_text(kernel)
    compiler = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{folder}", f"-I{FOLDER}"]
    source = str(FOLDER / "emulated_rows.cpp")
    running = [
        subprocess.Popen(
            [*compiler, f"-DCOUNT={words}", f"-DCHUNK={chunk}", source, "-o", str(folder / f"{words}-{chunk}")]
        )
        for words, chunk in ((2, SMALL), (3, SMALL), (4, SMALL), (2, WHOLE))
    ]
    assert [process.wait() for process in running] == [0] * len(running)
    return folder


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
        (1300, _rates(0.1, 0.3, rest=0.97, groups=70), SMALL),
        (SMALL + 130, torch.tensor([0.1, 0.6, 0.8]), SMALL),
        # A bucket of one row behind a whole chunk, and a bucket that is a whole chunk.
        (SMALL + 1, torch.tensor([0.1, 0.6, 0.8]), SMALL),
        (WHOLE, torch.ones(2), WHOLE),
        (WHOLE + 900, _rates(0.05, rest=0.8, groups=40), WHOLE),
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
def test_lists_are_the_reference_s(
    rows: int, rates: torch.Tensor, chunk: int, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ROWS", chunk)
    mask = torch.rand(rows, len(rates), generator=torch.Generator().manual_seed(rows)) < rates
    mask.numpy().astype(np.uint8).tofile(tmp_path / "mask")
    wanted = reorder_rows_reference(mask)
    program = programs / f"{len(wanted[1])}-{chunk}"
    subprocess.run([program, str(rows), str(len(rates)), tmp_path / "mask", tmp_path / "out"], check=True)
    got = np.fromfile(tmp_path / "out", dtype=np.int32)
    ends = np.cumsum([part.numel() for part in wanted])
    assert len(got) == ends[-1]
    for part, found in zip(wanted, np.split(got, ends[:-1]), strict=True):
        assert torch.equal(part.flatten(), torch.from_numpy(found))
