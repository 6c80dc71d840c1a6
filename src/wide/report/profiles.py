"""What the benches measured, read from their JSON files and brought into one form."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.report.bench_files import (
    ATTENTION,
    BENCH_FILES,
    DECODE_GROUPS,
    DEPTH,
    END_TO_END,
    NAIVE,
    NAIVE_BYTES,
    OPERATORS,
    BenchFile,
    Record,
    bench_file,
    read_bench_file,
)
from wide.report.figure import Origin
from wide.report.naive_bytes import with_measured

OWN = ("own routing", "pruned")
"""What a pruned model itself is called among the candidates: its routers deciding, or what a static plan left."""
OUTSIDE = "embedding and head"
"""The part of a forward that is outside its layers."""
STUDY = "records.jsonl.gz"
"""The one file of records that a study keeps."""
_PLACES = (".", "profile", "bench", "bench/coarse")
# Only these candidates of the prefill attention are charged with the reordering that they need.
_CHARGED = "reorder charged"
_NOT_OURS = ("dense", "operator, nothing skipped")
_EVEN = 0.01
# What the name of a candidate gives away where its record does not say which backend it is.
_BACKENDS = {"cuda": "cuda", "gluon": "gluon", "hopper": "gluon"}


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
        backend: What the kernel is written in: 'triton', 'gluon' or 'cuda'.
        file: Where its record lies.
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
    file: str

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
        group_size: Channels of an FFN group.
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
        method: Which method made the adapter.
        checkpoint: Folder of a materialised model that was timed, empty where there is none.
        file: Where its record lies.
        layers: Of the model; None where it is not known.
    """

    device: str
    model: str
    adapter: str
    group_size: int | None
    what: str
    tokens: int
    batch: int
    candidate: str
    median_us: float
    speedup: float
    ceiling: float | None
    skipped: tuple[float, float] | None
    parts: Mapping[str, float]
    energy_j: float | None = None
    memory_bytes: int | None = None
    method: str = ""
    checkpoint: str = ""
    file: str = ""
    layers: int | None = None

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

    def holds(self, *names: str) -> bool:
        """Return whether there is a file of any of these names."""
        return any(file.name in names for file in self.files)

    def operators(self) -> list[OperatorPoint]:
        """Return the fastest agreeing variant of each operator at each size; of equal sizes the latest file counts."""
        points = [point for file in self._of(OPERATORS) for point in _sweeps(file)]
        points += [point for file in self._of(ATTENTION) for point in _races(file)]
        latest = {(p.operator, p.device, p.group_size, p.batch, p.tokens, p.active): p for p in points}
        return list(latest.values())

    def forwards(self) -> list[Forward]:
        """Return the candidates of the end-to-end bench that ran; of equal ones the latest file counts."""
        found = [forward for file in self._of(END_TO_END) for forward in _forwards(file)]
        keys = ("device", "model", "adapter", "checkpoint", "group_size", "what", "tokens", "batch", "candidate")
        return list({tuple(getattr(forward, key) for key in keys): forward for forward in found}.values())

    def decode_groups(self) -> list[Record]:
        """Return the timed records of decode attention over the size of groups; of equal ones the latest counts."""
        found = [record for record in self._records(ATTENTION) if record["race"].startswith(DECODE_GROUPS)]
        keys = ("device", "race", "candidate")
        return list({tuple(record[key] for key in keys): record for record in found}.values())

    def naive(self) -> list[Record]:
        """Return the records of naive beside fused products, with what was measured of their traffic where it was."""
        return with_measured(self._records(NAIVE), self._records(NAIVE_BYTES))

    def depth(self) -> list[Record]:
        """Return the timed records of naive dynamic depth taken apart; of equal ones the latest file counts."""
        keys = ("device", "rows", "width_in", "width_out", "active", "candidate")
        return list({tuple(record[key] for key in keys): record for record in self._records(DEPTH)}.values())

    @property
    def origins(self) -> list[Origin]:
        """The files, with what they say of their measurement."""
        return [
            Origin(
                path=file.path,
                about=", ".join(filter(None, (file.device, file.date))),
                command=file.command,
                notes=file.notes,
            )
            for file in self.files
        ]

    def devices(self) -> list[str]:
        """Return what was measured on, each once."""
        return [device for device in dict.fromkeys(file.device for file in self.files) if device]

    def _of(self, name: str) -> list[BenchFile]:
        return [file for file in self.files if file.name == name]

    def _records(self, name: str) -> list[Record]:
        """Return the records of a bench, each with its 'device' and the 'file' that it lies in."""
        return [
            {**record, "device": file.device, "file": file.path} for file in self._of(name) for record in file.records
        ]


def read_profile(folder: Path) -> Profile:
    """Return what the benches left in a folder, or in its folders 'profile' and 'bench'; nothing is no error.

    Raises:
        DataError: If a file is not one of a bench.
    """
    places = [folder / place / name for place in _PLACES for name in BENCH_FILES]
    return Profile([*_kept(folder / STUDY), *(read_bench_file(path) for path in places if path.is_file())])


def _kept(path: Path) -> list[BenchFile]:
    """Return what the record file of a study holds of benches, each under the name of its run."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    benches = [each for each in found if each.get("bench") in BENCH_FILES and "cell" not in each]
    return [bench_file(each["bench"], each, str(path / each["run"] / each["bench"])) for each in benches]


def _sweeps(file: BenchFile) -> Iterator[OperatorPoint]:
    sweeps: dict[str, list[Record]] = {}
    for record in file.records:
        sweeps.setdefault(record["sweep"], []).append(record)
    for name, records in sweeps.items():
        yield from _fastest(name.split()[0], records, "dense", file)


def _races(file: BenchFile) -> Iterator[OperatorPoint]:
    races: dict[str, list[Record]] = {}
    for record in file.records:
        if not record["race"].startswith(DECODE_GROUPS):
            races.setdefault(record["race"], []).append(record)
    for name, records in races.items():
        words = name.split()
        operator = f"{words[0]} {words[1]}" if words[0] == "gemv" else f"{words[0]} attention"
        yield from _fastest(operator, records, records[0]["peer"], file)


def _fastest(operator: str, records: Sequence[Record], peer: str, file: BenchFile) -> Iterator[OperatorPoint]:
    dense = [record for record in records if record["candidate"] == peer]
    ours = [record for record in records if not record["candidate"].startswith(_NOT_OURS)]
    charged = [record for record in ours if record["candidate"].endswith(_CHARGED)]
    # Where records say which tile ships, its time is quoted, not that of the fastest that was tried.
    ours = charged or [record for record in ours if record.get("shipped")] or ours
    if not dense or not ours:
        return
    best = min(ours, key=lambda record: float(record["median_us"]))
    group_size, batch = best.get("group_size"), best.get("batch")
    yield OperatorPoint(
        operator=operator,
        device=file.device,
        group_size=None if group_size is None else int(group_size),
        batch=None if batch is None else int(batch),
        tokens=int(best.get("num_rows") or best["length"]),
        active=float(best["active"]),
        candidate=best["candidate"],
        median_us=float(best["median_us"]),
        dense_us=float(dense[0]["median_us"]),
        # A weight is read if any of the rows executes it.
        ideal=1.0 / float(best.get("union", best["active"])),
        backend=_backend(best),
        file=file.path,
    )


def _backend(record: Record) -> str:
    named = record.get("choice", {}).get("backend")
    guessed = next((backend for word, backend in _BACKENDS.items() if word in record["candidate"]), "triton")
    return named if isinstance(named, str) and named else guessed


def _forwards(file: BenchFile) -> Iterator[Forward]:
    for record in file.records:
        skipped: Mapping[str, Any] | None = record.get("skipped")
        yield Forward(
            device=file.device,
            model=file.model,
            adapter=file.adapter,
            group_size=file.ffn_group_size,
            what=record["what"],
            tokens=int(record["tokens"]),
            batch=int(record["batch"]),
            candidate=record["candidate"],
            median_us=float(record["median_us"]),
            speedup=float(record["speedup"]),
            ceiling=record.get("ceiling"),
            skipped=None if skipped is None else (float(skipped["attention"]), float(skipped["ffn"])),
            parts=record.get("breakdown_us", {}),
            energy_j=record.get("energy_j"),
            memory_bytes=record.get("peak_memory_bytes"),
            method=file.method,
            checkpoint=file.checkpoint,
            file=file.path,
            layers=file.layers,
        )
