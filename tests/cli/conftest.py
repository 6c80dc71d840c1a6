"""What the tests of commands share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_calibration():
    """Make the dial from little text: thousands of tiny batches would take most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wide.training.inference_target._MIN_TOKENS", 256)
        patch.setattr("wide.runs.run._DIAL_BLOCKS", 4)
        yield
