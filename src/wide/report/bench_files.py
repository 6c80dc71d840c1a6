"""A file of a bench as figures rely on it: each record is checked once, when it is read; what does not fit is said."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.errors import DataError

OPERATORS, ATTENTION, END_TO_END = "operators.json", "attention.json", "endtoend.json"
NAIVE, NAIVE_BYTES, DEPTH = "naive.json", "naive-bytes.json", "depth.json"
DECODE_GROUPS = "decode_groups"
"""How races of decode attention over the size of groups begin."""
REORDER = "reorder"
"""How sweeps of the reordering begin, which are no points of an operator."""
_TIME = "median_us"
# What only a timed record has: one of these without a time is damaged, without any of them it was not timed.
_TIMED = ("low_us", "high_us", "speedup", "parts_us", "breakdown_us", "active_tflops")

Fits = Callable[[Any], bool]
Record = Mapping[str, Any]


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number, infinities and what is no number included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Return whether a value of JSON is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def _amount(value: Any) -> bool:
    return is_finite(value) and value >= 0


def _share(value: Any) -> bool:
    return is_finite(value) and 0 < value <= 1


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_finite, value.values()))


def _halves(value: Any) -> bool:
    return _numbers(value) and {"attention", "ffn"} <= set(value)


def _race(value: Any) -> bool:
    # The second word of a race of products with a vector is the product's name.
    return _text(value) and (not value.startswith("gemv") or len(value.split()) > 1)


def _one_of(*words: str) -> Fits:
    return lambda value: isinstance(value, str) and value in words


_POINT = {"median_us": _positive, "active": _share, "candidate": _text}
_NEEDED: dict[str, dict[str, Fits]] = {
    OPERATORS: {**_POINT, "sweep": _text, "num_rows": _positive},
    ATTENTION: {**_POINT, "race": _race, "peer": _text},
    END_TO_END: {
        "what": _one_of("prefill", "decode"),
        "tokens": _positive,
        "batch": _positive,
        "candidate": _text,
        "median_us": _positive,
        "speedup": _positive,
    },
    NAIVE: {
        "axis": _one_of("M", "N", "K"),
        "size": _positive,
        "candidate": _text,
        "accounted_traffic_bytes": is_finite,
    },
    NAIVE_BYTES: {
        "axis": _one_of("M", "N", "K"),
        "size": _positive,
        "candidate": _text,
        "dram_read_bytes": _amount,
        "dram_written_bytes": _amount,
    },
    DEPTH: {
        **_POINT,
        "rows": _positive,
        "width_in": _positive,
        "width_out": _positive,
        "speedup": _positive,
        "parts_us": _numbers,
    },
}
_SWEEP_OF_GROUPS: dict[str, Fits] = {
    "batch": _positive,
    "length": _positive,
    "group_size": _positive,
    "speedup": _positive,
    "union": _share,
}
_OTHERS: dict[str, dict[str, Fits]] = {
    OPERATORS: {"group_size": _positive, "choice": lambda value: isinstance(value, dict)},
    ATTENTION: {
        "group_size": _positive,
        "batch": _positive,
        "num_rows": _positive,
        "length": _positive,
        "union": _share,
        "choice": lambda value: isinstance(value, dict),
    },
    END_TO_END: {
        "ceiling": _positive,
        "skipped": _halves,
        "breakdown_us": _numbers,
        "energy_j": is_finite,
        "peak_memory_bytes": is_finite,
    },
    NAIVE: {
        "group_size": _positive,
        "active": is_finite,
        "error": is_finite,
        "median_us": _positive,
        "speedup": _positive,
        "active_tflops": is_finite,
        "peak_memory_bytes": is_finite,
        "accounted_storage_bytes": is_finite,
        "not_run": _text,
        "failure": _text,
    },
    NAIVE_BYTES: {"l2_bytes": _amount, "group_size": _positive, "active": _share, "backend": _text},
    DEPTH: {"accounted_traffic_bytes": _numbers, "error": is_finite},
}
BENCH_FILES = tuple(_NEEDED)
"""Names of the files that benches write, and the profiler's count of bytes beside one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFile:
    """What one bench measured.

    Args:
        name: Of the file, which says which bench it is.
        path: Where it lies; empty where it was made in memory.
        records: Those that fit; every field that they have is of its kind.
        notes: What was left out, in words.
        device: Name of the GPU.
        date: Of the measurement.
        command: That measured.
        model: Name of the model or of the shape with random weights.
        adapter: Folder of its routers, empty where they are random.
        checkpoint: Folder of a materialised model that was timed, empty where there is none.
        method: Which method made the adapter.
        ffn_group_size: Channels of an FFN group; None where there is none.
        layers: Of the timed model; None where it is not known.
    """

    name: str
    path: str
    records: tuple[Record, ...]
    notes: tuple[str, ...]
    device: str
    date: str
    command: str
    model: str
    adapter: str
    checkpoint: str
    method: str
    ffn_group_size: int | None
    layers: int | None


def read_bench_file(path: Path) -> BenchFile:
    """Return what a file of a bench holds.

    Raises:
        DataError: If it is not one of a bench.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not JSON, perhaps cut while being written; measure again") from error
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise DataError(f"{path} holds no list of records; wanted what {_writer(path.name)} writes")
    return bench_file(path.name, content, str(path))


def _writer(name: str) -> str:
    return "python -m benchmarks.counters --naive" if name == NAIVE_BYTES else "wide bench or wide profile"


def bench_file(name: str, content: Mapping[str, Any], path: str = "") -> BenchFile:
    """Return the content of a bench's file with the records that fit, and in words what was left out.

    Args:
        name: One of `BENCH_FILES`.
        content: As the bench writes it, with a list of records.
        path: Where it lies.
    """
    faults: Counter[str] = Counter()
    records = _counted(content) if name == NAIVE_BYTES else content["records"]
    kept = [found for each in records if (found := _checked(name, each, faults)) is not None]
    size, layers = content.get("ffn_group_size"), content.get("layers")
    facts = ("device", "date", "command", "model", "adapter", "checkpoint", "method")
    texts = {fact: content[fact] if isinstance(content.get(fact), str) else "" for fact in facts}
    words = [f"{count} of {len(records)} records {fault}" for fault, count in faults.items()]
    words += _gaps(content) if name == NAIVE_BYTES else ()
    return BenchFile(
        name=name,
        path=path,
        records=tuple(kept),
        notes=tuple(f"{path or name}: {each}" for each in words),
        ffn_group_size=_whole(size),
        layers=_whole(layers),
        **texts,
    )


def _counted(content: Mapping[str, Any]) -> list[Any]:
    """Return the records of the profiler's counters, each with what their file says once of all of them."""
    said = {fact: content[fact] for fact in ("group_size", "active", "backend") if fact in content}
    return [{**said, **each} if isinstance(each, dict) else each for each in content["records"]]


def _gaps(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words what the profiler's counters say that they lack."""
    lacking = content.get("left_out")
    names = [each for each in lacking if _text(each)] if isinstance(lacking, list) else []
    if names:
        yield f"no record of {', '.join(names)}"
    if content.get("complete") is False:
        yield "the profiler did not finish cleanly, so that kernels may be missing"


def _whole(value: Any) -> int | None:
    return int(value) if _positive(value) else None


def _checked(name: str, record: object, faults: Counter[str]) -> Record | None:
    """Return a record with the fields that fit, None where it cannot be drawn; what is amiss is counted in words."""
    if not isinstance(record, dict):
        faults["left out, without any fields"] += 1
        return None
    if not _is_point(name, record):
        return None
    needed = _NEEDED[name]
    if name == ATTENTION and _race(record.get("race")):
        decoding = record["race"].startswith(DECODE_GROUPS)
        # The length of a text, or rows of a product.
        size = "length" if record.get("num_rows") is None else "num_rows"
        needed = {**needed, **(_SWEEP_OF_GROUPS if decoding else {size: _positive})}
    lacking = [field for field, fits in needed.items() if not fits(record.get(field))]
    if lacking:
        faults[f"left out, without a usable {', '.join(map(repr, lacking))}"] += 1
        return None
    wrong = [field for field, fits in _OTHERS[name].items() if field in record and not fits(record[field])]
    faults.update(f"drawn without {field!r}, which is unusable" for field in wrong if record[field] is not None)
    return {key: value for key, value in record.items() if key not in wrong}


def _is_point(name: str, record: Record) -> bool:
    """Return whether a record should be drawn: it was timed, and is not about the reordering alone."""
    if name in (NAIVE, NAIVE_BYTES):
        return True
    if name == OPERATORS and str(record.get("sweep", "")).startswith(REORDER):
        return False
    return _TIME in record or any(field in record for field in _TIMED)
