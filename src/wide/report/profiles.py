"""What the benches measured, read from their JSON files and brought into one form."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.errors import DataError

OPERATORS, ATTENTION, END_TO_END = "operators.json", "attention.json", "endtoend.json"
NAIVE, DEPTH = "naive.json", "depth.json"
OWN = ("own routing", "pruned")
"""What a pruned model itself is called among the candidates: its routers deciding, or what a static plan left."""
_FILES = (OPERATORS, ATTENTION, END_TO_END, NAIVE, DEPTH)
_PLACES = (".", "profile", "bench", "bench/coarse")
# Only these candidates of the prefill attention are charged with the reordering that they need.
_CHARGED = "reorder charged"
_DECODE_GROUPS = "decode_groups"
_NOT_OURS = ("dense", "operator, nothing skipped")
_EVEN = 0.01
_ABOUT = ("file", "device", "date", "command")


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

    @property
    def is_variant(self) -> bool:
        """Whether it only explains another candidate."""
        return self.candidate == "all execute" or self.candidate.endswith("all sparse")

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
        files: Name of the bench's file and its content.
    """

    def __init__(self, files: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Keep the contents."""
        self._files = tuple(files)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self._files)

    def __add__(self, other: "Profile") -> "Profile":
        """Return the records of both."""
        return Profile((*self._files, *other._files))

    def holds(self, *names: str) -> bool:
        """Return whether there is a file of any of these names."""
        return any(name in names for name, _ in self._files)

    def operators(self) -> list[OperatorPoint]:
        """Return the fastest agreeing variant of each operator at each size; of equal sizes the latest file counts."""
        points = [point for _, content in self._of(OPERATORS) for point in _sweeps(content)]
        points += [point for _, content in self._of(ATTENTION) for point in _races(content)]
        latest = {(p.operator, p.device, p.group_size, p.batch, p.tokens, p.active): p for p in points}
        return list(latest.values())

    def forwards(self) -> list[Forward]:
        """Return the candidates of the end-to-end bench that ran; of equal ones the latest file counts."""
        found = [forward for _, content in self._of(END_TO_END) for forward in _forwards(content)]
        keys = ("device", "model", "adapter", "checkpoint", "group_size", "what", "tokens", "batch", "candidate")
        return list({tuple(getattr(forward, key) for key in keys): forward for forward in found}.values())

    def decode_groups(self) -> list[Mapping[str, Any]]:
        """Return the timed records of decode attention over the size of groups; of equal ones the latest counts."""
        found = [
            record | {"device": content.get("device", "")}
            for _, content in self._of(ATTENTION)
            for record in content["records"]
            if "median_us" in record and record["race"].startswith(_DECODE_GROUPS)
        ]
        keys = ("device", "race", "candidate")
        return list({tuple(record[key] for key in keys): record for record in found}.values())

    def naive(self) -> list[Mapping[str, Any]]:
        """Return the records of naive beside fused products."""
        return [
            record | {"device": content["device"]} for _, content in self._of(NAIVE) for record in content["records"]
        ]

    def depth(self) -> list[Mapping[str, Any]]:
        """Return the records of naive dynamic depth taken apart; of equal ones the latest file counts."""
        found = [
            record | {"device": content.get("device", "")}
            for _, content in self._of(DEPTH)
            for record in content["records"]
        ]
        keys = ("device", "rows", "width_in", "width_out", "active", "candidate")
        return list({tuple(record[key] for key in keys): record for record in found}.values())

    def devices(self) -> list[str]:
        """Return what was measured on, each once."""
        return list(dict.fromkeys(str(content.get("device", "")) for _, content in self._files))

    def sources(self) -> list[Mapping[str, Any]]:
        """Return where each file lies ('file') and what it says of its measurement: device, date, command."""
        return [{key: content.get(key) or "" for key in _ABOUT} for _, content in self._files]

    def _of(self, name: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [entry for entry in self._files if entry[0] == name]


def read_profile(folder: Path) -> Profile:
    """Return what the benches left in a folder, or in its folders 'profile' and 'bench'; nothing is no error.

    Raises:
        DataError: If a file is not one of a bench.
    """
    found = []
    for place in _PLACES:
        for name in _FILES:
            path = folder / place / name
            if path.is_file():
                found.append((name, {**_content(path), "file": str(path)}))
    return Profile(found)


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not JSON, perhaps cut while being written; measure again") from error
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise DataError(f"{path} holds no list of records; wanted what wide bench or wide profile writes")
    return content


def _sweeps(content: Mapping[str, Any]) -> Iterator[OperatorPoint]:
    sweeps: dict[str, list[Mapping[str, Any]]] = {}
    for record in content["records"]:
        if "median_us" in record and not record["sweep"].startswith("reorder"):
            sweeps.setdefault(record["sweep"], []).append(record)
    for name, records in sweeps.items():
        yield from _fastest(name.split()[0], records, "dense", content)


def _races(content: Mapping[str, Any]) -> Iterator[OperatorPoint]:
    races: dict[str, list[Mapping[str, Any]]] = {}
    for record in content["records"]:
        if "median_us" in record and not record["race"].startswith(_DECODE_GROUPS):
            races.setdefault(record["race"], []).append(record)
    for name, records in races.items():
        words = name.split()
        operator = f"{words[0]} {words[1]}" if words[0] == "gemv" else f"{words[0]} attention"
        yield from _fastest(operator, records, records[0]["peer"], content)


def _fastest(
    operator: str, records: Sequence[Mapping[str, Any]], peer: str, content: Mapping[str, Any]
) -> Iterator[OperatorPoint]:
    dense = [record for record in records if record["candidate"] == peer]
    ours = [record for record in records if not record["candidate"].startswith(_NOT_OURS)]
    charged = [record for record in ours if record["candidate"].endswith(_CHARGED)]
    ours = charged or ours
    if not dense or not ours:
        return
    best = min(ours, key=lambda record: float(record["median_us"]))
    group_size, batch = best.get("group_size"), best.get("batch")
    yield OperatorPoint(
        operator=operator,
        device=str(content.get("device", "")),
        group_size=None if group_size is None else int(group_size),
        batch=None if batch is None else int(batch),
        tokens=int(best.get("num_rows") or best["length"]),
        active=float(best["active"]),
        candidate=best["candidate"],
        median_us=float(best["median_us"]),
        dense_us=float(dense[0]["median_us"]),
        # A weight is read if any of the rows executes it.
        ideal=1.0 / float(best.get("union", best["active"])),
    )


def _forwards(content: Mapping[str, Any]) -> Iterator[Forward]:
    for record in content["records"]:
        if "median_us" not in record:
            continue
        skipped = record.get("skipped")
        yield Forward(
            device=str(content.get("device", "")),
            model=str(content.get("model", "")),
            adapter=str(content.get("adapter") or ""),
            group_size=content.get("ffn_group_size"),
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
            method=str(content.get("method") or ""),
            checkpoint=str(content.get("checkpoint") or ""),
        )
