"""kill -9 at any moment: the run goes on from a whole checkpoint and ends bit for bit as if nothing had happened."""

import crash_worker
import pytest
from tiny import FORKS

pytestmark = FORKS
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
    return crash_worker.all_moments(tmp_path_factory.mktemp("crash"))


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
