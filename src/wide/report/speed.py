"""What `wide bench` and `wide profile` measured, read from their JSON files, and the figures of it."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wide.errors import DataError
from wide.records import STUDY, Cell, read_lines
from wide.report.figure import Figure, Origin, Row, Value, required
from wide.report.table import Table

OPERATORS, ATTENTION, END_TO_END = "operators.json", "attention.json", "endtoend.json"
BENCH_FILES = (OPERATORS, ATTENTION, END_TO_END, "naive.json", "depth.json", "glue.json")
"""Names of the files that benches write; of those after the first three the page shows the records as a table."""
_PLACES = (".", "coarse", "profile", "bench", "bench/coarse")
# Only these candidates of the prefill attention are charged with the reordering that they need.
_CHARGED = "reorder charged"
_NOT_OURS = ("dense", "operator, nothing skipped")
Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One candidate of a profile at one size.

    Args:
        device: Name of the GPU.
        model: Name of the model or of the shape with random weights.
        adapter: Folder of its routers, empty where they are random.
        checkpoint: Folder of a materialised model that was timed, empty where there is none.
        method: Which method made the adapter.
        group_size: Channels of an FFN group; None where it is not known.
        what: 'prefill', 'first token', 'decode' or 'generate_batch'.
        door: What was called, e.g. 'generate()'; empty where it is not known.
        tokens: Tokens of the prompt, or cached before the step.
        batch: Sequences.
        candidate: Name, e.g. 'dense', 'as loaded', 'own routing'.
        median_us: Time, of a step where it is not of a prompt, microseconds.
        speedup: Over the dense candidate; None where that was not timed.
        speedup_as_loaded: Over the dense model as transformers runs it; None where that was not timed.
        skipped_attention: Share of attention that is skipped; None where it is not known.
        skipped_ffn: Share of the FFN that is skipped; None where it is not known.
        energy_j: Joules of one call; None where not measured.
        memory_bytes: Most memory held during a call; None where not measured.
    """

    device: str
    model: str
    adapter: str
    checkpoint: str
    method: str
    group_size: int | None
    what: str
    door: str
    tokens: int
    batch: int
    candidate: str
    median_us: float
    speedup: float | None
    speedup_as_loaded: float | None
    skipped_attention: float | None
    skipped_ffn: float | None
    energy_j: float | None
    memory_bytes: int | None

    @property
    def key(self) -> tuple[Any, ...]:
        """What equal measurements share."""
        model = self.device, self.model, self.adapter, self.checkpoint, self.group_size
        return *model, self.what, self.door, self.tokens, self.batch, self.candidate

    @property
    def is_own(self) -> bool:
        """Whether a pruned model itself was timed: its routers deciding, or what a static plan left."""
        return self.candidate in ("own routing", "pruned") and self.speedup is not None

    @property
    def shape(self) -> str:
        """What was timed and its size, in words."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        return f"{self.what}, {self.tokens} {'cached' if self.what == 'decode' else 'tokens'}{batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFile:
    """What one file of a bench holds: its name and place, and its points, or its records as they are."""

    name: str
    origin: Origin
    operators: tuple[Row, ...] = ()
    forwards: tuple[Forward, ...] = ()
    others: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """What benches measured: of equal measurements that of the last file counts."""

    files: tuple[BenchFile, ...] = ()

    @property
    def origins(self) -> list[Origin]:
        """The files, with what they say of their measurement."""
        return [file.origin for file in self.files]

    @property
    def notes(self) -> list[str]:
        """What was left out of the files, in words."""
        return [note for origin in self.origins for note in origin.notes]

    def operators(self) -> list[Row]:
        """Return the fastest variant of each operator at each size, beside its dense peer."""
        keys = ("operator", "device", "group_size", "batch", "tokens", "active")
        points = (point for file in self.files for point in file.operators)
        return list({tuple(point[key] for key in keys): point for point in points}.values())

    def forwards(self) -> list[Forward]:
        """Return the candidates of whole models that ran."""
        return list({point.key: point for file in self.files for point in file.forwards}.values())


def read_profile(folder: Path) -> Profile:
    """Return what benches left in a folder, in those that they make in it, or in the file of a study there.

    Raises:
        DataError: If a file is not one of a bench.
    """
    kept = read_study(folder / STUDY) if (folder / STUDY).is_file() else {}
    files = [file for (_, cell), profile in kept.items() if cell is None for file in profile.files]
    for path in (folder / place / name for place in _PLACES for name in BENCH_FILES):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path} is not JSON, perhaps cut while being written; measure again") from error
            if not isinstance(content, dict) or not isinstance(content.get("records"), list):
                raise DataError(f"{path} holds no list of records; wanted what wide bench or wide profile writes")
            files.append(bench_file(path.name, content, str(path)))
    return Profile(tuple(files))


def read_study(path: Path) -> dict[tuple[str, Cell | None], Profile]:
    """Return the profiles in the record file of a study, by run, and by cell where they are of one."""
    found: dict[tuple[str, Cell | None], Profile] = {}
    for line in read_lines(path)[0]:
        if isinstance(line, dict) and line.get("bench") in BENCH_FILES:
            key = str(line.get("run", "")), Cell(**line["cell"]) if line.get("cell") else None
            file = bench_file(line["bench"], line, str(path))
            found[key] = Profile((*found.get(key, Profile()).files, file))
    return found


def bench_file(name: str, content: Fields, path: str = "") -> BenchFile:
    """Return the content of a bench's file with the records that can be drawn, and in words what was left out.

    Args:
        name: One of `BENCH_FILES`.
        content: As the bench writes it, with a list of records.
        path: Where it lies.
    """
    head = {key: value for key, value in content.items() if isinstance(value, str | int)}
    read: Callable[[Any, Fields], Any] = _forward if name == END_TO_END else _timed
    if name not in (OPERATORS, ATTENTION, END_TO_END):
        read = _as_row
    faults: Counter[str] = Counter()
    found = []
    records = [record for kind in ("records", "first_tokens", "batched") for record in content.get(kind) or ()]
    for record in records:
        try:
            found.append(read(record, head))
        except KeyError as error:
            # What failed or was not asked for has no time; that is no fault.
            if error.args != ("median_us",):
                faults[f"without {error.args[0]!r}"] += 1
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            faults[f"damaged: {error}"] += 1
    device, date, command = (str(head.get(fact, "")) for fact in ("device", "date", "command"))
    origin = Origin(
        path=path,
        about=", ".join(filter(None, (device, date))),
        command=command,
        notes=[f"{path or name}: {n} of {len(records)} records left out, {f}" for f, n in faults.items()],
    )
    if read is _timed:
        return BenchFile(name=name, origin=origin, operators=tuple(_races(found, device)))
    return BenchFile(name=name, origin=origin, **{"forwards" if read is _forward else "others": tuple(found)})


def _positive(record: Fields, name: str) -> float:
    value = float(record[name])
    if isinstance(record[name], bool) or not 0 < value < math.inf:
        raise ValueError(f"{name!r} is {record[name]!r}")
    return value


def _text(record: Fields, name: str) -> str:
    if not isinstance(record[name], str) or not record[name].strip():
        raise ValueError(f"{name!r} is {record[name]!r}")
    return str(record[name])


def _optional(record: Fields, *names: str) -> float | None:
    """Return a number inside mappings, None where there is none."""
    value: Any = record
    for name in names:
        value = (value or {}).get(name)
    return None if value is None else float(value)


def _forward(record: Fields, head: Fields) -> Forward:
    if record["what"] == "generate_batch":
        step = {"tokens": record["prompt"], "batch": record["requests"], "median_us": 1e3 * record["step_ms"]}
        record = {**record, **step}
    size, memory = _optional(head, "ffn_group_size"), _optional(record, "peak_memory_bytes")
    return Forward(
        **{name: str(head.get(name) or "") for name in ("device", "model", "adapter", "checkpoint", "method")},
        group_size=int(size) if size else None,
        what=_text(record, "what"),
        door=str(record.get("runtime", "")),
        tokens=int(_positive(record, "tokens")),
        batch=int(_positive(record, "batch")),
        candidate=_text(record, "candidate"),
        median_us=_positive(record, "median_us"),
        speedup=_positive(record, "speedup") if "speedup" in record else None,
        speedup_as_loaded=_optional(record, "speedup_as_loaded"),
        skipped_attention=_optional(record, "skipped", "attention"),
        skipped_ffn=_optional(record, "skipped", "ffn"),
        energy_j=_optional(record, "energy_j"),
        memory_bytes=int(memory) if memory else None,
    )


def _as_row(record: Fields, head: Fields) -> Row:
    device = {"device": str(head.get("device", ""))}
    return device | {key: value for key, value in record.items() if isinstance(value, str | int | float)}


def _timed(record: Fields, _head: Fields) -> Fields:
    """Return a record of a race with what all of them must have."""
    group = _text(record, "sweep" if "sweep" in record else "race")
    facts = {"group": group, "candidate": _text(record, "candidate"), "median_us": _positive(record, "median_us")}
    if group.startswith("reorder"):
        return facts
    size = "num_rows" if record.get("num_rows") else "length"
    ideal = 1.0 / _positive(record, "union" if "union" in record else "active")
    number = {name: _optional(record, name) for name in ("group_size", "batch")}
    sizes = {name: None if value is None else int(value) for name, value in number.items()}
    sizes |= {"tokens": int(_positive(record, size))}
    # A weight is read if any of the rows executes it, a cache if any head of its group does.
    more = {"peer": record.get("peer", "dense"), "shipped": bool(record.get("shipped")), "ideal_speedup": ideal}
    return facts | sizes | more | {"active": _positive(record, "active")}


def _races(records: Sequence[Fields], device: str) -> Iterator[Row]:
    """Yield the fastest of each sweep or race: one operator at one size, with the dense peer among the candidates."""
    races: dict[str, list[Fields]] = {}
    for record in records:
        if not record["group"].startswith("reorder"):
            races.setdefault(record["group"], []).append(record)
    for name, found in races.items():
        dense = [record for record in found if record["candidate"] == record["peer"]]
        ours = [record for record in found if not record["candidate"].startswith(_NOT_OURS)]
        charged = [record for record in ours if record["candidate"].endswith(_CHARGED)]
        # Where records say which tile ships, its time is quoted, not that of the fastest that was tried.
        ours = charged or [record for record in ours if record["shipped"]] or ours
        if not dense or not ours:
            continue
        best = min(ours, key=lambda record: float(record["median_us"]))
        first, *others = name.split()
        operator = {"decode_groups": "decode"}.get(first, first)
        if first == "gemv":
            operator = " ".join((first, *others[:1]))
        elif operator in ("prefill", "decode"):
            operator = f"{operator} attention"
        names = ("group_size", "batch", "tokens", "active", "candidate", "median_us", "ideal_speedup")
        dense_us = float(dense[0]["median_us"])
        values: dict[str, Value] = {name: best[name] for name in names}
        times = {"dense_us": dense_us, "speedup": dense_us / best["median_us"]}
        yield {"operator": operator, "device": device, **values, **times}


def _operator_rows(profile: Profile) -> list[Row]:
    points = sorted(profile.operators(), key=lambda point: int(point["tokens"] or 0))
    lines: dict[tuple[Value, str], list[Row]] = {}
    for point in points:
        size = {"G": point["group_size"], "B": point["batch"]}
        words = [f"{100 * (1 - float(point['active'] or 0)):.4g} % skipped"]
        words += [f"{name} {number}" for name, number in size.items() if number is not None]
        words += [str(point["device"])] if len({point["device"] for point in points}) > 1 else []
        lines.setdefault((point["operator"], ", ".join(words)), []).append(point)
    # Where an operator has lines over several sizes, single points are in the values only.
    long = {operator for (operator, _), found in lines.items() if len(found) > 1}
    return [
        {"line": line, **point, "drawn": point["speedup"] if len(found) > 1 or operator not in long else None}
        for (operator, line), found in sorted(lines.items(), key=lambda entry: str(entry[0]))
        for point in found
    ]


def _forward_rows(profile: Profile) -> list[Row]:
    points = profile.forwards()
    facts = {name: len({getattr(each, name) for each in points}) > 1 for name in ("model", "group_size", "adapter")}
    rows: list[Row] = []
    for each in sorted(points, key=lambda point: (point.tokens, point.batch)):
        run = Path(each.adapter).parent.name if facts["adapter"] else ""
        group = f"G {each.group_size}" if facts["group_size"] and each.group_size and each.candidate != "dense" else ""
        new = each.batch * (each.tokens if each.what == "prefill" else 1)
        rows.append(
            {
                "panel": ", ".join(filter(None, (each.model if facts["model"] else "", each.what, each.door))),
                "line": ", ".join(filter(None, (each.candidate, group, run))),
                "size": f"{each.tokens}{'' if each.batch == 1 else f' x {each.batch}'}",
                **asdict(each),
                # Joules of a token of the prompt, or of a new one.
                "energy_per_token_j": None if each.energy_j is None else each.energy_j / new,
                # The dense candidate is the line at 1.
                "drawn": None if each.candidate == "dense" else each.speedup,
            }
        )
    return rows


SPEED_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="end-to-end",
        title="Speed-up of whole models",
        rows=lambda profile: required(
            _forward_rows(profile), f"no candidate that was timed in {END_TO_END}; run wide profile on a GPU"
        ),
        panel="panel",
        x="size",
        y="drawn",
        by="line",
        line_at=1.0,
        x_label="tokens of the prompt or cached before the step; x sequences where there are several",
        y_label="speed-up over dense",
        about="Measured speed-up of whole models over the dense one (black line)",
        columns=2,
        height=4.2,
    ),
    Figure(
        name="operators",
        title="Speed-up of operators",
        rows=lambda profile: required(
            _operator_rows(profile), f"no records of operators ({OPERATORS}, {ATTENTION}); run wide bench on a GPU"
        ),
        panel="operator",
        x="tokens",
        y="drawn",
        by="line",
        ideal="ideal_speedup",
        even=True,
        line_at=1.0,
        x_label="tokens (length of the text for attention); 1k is 1024",
        y_label="speed-up over the dense peer",
        about="Speed-up of the fastest agreeing variant of each operator over its dense peer (black line)",
        columns=3,
        height=2.8,
    ),
)
"""Figures of whole models and of operators."""


def other_tables(profile: Profile) -> dict[str, Table]:
    """Return the records of benches without a figure, such as those of naive products, by the file's name."""
    rows: dict[str, list[Row]] = {}
    for file in profile.files:
        rows.setdefault(file.name, []).extend(file.others)
    return {name: Table.of_rows(found) for name, found in rows.items() if found}
