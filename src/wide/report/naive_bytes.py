"""The traffic of pruned products that the profiler's counters measured, joined with the bench's records of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wide.report.bench_files import NAIVE, NAIVE_BYTES, BenchFile, Record

READ, WRITTEN, TRAFFIC = "measured_read_bytes", "measured_written_bytes", "measured_traffic_bytes"
"""Bytes that came from memory, that went to it, and both: all kernels of a way, each with cold caches."""
L2 = "measured_l2_bytes"
"""Bytes that the kernels asked of the second-level cache."""
RATIO = "measured_over_accounted"
"""Measured traffic through memory over the accounted one."""
MEASURED = (READ, WRITTEN, TRAFFIC, RATIO, L2)
"""What `with_measured` adds to a record."""
# What benchmarks/counters.py --naive ran before its files said it.
_RAN: Record = {"group_size": 128, "active": 0.5, "backend": "triton"}
# Of fused products, before the bench said it.
_BACKEND = "triton"


def with_measured(records: Sequence[Record], counted: Sequence[Record]) -> list[Record]:
    """Return the bench's records, those whose traffic was measured with the fields of `MEASURED` that are known.

    A count belongs to the product of its axis, size and way in a file of the same folder, if that is the problem and
    the backend which are counted, and both files do not name different devices. Of equal counts the last one holds.

    Args:
        records: Of the bench, each with its 'file' and 'device', which is empty where it is not known.
        counted: Of the profiler, likewise.
    """
    counts = {_key(each): {**_RAN, **each} for each in counted}
    return [{**each, **_measured(each, counts.get(_key(each)))} for each in records]


def of_other_devices(files: Sequence[BenchFile]) -> Iterator[str]:
    """Yield a sentence for each file of counters that `with_measured` leaves out because of its device."""
    devices = {Path(file.path).parent: file.device for file in files if file.name == NAIVE}
    for file in files:
        device = devices.get(Path(file.path).parent, "")
        if file.name == NAIVE_BYTES and _differ(file.device, device):
            yield f"Left out: {file.path}, counted on {file.device}, while these products ran on {device}."


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


def _key(record: Record) -> tuple[Any, ...]:
    return Path(record["file"]).parent, record["axis"], record["size"], record["candidate"]


def _measured(record: Record, count: Record | None) -> Mapping[str, float]:
    if count is None or _differ(record["device"], count["device"]) or not _is_counted(record, count):
        return {}
    traffic, accounted = count["dram_read_bytes"] + count["dram_written_bytes"], record["accounted_traffic_bytes"]
    found = {READ: count["dram_read_bytes"], WRITTEN: count["dram_written_bytes"], TRAFFIC: traffic}
    found |= {RATIO: traffic / accounted} if accounted > 0 else {}
    return found | ({L2: count["l2_bytes"]} if "l2_bytes" in count else {})


def _is_counted(record: Record, count: Record) -> bool:
    """Return whether a record is of the problem and, where fused, of the backend that are counted."""
    active, of_tokens = record.get("active"), record["axis"] == "M"
    if active is None or not (of_tokens or record.get("group_size") == count["group_size"]):
        return False
    if record["candidate"] == "fused" and record.get("backend", _BACKEND) != count["backend"]:
        return False
    # The bench keeps whole rows, or whole groups and one at least; its 'active' is the share of those kept.
    units = record["size"] / (1 if of_tokens else count["group_size"])
    return round(active * units) == max(1, round(count["active"] * units))
