"""Works through configurations of `wide compare` with several processes on each GPU; can be stopped and goes on.

Usage: python tools/compare_on_gpus.py --gpus 0,1 --per_gpu 5 --output RUNS CONFIG... [--seconds 3600] [-- FLAGS]
       python tools/compare_on_gpus.py --gpus '' --per_gpu 2 --output RUNS CONFIG...     (on the CPU)

Each configuration is a comparison of its own in RUNS/<name of the file>, which the processes share by `--shard next`.
FLAGS go to every `wide compare`; configurations among them (`-- --config common.yaml --model M`) are read before each
CONFIG, which is laid over them. A process takes up the first configuration that has more cells left than processes,
and the next one when it finds nothing free, so that no GPU waits for the last cells of a configuration. Processes on
one GPU take turns, and what waits for it after every small step suffers: beside three trainings of 1.5 B clustering
took twenty times as long, scoring three times.

After `--seconds`, on SIGTERM and on Ctrl-C all processes are told to end: training writes a checkpoint, finished cells
are kept, and the same command goes on from there. A second signal, or the end of `--grace`, kills. What the processes
say is in RUNS/logs; at the end a list says what is finished and what failed. Exit codes: 0 all is finished, 1 something
is not, 2 the command line or a configuration was not understood, 130 ended before its time. The tables of what is there
are drawn by `wide report RUNS/<name>`.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import yaml

from wide.comparison.grid import DENSE, GridOptions
from wide.errors import WideError
from wide.records import CELLS, RECORDS, Cell, Stage, read_records
from wide.report.comparison import FINISHED
from wide.report.selection import Selection
from wide.runs.settings import build

WIDE_COMPARE = (sys.executable, "-m", "wide.cli.main", "compare")
LOOK_EVERY_S = 0.2
TURNS = 2
"""How often one process may take up one configuration: again, because another one may have died there."""


@dataclass(frozen=True, eq=False)
class Grid:
    """One configuration.

    Args:
        words: Of its command line.
        folder: Where its comparison goes.
        stages: Of each cell, whether LoRA is in it.
    """

    words: tuple[str, ...]
    folder: Path
    stages: dict[Cell, tuple[bool, ...]]

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.folder.name

    @property
    def is_finished(self) -> bool:
        """Whether every stage has been measured."""
        return all(status == FINISHED for cell in self.stages for status, *_ in self._found(cell))

    def open_cells(self, since: str) -> int:
        """Return how many cells are neither measured nor failed.

        Args:
            since: Failures from before this time do not count; ISO 8601 in UTC, as records have it.
        """
        return sum(self._is_open(cell, since) for cell in self.stages)

    def outcome(self) -> Iterator[str]:
        """Yield lines that say what became of each cell, with the perplexity of its stages."""
        found = {cell: self._found(cell) for cell in self.stages}
        finished = [status == FINISHED for stages in found.values() for status, *_ in stages]
        yield f"{self.name}: {sum(finished)} of {len(finished)} stages finished"
        for cell, stages in found.items():
            words = []
            for recovered, (status, _, perplexity) in zip(self.stages[cell], stages, strict=True):
                value = "" if perplexity is None else f" ({perplexity:.2f})"
                word = f"finished{value}" if status == FINISHED else f"FAILED, {status}" if status else "not reached"
                words.append(f"with LoRA {word}" if recovered else word)
            yield f"    {cell.title}: {'; '.join(words)}"

    def _is_open(self, cell: Cell, since: str) -> bool:
        found = self._found(cell)
        failed = any(status not in ("", FINISHED) and when >= since for status, when, _ in found)
        return not failed and any(status != FINISHED for status, *_ in found)

    def _found(self, cell: Cell) -> list[tuple[str, str, float | None]]:
        """Return status ('' where there is none), its time and the perplexity of each stage of a cell."""
        file = self.folder / CELLS / cell.folder / RECORDS
        records = Selection(*read_records(file)) if file.is_file() else Selection([])
        found = []
        for recovered in self.stages[cell]:
            subject = Stage(cell, recovered=recovered)
            status = records.record(subject, "status")
            word, when = ("", "") if status is None else (str(status.value), status.time)
            found.append((word, when, records.number(subject, "token_perplexity")))
        return found


def read_grids(configs: Sequence[str], flags: Sequence[str], output: Path) -> list[Grid]:
    """Return what is to be run, understood by `wide compare` itself.

    Raises:
        SystemExit: With code 2, if it understands a configuration or a flag not, or two would share a folder.
    """
    names = [Path(config).stem for config in configs]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        refuse(f"several configurations are named {', '.join(twice)} and would share a folder; rename all but one")
    grids, asked = [], []
    for config, name in zip(configs, names, strict=True):
        words = (*flags, "--config", config, "--output", str(output / name), "--shard", "next")
        command = [*WIDE_COMPARE, *words, "--print_config"]
        asked.append((words, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    for name, (words, process) in zip(names, asked, strict=True):
        said, errors = process.communicate()
        if process.returncode:
            refuse(f"{name}: {errors.strip()}")
        values = yaml.safe_load(said)
        try:
            options = build(GridOptions, values)
        except WideError as error:
            refuse(f"{name}: {error}")
        recovers = values["recover"]["steps"] > 0
        first = options.seed_values[0]
        # The dense model itself is the same for all seeds.
        stages = {
            cell: (False,) * (cell.method != DENSE or cell.seed == first) + (True,) * recovers
            for cell in options.cells(recovers=recovers)
        }
        grids.append(Grid(words, output / name, stages))
    return grids


def refuse(message: str) -> NoReturn:
    """End with the exit code of a command line that is wrong."""
    print(f"compare_on_gpus: {message}", file=sys.stderr)
    raise SystemExit(2)


@dataclass(eq=False)
class Worker:
    """One place for a process on a GPU.

    Args:
        number: Among all.
        gpu: As CUDA_VISIBLE_DEVICES names it; empty for the CPU.
        process: What runs there, or ran last.
        grid: What it works on.
    """

    number: int
    gpu: str
    process: subprocess.Popen[bytes] | None = None
    grid: Grid | None = None

    @property
    def name(self) -> str:
        """Name for lines on the terminal."""
        return f"process {self.number} on {f'GPU {self.gpu}' if self.gpu else 'the CPU'}"


class Pool:
    """All processes.

    Args:
        grids: In the order in which they are wanted.
        gpus: As CUDA_VISIBLE_DEVICES names them.
        per_gpu: Processes on each.
        logs: Folder for what they say.
    """

    def __init__(self, grids: Sequence[Grid], gpus: Sequence[str], per_gpu: int, logs: Path) -> None:
        """Start nothing yet."""
        self._grids, self._logs = grids, logs
        self._workers = [Worker(number, gpu) for number, gpu in enumerate([*gpus] * per_gpu)]
        self._turns: Counter[tuple[int, str]] = Counter()
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        logs.mkdir(parents=True, exist_ok=True)
        # Processes that all take every core would only wait for each other.
        threads = max(1, (os.cpu_count() or 1) // len(self._workers))
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}

    def work(self, deadline: float, grace: float, signals: Sequence[int]) -> None:
        """Return when nothing is left to be begun and all processes have ended, for whatever reason.

        Args:
            deadline: `time.monotonic()` at which they are told to end.
            grace: Seconds after which those are killed that then have not ended.
            signals: Grows with every signal that this program receives.
        """
        if not signals:
            self._fill()
        while busy := [worker for worker in self._workers if worker.process is not None]:
            if signals or time.monotonic() >= deadline:
                self._end([worker.process for worker in busy if worker.process is not None], grace, signals)
                return
            time.sleep(LOOK_EVERY_S)
            # A process that ended may have left something to others.
            if sum(self._has_ended(worker) for worker in busy):
                self._fill()

    def _fill(self) -> None:
        """Start a process wherever there is none and a configuration has something for it."""
        left = {grid: grid.open_cells(self._began) for grid in self._grids}
        for worker in self._workers:
            if worker.process is None:
                # Each process holds one cell, so that more of them would find nothing free.
                grid = next((grid for grid in self._grids if self._has_room(grid, left[grid], worker)), None)
                if grid is not None:
                    self._start(worker, grid)

    def _has_room(self, grid: Grid, left: int, worker: Worker) -> bool:
        workers = sum(other.grid is grid for other in self._workers if other.process is not None)
        return left > workers and self._turns[worker.number, grid.name] < TURNS

    def _start(self, worker: Worker, grid: Grid) -> None:
        self._turns[worker.number, grid.name] += 1
        with self._log(worker, grid).open("ab") as log:
            # In a session of its own: Ctrl-C on the terminal would reach it twice otherwise, and the second one kills.
            worker.process = subprocess.Popen(
                [*WIDE_COMPARE, *grid.words],
                env=self._environment | {"CUDA_VISIBLE_DEVICES": worker.gpu},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        worker.grid = grid
        say(f"{worker.name}: {grid.name} begun")

    def _has_ended(self, worker: Worker) -> bool:
        assert worker.process is not None
        assert worker.grid is not None
        code = worker.process.poll()
        if code is None:
            return False
        log = self._log(worker, worker.grid)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if code else []
        reason = f" with exit code {code}: {lines[-1] if lines else 'no word'} ({log})" if code else ""
        say(f"{worker.name}: {worker.grid.name} ended{reason}")
        worker.process = None
        return True

    def _log(self, worker: Worker, grid: Grid) -> Path:
        return self._logs / f"{grid.name}.{worker.number}.log"

    def _end(self, processes: Sequence[subprocess.Popen[bytes]], grace: float, signals: Sequence[int]) -> None:
        """Tell processes to end; kill those that do not within the time of grace, or at once after a second signal."""
        say(f"told to end: {len(processes)} running; training writes a checkpoint")
        for process in processes:
            process.terminate()
        until, known = time.monotonic() + grace, len(signals)
        while left := [process for process in processes if process.poll() is None]:
            if time.monotonic() >= until or len(signals) > known:
                say(f"killed: {len(left)} still running")
                for process in left:
                    # With what it has started, which is in its session.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            time.sleep(LOOK_EVERY_S)


def say(line: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def listen() -> list[int]:
    """Return a list that grows with every signal to end; those that whoever started this ignores stay ignored."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)
    return received


def main(arguments: Sequence[str] | None = None) -> int:
    """Work through the configurations and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="what wide compare --config takes, in order")
    parser.add_argument("--gpus", required=True, help="as CUDA_VISIBLE_DEVICES names them, by commas; '' is the CPU")
    parser.add_argument("--per_gpu", type=int, default=1, help="processes on each")
    parser.add_argument("--output", type=Path, required=True, metavar="RUNS", help="folder for all comparisons")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which all are told to end")
    parser.add_argument("--grace", type=float, default=60, help="seconds after which they are killed then")
    options = parser.parse_args(given[:cut])
    if options.per_gpu < 1:
        parser.error(f"--per_gpu must be at least 1, got {options.per_gpu}")
    deadline = time.monotonic() + options.seconds
    signals = listen()
    grids = read_grids(options.configs, given[cut + 1 :], options.output)
    pool = Pool(grids, options.gpus.split(","), options.per_gpu, options.output / "logs")
    pool.work(deadline, options.grace, signals)
    for grid in grids:
        print(*grid.outcome(), sep="\n")
    if all(grid.is_finished for grid in grids):
        return 0
    return 130 if signals or time.monotonic() >= deadline else 1


if __name__ == "__main__":
    sys.exit(main())
