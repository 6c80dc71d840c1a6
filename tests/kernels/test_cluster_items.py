"""How the kernel in CUDA C++ deals tiles out to its clusters: its own lines, compiled for the host."""

import ctypes
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wide.kernels.gemm_mn import _cuda

COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

ROWS = 256
CELL = 64
CONSTANTS = re.compile(r"^constexpr int (?:CLUSTER|COLUMNS|FILL)\b.*$", re.MULTILINE)
STRUCTS = re.compile(r"^struct Item \{.*?^\};.*?^struct Items \{.*?^\};", re.MULTILINE | re.DOTALL)
# A load in PTX, and what it does in C++.
LOAD = re.compile(r'asm volatile\("ld\.global\.nc\.v2[^;]*;" : "=r"\(group\), "=r"\(tile\) : "l"\(([^;]*)\)\);')
PROGRAM = """
#define __device__
#define __forceinline__ inline
%s
#include <algorithm>
using std::min;
// Channels of a short tile in one program.
constexpr int SHORT_COLUMNS = COLUMNS / CLUSTER;
%s
extern "C" int columns() { return COLUMNS; }
extern "C" int short_columns() { return SHORT_COLUMNS; }
extern "C" int fill() { return FILL; }
extern "C" int deal(const int* tiles, int whole, int shorts, int parts, int rank, int cluster, int clusters, int* out) {
  const Items items{tiles, whole * parts, shorts * parts, parts, rank, cluster, clusters};
  const int number = items.number();
  // Two more: the kernel looks ahead so far.
  for (int turn = 0; turn < number + 2; ++turn) {
    const Item item = items.at(turn, number);
    *out++ = item.group;
    *out++ = item.first;
    *out++ = item.channel;
    *out++ = item.shared;
  }
  return number;
}
"""


class Item(NamedTuple):
    """What one program does in one turn."""

    group: int
    first: int
    channel: int
    shared: int


class Tiles(NamedTuple):
    """Of all groups: clusters that share them, whole and short ones, and parts of the channels."""

    clusters: int
    whole: int
    short: int
    parts: int


TILES = st.builds(
    Tiles, clusters=st.integers(1, 20), whole=st.integers(0, 60), short=st.integers(0, 60), parts=st.integers(1, 3)
)
repeated = settings(max_examples=150)


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def deal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the dealing as a library."""
    text = Path(_cuda.__file__).with_name("gemm_mn.cu").read_text(encoding="utf-8")
    structs = STRUCTS.search(text)
    assert structs is not None
    lines, replaced = LOAD.subn(r"group = (\1)[0]; tile = (\1)[1];", structs[0])
    assert replaced == 1
    folder = tmp_path_factory.mktemp("items")
    (folder / "items.cpp").write_text(PROGRAM % ("\n".join(CONSTANTS.findall(text)), lines), encoding="utf-8")
    command = [str(COMPILER), f"-DGATED={int(request.param)}", "-DDENSE=0", "-std=c++17", "-O1", "-shared", "-fPIC"]
    command += ["-Wall", "-Werror"]
    finished = subprocess.run(
        [*command, "-o", "items.so", "items.cpp"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return ctypes.CDLL(str(folder / "items.so"))


def _dealt(deal: ctypes.CDLL, tiles: Tiles, rank: int) -> list[list[Item]]:
    """Return what each cluster's program of a rank does; tile t is tile 1000 + t of group t."""
    count = tiles.whole + tiles.short
    listed = [number for tile in range(count) for number in (tile, 1000 + tile)]
    places = (ctypes.c_int * len(listed))(*listed)
    most = count * tiles.parts * deal.columns() // deal.short_columns() + 2
    room = (ctypes.c_int * (4 * most))()
    found = []
    for cluster in range(tiles.clusters):
        number = deal.deal(places, tiles.whole, tiles.short, tiles.parts, rank, cluster, tiles.clusters, room)
        items = [Item(*room[4 * turn : 4 * turn + 4]) for turn in range(number + 2)]
        assert items[number:] == [Item(-1, 0, 0, 0)] * 2
        found.append(items[:number])
    return found


def _turns(deal: ctypes.CDLL, tiles: Tiles) -> int:
    """Return how long the last cluster takes, a short item lasting 1 and `fill` of them as long as a whole one."""
    return max(sum(deal.fill() if item.shared else 1 for item in items) for items in _dealt(deal, tiles, 0))


@repeated
@given(tiles=TILES)
def test_rows_and_channels_of_every_tile_are_computed_once(deal: ctypes.CDLL, tiles: Tiles) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    for rank in (0, 1):
        for item in (item for items in _dealt(deal, tiles, rank) for item in items):
            columns = deal.columns() if item.shared else deal.short_columns()
            channels = range(item.channel, item.channel + columns, CELL)
            seen.update((item.group, item.first - (1000 + item.group) * ROWS, channel) for channel in channels)
    channels = range(0, tiles.parts * deal.columns(), CELL)
    wanted = {(tile, half, channel) for tile in range(tiles.whole) for half in (0, ROWS // 2) for channel in channels}
    # Short ones have no second half.
    wanted |= {(tiles.whole + tile, 0, channel) for tile in range(tiles.short) for channel in channels}
    assert set(seen) == wanted
    assert set(seen.values()) <= {1}


@repeated
@given(tiles=TILES)
def test_programs_of_a_cluster_walk_the_same_tiles_and_whole_ones_first(deal: ctypes.CDLL, tiles: Tiles) -> None:
    for ours, theirs in zip(*(_dealt(deal, tiles, rank) for rank in (0, 1)), strict=True):
        assert [(item.group, item.shared) for item in ours] == [(item.group, item.shared) for item in theirs]
        shared = [bool(item.shared) for item in ours]
        assert shared == [item.group < tiles.whole for item in ours]
        assert shared == sorted(shared, reverse=True)


@repeated
@given(tiles=TILES)
def test_short_tiles_fill_the_last_turn_before_they_begin_another(deal: ctypes.CDLL, tiles: Tiles) -> None:
    clusters, whole = tiles.clusters, tiles.whole * tiles.parts
    short = tiles.short * tiles.parts * deal.columns() // (2 * deal.short_columns())
    beyond = max(short - deal.fill() * (-whole % clusters), 0)
    assert _turns(deal, tiles) == deal.fill() * -(-whole // clusters) - (-beyond // clusters)


def test_the_largest_short_tiles_are_given_no_third(deal: ctypes.CDLL) -> None:
    # Lists have them first. Four clusters have a turn left for ten parts of five tiles.
    for items in _dealt(deal, Tiles(clusters=66, whole=64, short=5, parts=2), 0):
        assert len(items) <= 3 or 64 not in {item.group for item in items}


def test_short_tiles_of_the_queries_of_4096_rows_cost_less_than_a_turn(deal: ctypes.CDLL) -> None:
    # Eight groups of 2049 rows, two parts each: 128 whole and 16 short tiles, three turns if all were alike.
    tiles = Tiles(clusters=66, whole=64, short=8, parts=2)
    assert 2 * deal.fill() < _turns(deal, tiles) < 3 * deal.fill()
