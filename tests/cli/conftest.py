"""What the tests of commands share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _short(short_calibration):
    """Calibrate little in every test of a command."""
