"""The traffic of pruned products that the profiler's counters measured, joined with the bench's records of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wide.report.bench_files import Record

READ, WRITTEN, TRAFFIC = "measured_read_bytes", "measured_written_bytes", "measured_traffic_bytes"
"""Bytes that came from memory, that went to it, and both: all kernels of a way, each with cold caches."""
L2 = "measured_l2_bytes"
"""Bytes that the kernels asked of the second-level cache."""
RATIO = "measured_over_accounted"
"""Measured traffic through memory over the accounted one."""
MEASURED = (READ, WRITTEN, TRAFFIC, RATIO, L2)
"""What `with_measured` adds to a record."""
# What tools/counters.py --naive runs, which its records do not say.
_GROUP, _ACTIVE, _BACKEND = 128, 0.5, "triton"


def with_measured(records: Sequence[Record], counted: Sequence[Record]) -> list[Record]:
    """Return the bench's records, those whose traffic was measured with the fields of `MEASURED` that are known.

    A count belongs to the product of its axis, size and way in a file of the same folder, if that is the problem and
    the backend which are counted. Of equal counts the last one holds.

    Args:
        records: Of the bench, each with its 'file'.
        counted: Of the profiler, each with its 'file'.
    """
    counts = {_key(each): each for each in counted}
    return [{**each, **_measured(each, counts.get(_key(each)))} for each in records]


def _key(record: Record) -> tuple[Any, ...]:
    return Path(record["file"]).parent, record["axis"], record["size"], record["candidate"]


def _measured(record: Record, count: Record | None) -> Mapping[str, float]:
    if count is None or not _is_counted(record):
        return {}
    traffic, accounted = count["dram_read_bytes"] + count["dram_written_bytes"], record["accounted_traffic_bytes"]
    found = {READ: count["dram_read_bytes"], WRITTEN: count["dram_written_bytes"], TRAFFIC: traffic}
    found |= {RATIO: traffic / accounted} if accounted > 0 else {}
    return found | ({L2: count["l2_bytes"]} if "l2_bytes" in count else {})


def _is_counted(record: Record) -> bool:
    """Return whether a record is of the problem and of the backend that are counted."""
    active, of_tokens = record.get("active"), record["axis"] == "M"
    if active is None or record.get("backend", _BACKEND) != _BACKEND:
        return False
    # Half of the rows or of the groups, rounded to whole ones.
    whole = 1 if of_tokens else _GROUP
    return (of_tokens or record.get("group_size") == _GROUP) and abs(active - _ACTIVE) * record["size"] <= whole / 2
