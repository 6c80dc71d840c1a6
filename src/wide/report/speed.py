"""What `wide bench` and `wide profile` measured, as rows of values, and the figures of it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.report.figure import Row, figures, grouped
from wide.report.table import Table

OPERATORS, ATTENTION, END_TO_END, BREAKDOWN = "operators.json", "attention.json", "endtoend.json", "breakdown.json"
BENCH_FILES = (OPERATORS, ATTENTION, END_TO_END, BREAKDOWN, "naive.json", "depth.json", "glue.json")
"""Names of the files that benches write; of those after the first four the page shows the records as a table."""
# Only these candidates of the prefill attention are charged with the reordering that they need.
_CHARGED = "reorder charged"
_NOT_OURS = ("dense", "operator, nothing skipped")
# What equal measurements share.
_OPERATOR = ("operator", "device", "group_size", "batch", "tokens", "active")
_FORWARD = ("device", "model", "adapter", "checkpoint", "group_size", "what", "call", "tokens", "batch", "candidate")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFile:
    """What one file of a bench holds: device and date, the command, what was left out in words, and rows."""

    name: str
    path: str
    about: str
    command: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """What benches measured: of equal measurements that of the last file counts."""

    files: tuple[BenchFile, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What was left out of the files, in words."""
        return [note for file in self.files for note in file.notes]

    def operators(self) -> list[Row]:
        """Return the fastest variant of each operator at each size, beside its dense peer."""
        return self._latest((OPERATORS, ATTENTION), _OPERATOR)

    def forwards(self) -> list[Row]:
        """Return the candidates of whole models that ran."""
        return self._latest((END_TO_END,), _FORWARD)

    def parts(self) -> list[Row]:
        """Return the parts of layers."""
        return self._latest((BREAKDOWN,), ("device", "call", "candidate", "part"))

    def others(self) -> dict[str, Table]:
        """Return the records of benches without a figure, such as those of naive products, by the file's name."""
        files = grouped((file for file in self.files if file.name not in BENCH_FILES[:4]), key=lambda file: file.name)
        rows = {name: [row for file in found for row in file.rows] for name, found in files.items()}
        return {name: Table.of_rows(found) for name, found in rows.items() if found}

    def _latest(self, names: Sequence[str], key: Sequence[str]) -> list[Row]:
        rows = (row for file in self.files if file.name in names for row in file.rows)
        return list({tuple(row[name] for name in key): row for row in rows}.values())


def is_own(forward: Row) -> bool:
    """Return whether a pruned model itself was timed: its routers deciding, or what a static plan left."""
    return forward["candidate"] in ("own routing", "pruned") and forward["speedup"] is not None


def bench_file(name: str, content: Mapping[str, Any], path: str = "") -> BenchFile:
    """Return the content of a bench's file with the records that can be drawn, and in words what was left out.

    `name` is one of `BENCH_FILES`; `content` is what the bench writes, with a list of records.
    """
    head = {key: value for key, value in content.items() if isinstance(value, str | int)}
    read = {OPERATORS: _timed, ATTENTION: _timed, END_TO_END: _forward, BREAKDOWN: _part}.get(name, _as_row)
    faults: Counter[str] = Counter()
    rows: list[Row] = []
    records = [record for kind in ("records", "first_tokens", "batched") for record in content.get(kind) or ()]
    for record in records:
        try:
            rows.append(read(record, head))
        except KeyError as error:
            # What failed or was not asked for has no time; that is no fault.
            if error.args != ("median_us",):
                faults[f"without {error.args[0]!r}"] += 1
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            faults[f"damaged: {error}"] += 1
    device, date, command = (str(head.get(fact, "")) for fact in ("device", "date", "command"))
    return BenchFile(
        name=name,
        path=path,
        about=", ".join(filter(None, (device, date))),
        command=command,
        notes=tuple(f"{path or name}: {n} of {len(records)} records left out, {f}" for f, n in faults.items()),
        rows=tuple(_races(rows) if read is _timed else rows),
    )


def _positive(record: Row, name: str) -> float:
    value = float(record[name])
    if isinstance(record[name], bool) or not 0 < value < math.inf:
        raise ValueError(f"{name!r} is {record[name]!r}")
    return value


def _text(record: Row, name: str) -> str:
    if not isinstance(record[name], str) or not record[name].strip():
        raise ValueError(f"{name!r} is {record[name]!r}")
    return str(record[name])


def _optional(record: Row, *names: str) -> float | None:
    value: Any = record
    for name in names:
        value = (value or {}).get(name)
    return None if value is None else float(value)


def _whole(record: Row, name: str) -> int | None:
    value = _optional(record, name)
    return None if value is None else int(value)


def _forward(record: Row, head: Row) -> Row:
    """Return one candidate at one size.

    Tokens are those of the prompt, or cached before the step; speed-ups are over the dense model in the same engine,
    and as transformers runs it.
    """
    if record["what"] == "generate_batch":
        # The time in which each request gets a token, prompts included.
        time = 1e6 * record["requests"] / _positive(record, "tokens_per_s")
        step = {"tokens": record["prompt"], "batch": record["requests"], "median_us": time}
        record = {**record, **step}
    weights = "" if head.get("weights") == "model" else str(head.get("weights", ""))
    return {
        **{name: str(head.get(name) or "") for name in ("device", "model", "adapter", "checkpoint", "method")},
        "group_size": _whole(head, "ffn_group_size") or None,
        "what": _text(record, "what"),
        "call": ", ".join(filter(None, (str(record.get("runtime", "")), weights))),
        "tokens": int(_positive(record, "tokens")),
        "batch": int(_positive(record, "batch")),
        "candidate": _text(record, "candidate"),
        "median_us": _positive(record, "median_us"),
        "speedup": _positive(record, "speedup") if "speedup" in record else None,
        "speedup_as_loaded": _optional(record, "speedup_as_loaded"),
        "skipped_attention": _optional(record, "skipped", "attention"),
        "skipped_ffn": _optional(record, "skipped", "ffn"),
        "memory_bytes": _whole(record, "peak_memory_bytes") or None,
    }


def _as_row(record: Row, head: Row) -> Row:
    device = {"device": str(head.get("device", ""))}
    return device | {key: value for key, value in record.items() if isinstance(value, str | int | float)}


def _part(record: Row, head: Row) -> Row:
    call = f"{_text(record, 'what')}, {int(_positive(record, 'tokens'))} tokens, G = {head['ffn_group_size']}"
    named = {name: _text(record, name) for name in ("candidate", "part")}
    us = 0.0 if record["us"] == 0 else _positive(record, "us")
    return {"device": str(head.get("device", "")), "call": f"{call}, {head['skipped']} skipped", **named, "us": us}


def _timed(record: Row, head: Row) -> Row:
    group = _text(record, "sweep" if "sweep" in record else "race")
    row = {"group": group, "candidate": _text(record, "candidate"), "median_us": _positive(record, "median_us")}
    if group.startswith("reorder"):
        return row
    return row | {
        "device": str(head.get("device", "")),
        "peer": record.get("peer", "dense"),
        "shipped": bool(record.get("shipped")),
        "group_size": _whole(record, "group_size"),
        "batch": _whole(record, "batch"),
        "tokens": int(_positive(record, "num_rows" if record.get("num_rows") else "length")),
        "active": _positive(record, "active"),
        # A weight is read if any of the rows executes it, a cache if any head of its group does.
        "ideal_speedup": 1.0 / _positive(record, "union" if "union" in record else "active"),
    }


def _races(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the fastest of each sweep or race: one operator at one size, with the dense peer among the candidates."""
    races = grouped((row for row in rows if not row["group"].startswith("reorder")), lambda row: row["group"])
    for name, found in races.items():
        dense = [row for row in found if row["candidate"] == row["peer"]]
        ours = [row for row in found if not row["candidate"].startswith(_NOT_OURS)]
        charged = [row for row in ours if row["candidate"].endswith(_CHARGED)]
        # Where records say which tile ships, its time is quoted, not that of the fastest that was tried.
        ours = charged or [row for row in ours if row["shipped"]] or ours
        if not dense or not ours:
            continue
        best = min(ours, key=lambda row: float(row["median_us"]))
        first, *others = name.split()
        operator = {"decode_groups": "decode"}.get(first, first)
        if first == "gemv":
            operator = " ".join((first, *others[:1]))
        elif operator in ("prefill", "decode"):
            operator = f"{operator} attention"
        names = ("device", "group_size", "batch", "tokens", "active", "candidate", "median_us", "ideal_speedup")
        dense_us = float(dense[0]["median_us"])
        times = {"dense_us": dense_us, "speedup": dense_us / best["median_us"]}
        yield {"operator": operator, **{name: best[name] for name in names}, **times}


def _operator_rows(profile: Profile) -> list[Row]:
    points = sorted(profile.operators(), key=lambda point: point["tokens"])
    several = len({point["device"] for point in points}) > 1

    def line(point: Row) -> str:
        size = {"G": point["group_size"], "B": point["batch"]}
        words = [f"{100 * (1 - point['active']):.4g} % skipped"]
        words += [f"{name} {number}" for name, number in size.items() if number is not None]
        return ", ".join([*words, *([point["device"]] if several else [])])

    lines = grouped(points, lambda point: (point["operator"], line(point)))
    # Where an operator has lines over several sizes, single points are in the values only.
    long = {operator for (operator, _), found in lines.items() if len(found) > 1}
    return [
        {"line": line, **point, "drawn": point["speedup"] if len(found) > 1 or operator not in long else None}
        for (operator, line), found in sorted(lines.items(), key=lambda entry: str(entry[0]))
        for point in found
    ]


def _forward_rows(profile: Profile) -> list[Row]:
    points = sorted(profile.forwards(), key=lambda point: (point["tokens"], point["batch"]))
    differs = {name: len({point[name] for point in points}) > 1 for name in ("model", "group_size", "adapter")}
    rows: list[Row] = []
    for point in points:
        has_size = differs["group_size"] and point["group_size"] and point["candidate"] != "dense"
        size = f"G {point['group_size']}" if has_size else ""
        run = Path(point["adapter"]).parent.name if differs["adapter"] else ""
        model = point["model"] if differs["model"] else ""
        rows.append(
            {
                "panel": ", ".join(filter(None, (model, point["what"], point["call"]))),
                "line": ", ".join(filter(None, (point["candidate"], size, run))),
                "size": f"{point['tokens']}{'' if point['batch'] == 1 else ' x ' + str(point['batch'])}",
                **point,
                # The dense candidate is the line at 1.
                "drawn": None if point["candidate"] == "dense" else point["speedup"],
            }
        )
    return rows


SPEED_FIGURES = figures("speed", {"end-to-end": _forward_rows, "parts": Profile.parts, "operators": _operator_rows})
"""Figures of whole models, of the parts of their layers, and of operators."""
