"""kill -9 at any moment: the run goes on from a whole checkpoint and ends bit for bit as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "crash_worker.py"
MOMENTS = {
    "before the first checkpoint": None,
    "between checkpoints": 4,
    "in the middle of the first checkpoint's tensors": None,
    "before the manifest of the second checkpoint": 2,
    "in the middle of the manifest of the second checkpoint": 2,
    "right after the rename": 2,
    "while the oldest checkpoint is deleted": 6,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("crash")
    # A forked process cannot use a GPU that its parent has used.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(WORKER.parent)])
    subprocess.run(
        [sys.executable, str(WORKER), str(root)], env=environment, check=True, capture_output=True, timeout=300
    )
    return json.loads((root / "results.json").read_text())


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_bit_for_bit(results, moment):
    found = results[moment]
    assert found["killed"]
    assert found["kept"] == MOMENTS[moment]
    assert found["same"]
    assert found["left"] == ["step-00000006", "step-00000007"]
    assert found["steps"] == list(range(7))


def test_all_moments_were_tried(results):
    assert results.keys() == MOMENTS.keys()
