"""The targets of what a user gets, filled in from the records of `wide profile`; `make tables` draws pages from them.

Usage: python -m benchmarks.targets --measure DIR [--out docs/measurements/targets/user.json]
       python -m benchmarks.targets --records DIR... [--out ...]

The first measures all rows on this machine's GPU, in ten minutes at most: one `wide profile` after the other (`PARTS`),
each in a folder of its own and with a time limit, at which it keeps what it wrote. The second reads such folders, which
hold endtoend.json. Where several hold the same row, the last named folder counts; rows that none of them measured stay
as the file has them, and each row names its command. Sparsity 0.5 comes first, so that what a first call takes is that
of a fresh process. Routers of your own: `wide profile --model M --adapter RUN/adapter --output DIR`.
"""

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.errors import DataError

_MODEL = "llama-3.1-8b"
_OUT = Path(__file__).parents[1] / "docs/measurements/targets/user.json"
_PROFILE = "wide profile --shape llama-3.1-8b --output DIR"
_ALONE = f"{_PROFILE} --prompt 2048,4096,16384 --sparsities 0.5,0,0.1,0.3,0.7"
_REQUESTS = f"{_PROFILE} --prompt 1024 --calls generate --generate 2 --batched 1,64,8,32"
_GRID = f"{_PROFILE} --prompt 1024 --batch 2,8,32,64,4,16 --calls generate --generate 32 --sparsities 0.5,0,0.1,0.3,0.7"
_TRAINED = f"{_PROFILE} --prompt 2048,4096,16384 --sparsities 0.66/0.28"
PARTS = {"alone": (_ALONE, 190), "requests": (_REQUESTS, 140), "grid": (_GRID, 160), "trained": (_TRAINED, 80)}
"""What measures all rows: commands by the names of their folders, and the seconds that each may take."""
WIDE = (sys.executable, "-c", "import sys; from wide.cli.main import main; sys.exit(main(sys.argv[1:]))")
# Seconds in which a part that is interrupted must end.
_GRACE = 10
_PAPER = "routed 0.66/0.28"
_HALF, _DENSE, _AS_LOADED = "routed 0.5/0.5", "dense", "as loaded"
_OVER = {_AS_LOADED: "speedup_as_loaded", _DENSE: "speedup"}
_GIB = 2.0**30
Content = Mapping[str, Any]
Finder = Callable[[Content], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One figure to reach.

    Args:
        what: In words.
        floor: Least acceptable value; None where a figure is for orientation.
        goal: Wanted value, or None.
        unit: 'ratio' of the peer's time to ours; of others less is better.
        command: How to measure it again.
        find: Returns 'value' and what goes with it, None where the records do not hold it.
        shown: Name of the row in the table of speeds, which shows all candidates; empty = not in it.
    """

    what: str
    floor: float | None
    goal: float | None
    unit: str
    command: str
    find: Finder
    shown: str = ""


def _against(
    peer: str, kind: str, field: str = "median_us", unit: str = "ms", candidate: str = _HALF, **wanted: Any
) -> Finder:
    """Return a finder of a candidate's speed-up, with the figures of all."""
    scale, is_rate = (1e-3, False) if field.endswith("_us") else (1.0, True)

    def find(content: Content) -> dict[str, Any] | None:
        alike = [r for r in content.get(kind, []) if all(r.get(key) == value for key, value in wanted.items())]
        record = next((r for r in alike if r["candidate"] == candidate and r.get(_OVER[peer])), None)
        if record is None:
            return None
        # Peers are timed again at every sparsity: the ratios are those of one race.
        ours = record[field] * scale
        times = {
            name: ours / record[over] if is_rate else ours * record[over]
            for name, over in _OVER.items()
            if record.get(over)
        }
        shown = {"as_loaded": times.get(_AS_LOADED), "dense": times.get(_DENSE), "ours": ours}
        figures = {name: None if figure is None else float(f"{figure:.3g}") for name, figure in shown.items()}
        # Thresholds are set on a prompt; what generated tokens skip may be another share.
        measured = record.get("skipped_measured")
        skipped = {} if measured is None else {"skipped": measured}
        return {"value": record[_OVER[peer]], **figures, "unit_shown": unit} | skipped

    return find


def _step(prompt: int, peer: str, candidate: str = _HALF) -> Finder:
    """Return a finder of a step of `generate()` after a prompt; half of the new tokens count as cached."""

    def find(content: Content) -> dict[str, Any] | None:
        tokens = [r["tokens"] for r in content["records"] if r["what"] == "decode" and r["tokens"] >= prompt]
        if not tokens:
            return None
        return _against(peer, "records", candidate=candidate, what="decode", tokens=min(tokens), batch=1)(content)

    return find


def _start(value: Callable[[Mapping[str, Any]], float | None]) -> Finder:
    """Return a finder of what the beginning takes at 50 %."""

    def find(content: Content) -> dict[str, Any] | None:
        starts = [start for start in content.get("starts", []) if start["candidate"] == _HALF]
        found = value(starts[0]) if starts else None
        return None if found is None else {"value": found}

    return find


def _added(content: Content) -> dict[str, Any] | None:
    """Return the milliseconds that `generate()` adds to a step at the first prompt."""
    starts = [start for start in content.get("starts", []) if start["candidate"] == _HALF]
    steps = [r for r in content["records"] if (r["what"], r["batch"], r["candidate"]) == ("decode", 1, _HALF)]
    if not starts or not steps or starts[0].get("bare_step_us") is None:
        return None
    return {"value": (min(steps, key=lambda r: r["tokens"])["median_us"] - starts[0]["bare_step_us"]) / 1e3}


def _least(content: Content, candidate: str = "routed") -> dict[str, Any] | None:
    """Return the least speed-up over the dense model in the same engine, of routed candidates and all shapes."""
    found = [r for r in content["records"] if r["candidate"].startswith(candidate)]
    if not found:
        return None
    least = min(found, key=lambda r: r["speedup"])
    note = f"{least['what']}, {least['tokens']} tokens, batch {least['batch']}, {least['candidate']}"
    return {"value": least["speedup"], "note": f"least of {len(found)} in one record: {note}"}


def targets() -> list[Target]:
    """Return all rows, in order."""
    ratio, step = {"unit": "ratio", "command": _ALONE}, "`generate()`, a token, prompt of 2048"
    rows = [
        Target(
            what=f"{step}, against the strongest dense peer",
            floor=1.4,
            goal=1.6,
            find=_step(2048, _DENSE),
            shown=step,
            **ratio,
        ),
        Target(
            what=f"{step}, against the dense model as loaded", floor=5, goal=6, find=_step(2048, _AS_LOADED), **ratio
        ),
        Target(
            what="what `generate()` adds to the bare step",
            floor=0.8,
            goal=0.3,
            unit="ms",
            command=_ALONE,
            find=_alone(_added),
        ),
    ]
    for length, floor, goal in ((4096, 1.42, 1.55), (16384, 1.53, 1.65)):
        what = f"forward of {length} tokens"
        find = _against(_DENSE, "records", what="prefill", tokens=length, batch=1)
        rows.append(Target(what=what, floor=floor, goal=goal, find=find, shown=what, **ratio))
    for requests, floor, goal in ((1, 1.35, 1.5), (8, 1.0, 1.1), (32, 1.05, 1.2), (64, 1.15, 1.35)):
        what = f"`generate_batch`, {requests} request{'' if requests == 1 else 's'} at once, prompt of 1024"
        find = _against(_DENSE, "batched", "tokens_per_s", "tokens/s", requests=requests, prompt=1024)
        shown = f"`generate_batch`, {'one request' if requests == 1 else f'{requests} requests'}"
        rows.append(Target(what=what, floor=floor, goal=goal, unit="ratio", command=_REQUESTS, find=find, shown=shown))
    for what, command, find in (
        ("one sequence, 0 to 70 %", _ALONE, _alone(_least)),
        ("2 to 64 sequences, 50 %", _GRID, _several(_HALF)),
        ("2 to 64 sequences, 0 to 70 %", _GRID, _several("routed")),
    ):
        rows.append(
            Target(
                what=f"least speed-up over dense, {what}",
                floor=0.98,
                goal=1.0,
                unit="ratio",
                command=command,
                find=find,
            )
        )
    started = _start(lambda start: start["optimize_s"] + start["first_call_s"])
    memory = _start(lambda start: start["memory_beyond_dense_bytes"] / _GIB)
    return [
        *rows,
        Target(
            what="`optimize` and a first call, captures included",
            floor=20,
            goal=8,
            unit="s",
            command=_ALONE,
            find=_alone(started),
        ),
        Target(
            what="memory beyond the dense model's", floor=1, goal=0.3, unit="GiB", command=_ALONE, find=_alone(memory)
        ),
        *_for_orientation(),
    ]


def _for_orientation() -> list[Target]:
    """Return rows at the shares that the paper's trained routers skip, most of them in attention."""
    at = "at the paper's trained rates, 66 % of attention and 28 % of the FFN"
    finders = {"`generate()`, a token, prompt of 2048": _step(2048, _DENSE, _PAPER)}
    for length in (4096, 16384):
        find = _against(_DENSE, "records", candidate=_PAPER, what="prefill", tokens=length, batch=1)
        finders[f"forward of {length} tokens"] = find
    return [
        Target(what=f"{what}, {at}", floor=None, goal=None, unit="ratio", command=_TRAINED, find=find)
        for what, find in finders.items()
    ]


def _alone(find: Finder) -> Finder:
    """Return a finder in records of one sequence, all calls and 50 %."""

    def within(content: Content) -> dict[str, Any] | None:
        kinds = {(record["what"], record["candidate"]) for record in content["records"]}
        is_alone = all(record["batch"] == 1 for record in content["records"])
        return find(content) if is_alone and ("prefill", _HALF) in kinds else None

    return within


def _several(candidate: str) -> Finder:
    """Return a finder of the least speed-up of some sparsities in records of several sequences."""

    def find(content: Content) -> dict[str, Any] | None:
        shares = {record["candidate"] for record in content["records"] if record["candidate"].startswith("routed")}
        is_wanted = any(record["batch"] > 1 for record in content["records"]) and (
            candidate in shares or len(shares) > 1
        )
        return _least(content, candidate) if is_wanted else None

    return find


def measure(
    out: Path, parts: Mapping[str, tuple[str, float]], wide: Sequence[str], files: str = "endtoend.json"
) -> list[Path]:
    """Run commands one after the other, each until its time is up, and return the folders that hold records.

    Args:
        out: Holds a folder for each part.
        parts: Commands, with DIR for their folder, and the seconds that they may take, by name.
        wide: What stands for the word `wide`.
        files: What holds the records in a folder, may be a pattern.
    """
    found = []
    for name, (command, seconds) in parts.items():
        folder = out / name
        words = [str(folder) if word == "DIR" else word for word in command.split()[1:]]
        process = subprocess.Popen([*wide, *words])
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"{name}: stopped after {seconds:g} s; what it wrote counts\n")
            # Shells have what runs behind them ignore Ctrl-C.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            process.kill()
            process.wait()
        if any(folder.glob(files)):
            found.append(folder)
    return found


def fill(
    folders: Iterable[Path], known: Sequence[Mapping[str, Any]] = (), *, commit: str, date: str
) -> list[dict[str, Any]]:
    """Return one JSON-ready object per target.

    Args:
        folders: With records; later ones replace what earlier ones measured.
        known: Rows of earlier measurements, for targets that these do not measure.
        commit: Of the code that was measured.
        date: Of the measurement.

    Raises:
        DataError: If records are of another model than the targets.
    """
    contents = [json.loads((folder / "endtoend.json").read_text()) for folder in folders]
    others = sorted({str(content.get("model")) for content in contents} - {_MODEL})
    if others:
        raise DataError(
            f"targets are of {_MODEL}, and these records of {', '.join(others)}; name folders of that shape"
        )
    before = {row["what"]: row for row in known}
    rows = []
    for target in targets():
        row: dict[str, Any] = {"what": target.what, "value": None, "floor": target.floor, "goal": target.goal}
        row |= {"unit": target.unit, "reached": "not measured", "device": None, "date": None, "commit": None}
        row["command"] = target.command
        measured = [(content, found) for content in contents if (found := target.find(content)) is not None]
        if measured:
            content, found = measured[-1]
            found["value"] = round(found["value"], 4)
            row |= found | {
                "reached": reached(target.floor, target.goal, found["value"], target.unit),
                "device": content.get("device"),
            }
            # Where it was measured, folders had names of their own.
            command = re.sub(r"--(output|out) \S+", "--output DIR", content.get("command") or target.command)
            row |= {"date": date, "commit": commit, "command": command}
        elif target.what in before:
            row.update(before[target.what], floor=target.floor, goal=target.goal)
        if target.shown:
            row["shown"] = target.shown
        rows.append(row)
    return rows


def reached(floor: float | None, goal: float | None, value: float, unit: str = "ratio") -> str:
    """Return 'goal', 'floor' or 'missed', or that there is neither."""
    if floor is None or goal is None:
        return "for orientation"
    sign = 1.0 if unit == "ratio" else -1.0
    if sign * value >= sign * goal:
        return "goal"
    return "floor" if sign * value >= sign * floor else "missed"


def head() -> str:
    """Return the commit of this checkout."""
    found = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Fill in the targets and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--records", type=Path, nargs="+", help="folders of wide profile")
    source.add_argument("--measure", type=Path, help="folder for the records of all parts, measured now")
    parser.add_argument("--out", type=Path, default=_OUT, help="the file to write")
    parser.add_argument("--commit", default=None, help="of the measured code; default: this checkout's")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="YYYY-MM-DD")
    options = parser.parse_args(arguments)
    folders = options.records or measure(options.measure, PARTS, WIDE)
    known = json.loads(options.out.read_text()) if options.out.is_file() else []
    rows = fill(folders, known, commit=options.commit or head(), date=options.date)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.3f}"
        aims = " ".join(f"{'-' if row[key] is None else format(row[key], 'g'):>6s}" for key in ("floor", "goal"))
        sys.stdout.write(f"{row['what']:72s} {value:>9s} {aims}  {row['reached']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
