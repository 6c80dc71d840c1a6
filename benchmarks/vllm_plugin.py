"""The plug-in for vLLM beside dense vLLM on one GPU: answers first, then speeds, each pair in one go.

Usage: python -m benchmarks.vllm_plugin --output DIR [--parts gate,bench,launched,everything,fp8,w8a8,int8,off] [--tiny]
       python -m benchmarks.vllm_plugin --output DIR --parts two
       python -m benchmarks.vllm_plugin --record DIR/vllm.json --commit HASH

Llama-3.1-8B's shapes, drawn weights, half of the pairs skipped. Answers are compared in two layers, since behind many
layers of random routers rounding decides; in all layers where everything executes. Engines start at the same time, in
processes of their own (`benchmarks.vllm_engine`), and are timed one after the other at each size. About 80 s until they
have started, 30 s for answers, 65 s for speeds, 15 s with routers that skip nothing, and 130 s more for the checkpoint
at sparsity 0 and for dense vLLM with `--quantization fp8`; `int8` and `w8a8` start engines with weights in eight bits
behind each other, and were not timed. `two` starts an engine of two ranks on two GPUs and one of one rank, whose
figures stand as `dense`. DIR/vllm.json is written after every figure. The last form writes figures into
docs/measurements/targets/vllm.json, if the gate was green.
"""

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TARGETS = Path(__file__).parents[1] / "docs/measurements/targets/vllm.json"
_ROWS: dict[str, tuple[str, int]] = {
    "vLLM: a token, one sequence, prompt 2048": ("token", 2048),
    "vLLM: first token, 4096": ("first_token", 4096),
    "vLLM: first token, 1100": ("first_token", 1100),
    "vLLM: 32 requests, 1024 in, 256 out": ("requests", 32),
    "vLLM: 1 request, 1024 in, 256 out": ("requests", 1),
    "vLLM: 8 requests, 1024 in, 256 out": ("requests", 8),
    "vLLM: 64 requests, 1024 in, 256 out": ("requests", 64),
    "vLLM: first token, 16384": ("first_token", 16384),
}
"""What is timed, by the names of the targets."""
_FEW = list(_ROWS)[:4]
_NOTHING = "vLLM: nothing skipped"
_TWO = "vLLM: two ranks over one rank of the same kind, a token, routed"
_OVER_FP8 = {
    "vLLM: in eight bits over dense vLLM FP8, a token": _FEW[0],
    "vLLM: in eight bits over dense vLLM FP8, first token, 4096": _FEW[1],
}


class Worker:
    """An engine in a process of its own.

    Args:
        mode: Of `benchmarks.vllm_engine`.
        log: Folder for its log.
    """

    def __init__(self, mode: str, log: Path, *, tiny: bool) -> None:
        self.mode = mode
        self.log = (log / f"{mode}.log").open("w")
        command = [sys.executable, "-m", "benchmarks.vllm_engine", mode, *(["tiny"] if tiny else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def answer(self) -> dict[str, Any]:
        """Return the next answer; lines that are none belong to vLLM."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise SystemExit(f"the engine {self.mode!r} ended; its log is {self.log.name}")

    def call(self, *words: Any) -> dict[str, Any]:
        """Have the engine do something and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """End the process, so that its memory is free."""
        self.process.kill()
        self.process.wait()


class Record:
    """What was found, on the disk after every figure."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, time.perf_counter()
        self.content: dict[str, Any] = {"rows": []}

    def add(self, **found: Any) -> None:
        """Keep figures under their names, print and write them."""
        self.content |= found
        self._say(found)

    def row(self, what: str, kind: str, ours: dict[str, Any], dense: dict[str, Any]) -> None:
        """Keep a figure of ours and the dense engine's."""
        faster = ours["value"] / dense["value"]
        ratio = faster if ours["unit"] == "tokens/s" else 1 / faster
        row = {"what": what, "mode": kind, "ratio": round(ratio, 4), "unit": ours["unit"]}
        row |= {"value": ours["value"], "dense": dense["value"], "all": ours["all"], "dense_all": dense["all"]}
        self.content["rows"].append(row)
        self._say(row)

    @contextlib.contextmanager
    def lasting(self, mode: str) -> Iterator[None]:
        """Note that an engine has ended, and go on with the others."""
        try:
            yield
        except (SystemExit, BrokenPipeError) as ended:
            self.add(**{f"{mode} ended": str(ended)})

    def _say(self, what: dict[str, Any]) -> None:
        print(f"{time.perf_counter() - self.started:6.1f} s  {json.dumps(what)}", flush=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def measure(folder: Path, parts: list[str], *, tiny: bool) -> None:
    """Start engines and time them."""
    record = Record(folder / "vllm.json")
    modes = ("gate", "routed", "dense") if "gate" in parts else ("routed", "dense")
    workers = {mode: Worker(mode, folder, tiny=tiny) for mode in modes}
    routed, dense = workers["routed"], workers["dense"]
    if "gate" in parts:
        workers["gate"].answer()
        found = workers["gate"].call("gate")
        workers["gate"].end()
        record.add(routed=routed.answer())
        found["all layers"] = routed.call("all_layers")
        record.add(gate=found | {"green": found["green"] and found["all layers"]["green"]})
    else:
        record.add(routed=routed.answer())
    record.add(dense=dense.answer(), skipped=routed.call("skipped"))
    known: dict[str, dict[str, Any]] = {}
    if "bench" in parts:
        for what, words in _ROWS.items():
            known[what] = dense.call(*words)
            record.row(what, "routed", routed.call(*words), known[what])
    for mode in ("launched", "everything"):
        if mode in parts:
            routed.call(mode)
            for what in _FEW:
                record.row(what, mode, routed.call(*_ROWS[what]), known.get(what) or dense.call(*_ROWS[what]))
    thresholds = routed.call("thresholds")
    routed.end()
    if "bench" in parts:
        dense.end()
    # Weights in the model's dtype do not fit on a GPU several times.
    for together in ("fp8 w8a8 int8", "off"):
        last = {mode: Worker(mode, folder, tiny=tiny) for mode in together.split() if mode in parts}
        eight = [mode for mode in last if mode in ("w8a8", "int8")]
        gates = [f"gate-{mode}" for mode in eight if "gate" in parts]
        for mode, gate in {mode: Worker(mode, folder, tiny=tiny) for mode in gates}.items():
            with record.lasting(mode):
                gate.answer()
                record.add(**{mode: gate.call("gate")})
            gate.end()
        for mode, worker in last.items():
            with record.lasting(mode):
                started = worker.answer()
                record.add(**{mode: started | (worker.call("take_thresholds", thresholds) if mode in eight else {})})
        # The first rows of all engines come first, since a time limit may end this.
        for what in _FEW if together == "off" else [name for name in _ROWS if "64 requests" not in name]:
            for mode, worker in last.items():
                with record.lasting(mode):
                    record.row(what, mode, worker.call(*_ROWS[what]), known.get(what) or dense.call(*_ROWS[what]))
        for worker in last.values():
            worker.end()
    dense.end()


def measure_two(folder: Path, *, tiny: bool) -> None:
    """Start engines of one rank and of two, and time them; the two ranks' answers are judged by the one's weights."""
    record = Record(folder / "vllm.json")
    workers = {mode: Worker(mode, folder, tiny=tiny) for mode in ("gate", "gate-two", "routed", "two")}
    gate, gate_two, one, two = workers.values()
    for mode in ("gate", "gate-two"):
        record.add(**{mode.replace("gate", "start"): workers[mode].answer()})
    gate_two.call("take_thresholds", gate.call("thresholds"))
    found = gate.call("gate", gate_two.call("rounds"))
    gate.end()
    gate_two.end()
    record.add(gate=found, routed=one.answer())
    record.add(two=two.answer())
    record.add(skipped=two.call("take_thresholds", one.call("thresholds")))
    for what in (*_FEW, "vLLM: 8 requests, 1024 in, 256 out", _FEW[0]):
        record.row(what, "two", two.call(*_ROWS[what]), one.call(*_ROWS[what]))
    found["all layers"] = one.call("all_layers", two.call("whole_answers")["all"])
    record.add(gate=found | {"green": found["green"] and found["all layers"]["green"]})
    one.end()
    two.end()


def fill(content: dict[str, Any], rows: list[dict[str, Any]], *, commit: str, device: str, date: str) -> None:
    """Put what was measured into rows of targets, in place; what was not measured stays.

    Raises:
        SystemExit: If the gate was not green, or not run.
    """
    if not content.get("gate", {}).get("green"):
        raise SystemExit("the gate was not green; no figure without it")
    found = {row["what"]: row for row in content["rows"] if row["mode"] == "routed"}
    off = [row for row in content["rows"] if row["mode"] == "off"]
    if off:
        found[_NOTHING] = min(off, key=lambda row: float(row["ratio"]))
    two = [row for row in content["rows"] if row["mode"] == "two" and row["what"] == _FEW[0]]
    if two:
        found[_TWO] = min(two, key=lambda row: float(row["ratio"]))
    by_mode = {(row["mode"], row["what"]): row for row in content["rows"]}
    for name, what in _OVER_FP8.items():
        green = content.get("gate-w8a8", {}).get("green")
        if green and ("w8a8", what) in by_mode and ("fp8", what) in by_mode:
            ours, fp8 = by_mode["w8a8", what], by_mode["fp8", what]
            found[name] = ours | {"ratio": fp8["value"] / ours["value"], "dense": fp8["value"]}
    skipped = content["skipped"]
    for row in rows:
        one = found.get(row["what"])
        if one is None:
            continue
        value = round(one["ratio"], 3)
        aims = [name for name in ("goal", "floor") if value >= row[name]]
        of = f"{one['what'].removeprefix('vLLM: ')}: " if row["what"] == _NOTHING else ""
        note = f"{of}{one['value']:.4g} {one['unit']} against {one['dense']:.4g}, in one call; Llama-3.1-8B shapes, "
        shares = (" and ".join(map(str, skipped[part])) for part in ("prompt", "new"))
        note += "drawn weights; skipped in attention and FFN: {} of prompts, {} after".format(*shares)
        row |= {"value": value, "reached": aims[0] if aims else "missed", "device": device, "date": date}
        row |= {"commit": commit, "note": note}


def main() -> None:
    """Measure, or record what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the record and the logs")
    parser.add_argument("--parts", default="gate,bench,launched,fp8,w8a8,int8,off")
    parser.add_argument("--tiny", action="store_true", help="a small model, as a CPU can run; its figures say nothing")
    parser.add_argument("--record", type=Path, help="file of a measurement that goes into the targets")
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    given = parser.parse_args()
    if given.record is not None:
        rows = json.loads(_TARGETS.read_text())
        content = json.loads(given.record.read_text())
        fill(content, rows, commit=given.commit, device=given.device, date=given.date)
        _TARGETS.write_text(json.dumps(rows, indent=1) + "\n")
        return
    given.output.mkdir(parents=True, exist_ok=True)
    if given.parts == "two":
        measure_two(given.output, tiny=given.tiny)
    else:
        measure(given.output, given.parts.split(","), tiny=given.tiny)


if __name__ == "__main__":
    main()
