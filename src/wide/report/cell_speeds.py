"""The measured speed of a comparison's cells, from what `wide profile` left in their folders."""

from dataclasses import dataclass
from pathlib import Path

from wide.report.cells import Cell, read_folder
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


def read_speeds(folder: Path) -> list[CellSpeed]:
    """Return the speeds that lie in a comparison's folder; none is no error.

    Args:
        folder: With a folder for each cell in `cells`.

    Raises:
        DataError: If a file is not one of a bench.
    """
    speeds = []
    for path in sorted((folder / _CELLS).glob("*")):
        cell = read_folder(path.name)
        if cell is not None:
            speeds += [CellSpeed(cell, each) for each in read_profile(path).forwards() if each.candidate in OWN]
    return speeds
