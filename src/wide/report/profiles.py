"""What the benches measured, read from their JSON files and brought into one form."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wide.errors import DataError
from wide.records import STUDY, Cell, read_lines
from wide.report.figure import Origin

OPERATORS, ATTENTION, END_TO_END = "operators.json", "attention.json", "endtoend.json"
NAIVE, DEPTH = "naive.json", "depth.json"
BENCH_FILES = (OPERATORS, ATTENTION, END_TO_END, NAIVE, DEPTH)
"""Names of the files that benches write."""
OWN = ("own routing", "pruned")
"""What a pruned model itself is called among the candidates: its routers deciding, or what a static plan left."""
OUTSIDE = "embedding and head"
"""The part of a forward that is outside its layers."""
DECODE_GROUPS = "decode_groups"
"""How races of decode attention over the size of groups begin."""
_PLACES = (".", "profile", "bench", "bench/coarse")
# Only these candidates of the prefill attention are charged with the reordering that they need.
_CHARGED = "reorder charged"
_NOT_OURS = ("dense", "operator, nothing skipped")
# What the name of a candidate gives away where its record does not say which backend it is.
_BACKENDS = {"cuda": "CUDA C++", "gluon": "Gluon", "hopper": "Gluon", "triton": "Triton"}
_EVEN = 0.01
_NOT_TIMED = "not timed"
Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPoint:
    """The fastest way of one operator at one size, beside the dense peer.

    Args:
        operator: Name, e.g. 'gate_up'.
        device: Name of the GPU.
        group_size: Channels of a group; None where the operator has no choice of it.
        batch: Sequences of a decode step; None elsewhere.
        tokens: Rows of a product, or length of the text for attention.
        active: Share of (token, group) pairs that execute.
        candidate: Which variant was the fastest.
        median_us: Its time, microseconds.
        dense_us: Time of the dense peer, microseconds.
        ideal: Speed-up if only executing pairs took time.
        backend: What the kernel is written in.
    """

    operator: str
    device: str
    group_size: int | None
    batch: int | None
    tokens: int
    active: float
    candidate: str
    median_us: float
    dense_us: float
    ideal: float
    backend: str

    @property
    def speedup(self) -> float:
        """Time of the dense peer over ours."""
        return self.dense_us / self.median_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One candidate of the end-to-end bench.

    Args:
        device: Name of the GPU.
        model: Name of the model or of the shape with random weights.
        adapter: Folder of its routers, empty where they are random.
        checkpoint: Folder of a materialised model that was timed, empty where there is none.
        method: Which method made the adapter.
        group_size: Channels of an FFN group.
        layers: Of the model; None where it is not known.
        what: 'prefill' or 'decode'.
        tokens: Tokens of the prompt, or cached before the step.
        batch: Sequences.
        candidate: Name, e.g. 'dense', 'routed 0.5/0.5', 'own routing'.
        median_us: Time, microseconds.
        speedup: Time of the dense candidate over this one's.
        ceiling: Speed-up if routing and what is skipped took no time; None for dense candidates.
        skipped: Shares of attention and FFN that are skipped; None for dense candidates.
        parts: Microseconds by part.
        energy_j: Joules of one call; None where not measured.
        memory_bytes: Most memory held during a call; None where not measured.
    """

    device: str
    model: str
    adapter: str
    checkpoint: str
    method: str
    group_size: int | None
    layers: int | None
    what: str
    tokens: int
    batch: int
    candidate: str
    median_us: float
    speedup: float
    ceiling: float | None = None
    skipped: tuple[float, float] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    energy_j: float | None = None
    memory_bytes: int | None = None

    @property
    def is_variant(self) -> bool:
        """Whether it only explains another candidate."""
        return self.candidate == "all execute" or self.candidate.endswith("all sparse")

    @property
    def layer_us(self) -> float | None:
        """Microseconds of one decoder layer, mean over layers; None where parts or layers are not known."""
        if not self.layers or OUTSIDE not in self.parts:
            return None
        return (self.median_us - self.parts[OUTSIDE]) / self.layers

    @property
    def energy_per_token_j(self) -> float | None:
        """Joules a token of the prompt, or a new token."""
        tokens = self.batch * (self.tokens if self.what == "prefill" else 1)
        return None if self.energy_j is None else self.energy_j / tokens

    @property
    def mean_skipped(self) -> float | None:
        """Mean of the skipped shares of attention and FFN."""
        return None if self.skipped is None else sum(self.skipped) / 2

    @property
    def is_even(self) -> bool:
        """Whether attention and FFN skip the same share."""
        return self.skipped is not None and abs(self.skipped[0] - self.skipped[1]) < _EVEN

    @property
    def shape(self) -> str:
        """The shape in words."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        length = f"{self.tokens} tokens" if self.what == "prefill" else f"{self.tokens} cached"
        return f"{self.what}, {length}{batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFile:
    """The file that one bench wrote.

    Args:
        name: One of `BENCH_FILES`.
        path: Where it lies.
        content: What it says of the measurement.
        records: Those that were timed, and those of naive products that were only accounted.
        notes: What was left out, in words.
    """

    name: str
    path: str
    content: Fields
    records: tuple[Fields, ...]
    notes: tuple[str, ...]

    def text(self, fact: str) -> str:
        """Return what the file says of its measurement, e.g. 'device', 'date', 'command'; empty where it does not."""
        found = self.content.get(fact)
        return found if isinstance(found, str) else ""


class Profile:
    """All bench records of one or several folders.

    Args:
        files: What benches measured, in their order: of equal measurements the latest file counts.
    """

    def __init__(self, files: Sequence[BenchFile]) -> None:
        """Keep the files."""
        self.files = tuple(files)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.files)

    def __add__(self, other: "Profile") -> "Profile":
        """Return the records of both."""
        return Profile((*self.files, *other.files))

    @property
    def notes(self) -> list[str]:
        """What was left out of the files, in words."""
        return [note for file in self.files for note in file.notes]

    @property
    def origins(self) -> list[Origin]:
        """The files, with what they say of their measurement."""
        return [
            Origin(
                path=file.path,
                about=", ".join(filter(None, (file.text("device"), file.text("date")))),
                command=file.text("command"),
                notes=file.notes,
            )
            for file in self.files
        ]

    def holds(self, *names: str) -> bool:
        """Return whether there is a file of any of these names."""
        return any(file.name in names for file in self.files)

    def devices(self) -> list[str]:
        """Return what was measured on, each once."""
        return [device for device in dict.fromkeys(file.text("device") for file in self.files) if device]

    def operators(self) -> list[OperatorPoint]:
        """Return the fastest agreeing variant of each operator at each size; of equal sizes the latest file counts."""
        points = [point for file in self._of(OPERATORS, ATTENTION) for point in _races(file)]
        latest = {(p.operator, p.device, p.group_size, p.batch, p.tokens, p.active): p for p in points}
        return list(latest.values())

    def forwards(self) -> list[Forward]:
        """Return the candidates of the end-to-end bench that ran; of equal ones the latest file counts."""
        found = [_forward(record, file) for file in self._of(END_TO_END) for record in file.records]
        keys = ("device", "model", "adapter", "checkpoint", "group_size", "what", "tokens", "batch", "candidate")
        return list({tuple(getattr(forward, key) for key in keys): forward for forward in found}.values())

    def decode_groups(self) -> list[Fields]:
        """Return the timed records of decode attention over the size of groups; of equal ones the latest counts."""
        found = [each for each in self._records(ATTENTION) if each["race"].startswith(DECODE_GROUPS)]
        return _latest(found, "device", "race", "candidate")

    def naive(self) -> list[Fields]:
        """Return the records of naive beside fused products."""
        return self._records(NAIVE)

    def depth(self) -> list[Fields]:
        """Return the timed records of naive dynamic depth taken apart; of equal ones the latest file counts."""
        return _latest(self._records(DEPTH), "device", "rows", "width_in", "width_out", "active", "candidate")

    def _of(self, *names: str) -> list[BenchFile]:
        return [file for file in self.files if file.name in names]

    def _records(self, name: str) -> list[Fields]:
        return [{**record, "device": file.text("device")} for file in self._of(name) for record in file.records]


def read_profile(folder: Path) -> Profile:
    """Return what the benches left in a folder, in its folders 'profile' and 'bench', or in the file of a study there.

    Raises:
        DataError: If a file is not one of a bench.
    """
    kept = read_study(folder / STUDY) if (folder / STUDY).is_file() else {}
    files = [file for (_, cell), profile in kept.items() if cell is None for file in profile.files]
    places = [folder / place / name for place in _PLACES for name in BENCH_FILES]
    return Profile([*files, *(_read(path) for path in places if path.is_file())])


def read_study(path: Path) -> dict[tuple[str, Cell | None], Profile]:
    """Return the profiles in the record file of a study, by run, and by cell where they are of one."""
    found: dict[tuple[str, Cell | None], Profile] = {}
    for line in read_lines(path)[0]:
        if isinstance(line, dict) and line.get("bench") in BENCH_FILES:
            named = line.get("cell")
            key = str(line.get("run", "")), Cell(**named) if named else None
            found[key] = found.get(key, Profile(())) + Profile([bench_file(line["bench"], line, str(path))])
    return found


def _read(path: Path) -> BenchFile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not JSON, perhaps cut while being written; measure again") from error
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise DataError(f"{path} holds no list of records; wanted what wide bench or wide profile writes")
    return bench_file(path.name, content, str(path))


def bench_file(name: str, content: Fields, path: str = "") -> BenchFile:
    """Return the content of a bench's file with the records that can be drawn, and in words what was left out.

    Args:
        name: One of `BENCH_FILES`.
        content: As the bench writes it, with a list of records.
        path: Where it lies.
    """
    check = _CHECKS[name]
    faults: Counter[str] = Counter()
    kept = []
    for record in content["records"]:
        fault = _fault(check, record)
        if not fault:
            kept.append(record)
        elif fault != _NOT_TIMED:
            faults[fault] += 1
    words = [
        f"{path or name}: {count} of {len(content['records'])} records left out, {f}" for f, count in faults.items()
    ]
    return BenchFile(name=name, path=path, content=content, records=tuple(kept), notes=tuple(words))


def _fault(check: Callable[[Fields], Any], record: Any) -> str:
    """Return what keeps a record from being drawn, empty where nothing does."""
    if not isinstance(record, dict):
        return "without any fields"
    try:
        check(record)
    except KeyError as error:
        # What failed or was not asked for has no time; that is no fault.
        return _NOT_TIMED if error.args == ("median_us",) else f"without {error.args[0]!r}"
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        return f"damaged: {error}"
    return ""


def _positive(record: Fields, *names: str) -> None:
    """Refuse a record whose numbers are missing or not above zero."""
    for name in names:
        if isinstance(record[name], bool) or not 0 < record[name] < math.inf:
            raise ValueError(f"{name!r} is {record[name]!r}")


def _check_operator(record: Fields) -> None:
    _positive(record, "median_us")
    group = _group_of(record)
    if not group.startswith("reorder"):
        _positive(record, "active", *(("speedup", "union") if group.startswith(DECODE_GROUPS) else ()))
        _size_of(record)
    if not isinstance(record["candidate"], str):
        raise ValueError(f"'candidate' is {record['candidate']!r}")


def _check_naive(record: Fields) -> None:
    _positive(record, "size")
    if record["axis"] not in ("M", "N", "K") or not isinstance(record["candidate"], str):
        raise ValueError(f"of axis {record['axis']!r}")
    for name in ("accounted_traffic_bytes", "accounted_storage_bytes", "peak_memory_bytes", "active_tflops"):
        if name == "accounted_traffic_bytes" or record.get(name) is not None:
            float(record[name] + 0.0)


def _check_depth(record: Fields) -> None:
    _positive(record, "median_us", "speedup", "rows", "width_in", "width_out", "active")
    sum(map(float, record["parts_us"].values()))


_CHECKS: dict[str, Callable[[Fields], Any]] = {
    OPERATORS: _check_operator,
    ATTENTION: _check_operator,
    END_TO_END: lambda record: _forward(record, None),
    NAIVE: _check_naive,
    DEPTH: _check_depth,
}


def _latest(records: Sequence[Fields], *keys: str) -> list[Fields]:
    return list({tuple(record[key] for key in keys): record for record in records}.values())


def _group_of(record: Fields) -> str:
    group = record["sweep"] if "sweep" in record else record["race"]
    if not isinstance(group, str) or not group.strip():
        raise ValueError(f"of sweep or race {group!r}")
    return group


def _size_of(record: Fields) -> int:
    return int(record.get("num_rows") or record["length"])


def _races(file: BenchFile) -> Iterator[OperatorPoint]:
    """Yield the fastest of each sweep or race: one operator at one size, with the dense peer among the candidates."""
    races: dict[str, list[Fields]] = {}
    for record in file.records:
        group = _group_of(record)
        if not group.startswith((DECODE_GROUPS, "reorder")):
            races.setdefault(group, []).append(record)
    for name, records in races.items():
        peer = records[0].get("peer", "dense")
        dense = [record for record in records if record["candidate"] == peer]
        ours = [record for record in records if not record["candidate"].startswith(_NOT_OURS)]
        charged = [record for record in ours if record["candidate"].endswith(_CHARGED)]
        # Where records say which tile ships, its time is quoted, not that of the fastest that was tried.
        ours = charged or [record for record in ours if record.get("shipped")] or ours
        if not dense or not ours:
            continue
        best = min(ours, key=lambda record: float(record["median_us"]))
        first, *others = name.split()
        operator = first if file.name == OPERATORS else f"gemv {others[0]}" if first == "gemv" else f"{first} attention"
        group_size, batch = best.get("group_size"), best.get("batch")
        yield OperatorPoint(
            operator=operator,
            device=file.text("device"),
            group_size=None if group_size is None else int(group_size),
            batch=None if batch is None else int(batch),
            tokens=_size_of(best),
            active=float(best["active"]),
            candidate=best["candidate"],
            median_us=float(best["median_us"]),
            dense_us=float(dense[0]["median_us"]),
            # A weight is read if any of the rows executes it.
            ideal=1.0 / float(best.get("union", best["active"])),
            backend=_backend(best),
        )


def _backend(record: Fields) -> str:
    choice = record.get("choice")
    named = choice.get("backend") if isinstance(choice, dict) else None
    if not named:
        named = next((word for word in _BACKENDS if word in record["candidate"]), "triton")
    return _BACKENDS.get(named, str(named))


def _forward(record: Fields, file: BenchFile | None) -> Forward:
    _positive(record, "median_us", "speedup", "tokens", "batch")
    if record["what"] not in ("prefill", "decode") or not isinstance(record["candidate"], str):
        raise ValueError(f"of what {record['what']!r}")
    skipped = record.get("skipped")
    size, layers = (file.content.get(name) if file else None for name in ("ffn_group_size", "layers"))
    texts = {name: file.text(name) if file else "" for name in ("device", "model", "adapter", "checkpoint", "method")}
    return Forward(
        group_size=int(size) if size else None,
        layers=int(layers) if layers else None,
        what=record["what"],
        tokens=int(record["tokens"]),
        batch=int(record["batch"]),
        candidate=record["candidate"],
        median_us=float(record["median_us"]),
        speedup=float(record["speedup"]),
        ceiling=record.get("ceiling"),
        skipped=None if skipped is None else (float(skipped["attention"]), float(skipped["ffn"])),
        parts=dict(record.get("breakdown_us") or {}),
        energy_j=record.get("energy_j"),
        memory_bytes=record.get("peak_memory_bytes"),
        **texts,
    )
