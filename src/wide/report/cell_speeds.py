"""The measured speed of a comparison's cells, from what `wide profile` left in their folders."""

from dataclasses import dataclass
from pathlib import Path

from wide.report.cells import Cell, read_folder
from wide.report.figure import Origin
from wide.report.profiles import OWN, Forward, read_profile

_CELLS = "cells"


@dataclass(frozen=True, slots=True)
class CellSpeed:
    """How fast what a cell left is, at one shape.

    Args:
        cell: Which.
        forward: Its own model's time, calibrated only.
    """

    cell: Cell
    forward: Forward


def read_speeds(folder: Path) -> tuple[list[CellSpeed], list[Origin]]:
    """Return the speeds that lie in a comparison's folder, and the files that they lie in; none is no error.

    Args:
        folder: With a folder for each cell in `cells`.

    Raises:
        DataError: If a file is not one of a bench.
    """
    speeds: list[CellSpeed] = []
    origins: list[Origin] = []
    for path in sorted((folder / _CELLS).glob("*")):
        cell = read_folder(path.name)
        if cell is not None:
            profile = read_profile(path)
            speeds += [CellSpeed(cell, each) for each in profile.forwards() if each.candidate in OWN]
            origins += profile.origins
    return speeds, origins
