"""Which cluster of programs works on which tiles of 128 rows, made by the CPU: for an experiment, not the package."""

from typing import NamedTuple

TILE, SHORT = 128, 64
# Tiles (or pairs of tiles) of each group that run beside those of all others: they read nearly the same rows.
BAND = 8
NONE = (-1, 0)


class Work(NamedTuple):
    clusters: list  # of lists of items, in each `size` slots (group, tile)
    whole: int  # items that cost a whole turn
    short: int  # items of which every tile has at most 64 rows
    turns: float


def build(counts, clusters, size):
    """Return the work of `clusters` clusters of `size` (1 or 2) programs over all executing rows.

    Args:
        counts: Rows of each group, a list.
    """
    most = max([c // (TILE * size) for c in counts], default=0)
    whole = [
        tuple((group, size * tile + rank) for rank in range(size))
        for band in range(0, most, BAND)
        for group, count in enumerate(counts)
        for tile in range(band, min(band + BAND, count // (TILE * size)))
    ]
    alone = [(g, c // TILE - 1) for g, c in enumerate(counts) if size == 2 and c // TILE % 2]
    alone += [(g, c // TILE) for g, c in enumerate(counts) if c % TILE > SHORT]
    rest = [(g, c // TILE) for g, c in enumerate(counts) if 0 < c % TILE <= SHORT]
    if len(alone) % size and rest:
        alone.append(rest.pop(0))
    whole += _by(alone, size)
    short = _by(rest, size)
    lists = [whole[c::clusters] for c in range(clusters)]
    free = -len(whole) % clusters
    for h, item in enumerate(short):
        place = len(whole) % clusters + h % free if h < 2 * free else (h - 2 * free) % clusters
        lists[place].append(item)
    turns = [0.0] * clusters
    shorts = set(short)
    for c, items in enumerate(lists):
        turns[c] = sum(0.5 if item in shorts else 1.0 for item in items)
    return Work(lists, len(whole), len(short), max(turns))


def _by(tiles, size):
    """Return items of `size` tiles each; the last one may lack some."""
    padded = tiles + [NONE] * (-len(tiles) % size)
    return [tuple(padded[i : i + size]) for i in range(0, len(padded), size)]


def flat(work):
    """Return the items as one list of numbers, and where each cluster's begin and end."""
    items = [number for cluster in work.clusters for item in cluster for slot in item for number in slot]
    starts = [0]
    for cluster in work.clusters:
        starts.append(starts[-1] + len(cluster))
    return items, starts
