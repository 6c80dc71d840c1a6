"""What the tests of commands share."""

import io
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_calibration():
    """Make the dial from little text: thousands of tiny batches would take most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wide.training.inference_target._MIN_TOKENS", 256)
        patch.setattr("wide.runs.run._DIAL_BLOCKS", 4)
        yield


@pytest.fixture(scope="module")
def drawn_at_once():
    """Leave pictures empty, because drawing takes longer than a run of a tiny model."""
    from matplotlib.figure import Figure

    def savefig(_figure, file, **_options):
        file.write("<svg/>") if isinstance(file, io.StringIO) else Path(file).write_bytes(b"x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield
