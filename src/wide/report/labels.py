"""Short labels beside points of a plot, placed so that none covers another."""

from collections.abc import Sequence
from typing import Any

_GAP = 3.0
# Width and height of a letter, of the size of the font.
_LETTER = (0.62, 1.1)
_Box = tuple[float, float, float, float]


def place_labels(axes: Any, labels: Sequence[tuple[str, tuple[float, float]]], *, size: float) -> None:
    """Write labels beside points; one that finds no free place is left out.

    Args:
        axes: Of matplotlib, in a figure whose layout is settled (`Figure.draw_without_rendering`).
        labels: Texts with the points that they belong to, in the units of the axes.
        size: Of the letters, in points.
    """
    scale = 72.0 / axes.get_figure(root=True).dpi
    frame = axes.get_window_extent()
    places = [tuple(scale * part for part in axes.transData.transform(point)) for _, point in labels]
    taken: list[_Box] = [(x - 2.0, y - 2.0, x + 2.0, y + 2.0) for x, y in places]
    for (words, point), (x, y) in zip(labels, places, strict=True):
        width, height = _LETTER[0] * size * len(words), _LETTER[1] * size
        for dx, dy in _offsets(width, height):
            box = (x + dx, y + dy, x + dx + width, y + dy + height)
            inside = scale * frame.x0 <= box[0] and box[2] <= scale * frame.x1
            inside = inside and scale * frame.y0 <= box[1] and box[3] <= scale * frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(words, point, xytext=(dx, dy), textcoords="offset points", fontsize=size, va="bottom")
                break


def _offsets(width: float, height: float) -> list[tuple[float, float]]:
    """Return where a label may begin, from its point: the lower left corner of its box, in points."""
    left, below = -_GAP - width, -_GAP - height
    middle = (-width / 2, -height / 2)
    near = [(_GAP, _GAP - 1), (_GAP, below + 1), (left, _GAP - 1), (left, below + 1)]
    return [*near, (middle[0], _GAP + 1), (middle[0], below - 1), (_GAP + 2, middle[1]), (left - 2, middle[1])]


def _overlap(one: _Box, other: _Box) -> bool:
    return min(one[2], other[2]) > max(one[0], other[0]) and min(one[3], other[3]) > max(one[1], other[1])
