"""The table of measured choices: one JSON file, keyed by what a measurement depends on."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wide.errors import ConfigError
from wide.kernels.device import device_facts
from wide.kernels.native.build import cache_folder
from wide.records import versions
from wide.writing import write_whole

# Sizes that a choice decides, so that they name no shape.
_CHOSEN = ("block_m", "groups_per_block")
# Sizes that a tile is cut for; a tile that fits a group fits two in a row, too.
_SAME = "head_dim"
_DOUBLED = "group_size"
_NOISE = 1.02
# What a choice must be ahead of dense by to serve groups that were not measured.
_CLEAR = 1.25
# Above this share only a measurement at that rate may speak against dense.
_NEARLY_ALL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One input of an operator as data: what tables are keyed by, and what tests and benches build tensors from.

    Args:
        sizes: Extents by name in the words of the glossary, e.g. `num_rows`, `group_size`.
        dtype: Of the floating-point inputs.
        active: Share of active (row, group) pairs in a random mask, in [0, 1].
        options: Arguments that choose a variant, e.g. `activation`.
    """

    sizes: Mapping[str, int]
    dtype: torch.dtype
    active: float = 0.5
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to run for a shape.

    Args:
        backend: Under which a kernel is registered; 'dense' where skipping does not pay.
        tile: Fields of the backend's tile; empty means its default.
        block_m: Rows in a tile, for the reordering; 0 means its default.
        groups_per_block: Groups in a super-block, for the pattern sort; 0 means not applicable.
        median_us: Measured time in microseconds; 0 if nothing was measured.
        dense_us: Time of the dense product in the same run, microseconds; 0 if unknown.
        left_to_tiles: Of a product over one sort: share of the dense work that its tiles executed under the measured
            masks.
    """

    backend: str
    tile: tuple[int, ...] = ()
    block_m: int = 0
    groups_per_block: int = 0
    median_us: float = 0.0
    dense_us: float = 0.0
    left_to_tiles: float = 1.0

    @property
    def kernel(self) -> "Choice":
        """The choice without what was measured of it."""
        return dataclasses.replace(self, median_us=0.0, dense_us=0.0, left_to_tiles=1.0)


def bucket(num_rows: int) -> int:
    """Return the power of two at or above a number of rows: all counts of a bucket share one measurement."""
    return 1 << max(0, num_rows - 1).bit_length()


def shape_key(operator: str, case: Case) -> str:
    """Return the part of a key that names no machine: operator, dtype, active share in tenths, sizes, options.

    Rows count by bucket; what a choice decides (`block_m`, `groups_per_block`) does not count.
    """
    sizes = {name: bucket(size) if name == "num_rows" else size for name, size in case.sizes.items()}
    parts = [
        operator,
        str(case.dtype).removeprefix("torch."),
        f"active {round(10 * case.active) / 10}",
        *(f"{name} {size}" for name, size in sorted(sizes.items()) if name not in _CHOSEN),
        *(f"{name} {value}" for name, value in sorted(case.options.items())),
    ]
    return " | ".join(parts)


def tuning_key(operator: str, device: torch.device, case: Case) -> str:
    """Return the key of a case in the user's table: device, versions of torch and triton, then its `shape_key`."""
    return f"{machine_key(device)} | {shape_key(operator, case)}"


def machine_key(device: torch.device) -> str:
    """Return the part of a key that names device and versions."""
    triton = versions().get("triton", "none")
    return " | ".join([device_facts(device).name, f"torch {torch.__version__}", f"triton {triton}"])


def shipped_path(device_name: str) -> Path:
    """Return where the package keeps what was measured on a kind of device, by `shape_key`; it need not exist."""
    return Path(__file__).parent / "tuned" / f"{device_name.lower().replace(' ', '-')}.json"


class TuningTable:
    """Measured choices in a JSON file, which need not exist; None means tuning.json in `cache_folder()`.

    Raises ConfigError if the file is not a table of choices.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "tuning.json"
        self._choices = _read_choices(self.path)

    def knows(self, device: torch.device) -> bool:
        """Return whether anything was measured here, or ships for this kind of device."""
        start = machine_key(device) + " | "
        return bool(_shipped(device_facts(device).name)) or any(key.startswith(start) for key in self._choices)

    def nearest(self, operator: str, case: Case, device: torch.device, *, fewer_rows: bool) -> Choice | None:
        """Return the choice for a case, or that of the most similar case whose choice carries over, or None.

        Dtype and options must be the same and no width may differ more than twofold. If more pairs execute in the case
        than in what was measured, the measured time, in proportion, must still beat dense. Groups must be as large as
        those measured or, where skipping won by a quarter, twice as large: tiles that fit small groups fit large ones,
        and large ones waste less. Nothing carries over to smaller groups.

        Only measurements of fewer rows count if `fewer_rows` is true, otherwise only those of more rows.
        """
        start = machine_key(device) + " | "
        here = {key.removeprefix(start): choice for key, choice in self._choices.items() if key.startswith(start)}
        wanted, known = shape_key(operator, case), {**_shipped(device_facts(device).name), **here}
        far = {key: _distance(wanted, key, choice, fewer_rows=fewer_rows) for key, choice in known.items()}
        best = min(far, key=lambda key: far[key], default="")
        return known[best] if far.get(best, math.inf) < math.inf else None

    def store(self, choices: Mapping[str, Choice]) -> None:
        """Keep choices by key, in memory and on disk; readers see the old file or the new one, never a part."""
        # Read again: another process may have added entries since.
        self._choices = {**_read_choices(self.path), **self._choices, **choices}
        entries = {key: dataclasses.asdict(choice) for key, choice in sorted(self._choices.items())}
        write_whole(self.path, json.dumps(entries, indent=1))


def _read_choices(path: Path) -> dict[str, Choice]:
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())
        return {key: Choice(**{**entry, "tile": tuple(entry["tile"])}) for key, entry in entries.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no tuning table ({error}); delete it and tune again") from error


@functools.cache
def _parts(key: str) -> tuple[str, str, float, dict[str, float], tuple[str, ...]]:
    """Return operator, dtype, active share, sizes and options of a `shape_key`."""
    operator, dtype, active, *rest = key.split(" | ")
    sizes, options = {}, []
    for part in rest:
        name, _, value = part.rpartition(" ")
        if value.isdigit():
            sizes[name] = float(value)
        else:
            options.append(part)
    return operator, dtype, float(active.removeprefix("active ")), sizes, tuple(options)


def _distance(wanted: str, key: str, choice: Choice, *, fewer_rows: bool) -> float:
    """Return how unlike two shapes are, 0 = the same; infinite if a choice for `key` says nothing about `wanted`."""
    first, second = _parts(wanted), _parts(key)
    if (first[0], first[1], first[4]) != (second[0], second[1], second[4]) or first[3].keys() != second[3].keys():
        return math.inf
    # Skipping that pays at some rate pays all the more when less executes; the reverse has to be worked out.
    more_active = second[2] - first[2]
    if more_active < 0 and (first[2] > _NEARLY_ALL or not _still_pays(choice, first[2] / max(second[2], 0.1))):
        return math.inf
    rows = math.log2(first[3]["num_rows"] / second[3]["num_rows"])
    rows = rows if fewer_rows else -rows
    if rows < 0:
        return math.inf
    widths = _widths(first[3]), _widths(second[3])
    grown = {name: math.log2(size / widths[1][name]) for name, size in widths[0].items()}
    far = {name: abs(growth) for name, growth in grown.items()}
    if max(far.values()) > 1.0 or far.get(_SAME, 0.0):
        return math.inf
    doubled = grown.get(_DOUBLED, 0.0)
    if doubled and (doubled != 1.0 or not _still_pays(choice, _CLEAR)):
        return math.inf
    # Sizes outweigh rates, rates outweigh rows.
    return 1e4 * sum(far.values()) + 1e2 * abs(more_active) + rows


def _widths(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return sizes without rows; groups of channels count by the width that they make up."""
    widths = {name: size for name, size in sizes.items() if name != "num_rows"}
    if _DOUBLED in widths and "num_groups" in widths:
        widths["num_groups"] *= widths[_DOUBLED]
    return widths


def _still_pays(choice: Choice, growth: float) -> bool:
    """Return whether a sparse choice beats dense by more than noise if its time grows in proportion to the work."""
    return choice.backend == "dense" or choice.median_us * growth * _NOISE < choice.dense_us


@functools.cache
def _shipped(device_name: str) -> dict[str, Choice]:
    return _read_choices(shipped_path(device_name))
