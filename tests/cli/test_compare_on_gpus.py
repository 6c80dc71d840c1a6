"""The program that keeps GPUs busy with comparisons, and the configurations of the lab benchmark."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from wide.cli.compare import request
from wide.cli.main import main
from wide.comparison.grid import GridOptions
from wide.schema import flatten

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tools/compare_on_gpus.py"
CONFIGS = ROOT / "docs/results/lab-88m/configs"
GRIDS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "common")
# Stands for `wide compare --shard next`: each cell takes a moment, unless its name says what happens to it.
STAND_IN = """
import json, os, signal, sys, time
from dataclasses import asdict
from pathlib import Path

import yaml
from wide.runs.settings import build
from wide.comparison.cells import free_cells
from wide.comparison.grid import GridOptions

def value(name):
    return sys.argv[sys.argv.index(name) + 1]

asked = yaml.safe_load(Path(value("--config")).read_text()) | {"shard": "next", "recover": {"steps": 0}}
if "--print_config" in sys.argv:
    if "typo" in asked:
        sys.exit("wide: error: there is no key 'typo'")
    print(yaml.safe_dump(asked))
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
folder, mark = Path(value("--output")), asked["description"]
grid, failed = build(GridOptions, asked), False

def path(cell):
    return folder / "cells" / cell.folder

def is_over(cell):
    return (path(cell) / "records.jsonl").is_file()

print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"])
for cell in free_cells(grid.own(grid.cells(recovers=False)), path, is_over):
    time.sleep(0.3)
    if cell.method == mark == "wide" and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.method == mark == "ddp":
        time.sleep(600)
    failed |= cell.method == mark == "tyr"
    status = "OutOfMemoryError: no luck" if cell.method == mark == "tyr" else "finished"
    records = [("token_perplexity", 31.5), ("status", status)]
    time_ = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    (path(cell) / "records.jsonl").write_text("".join(
        json.dumps({"subject": asdict(cell) | {"recovered": False}, "metric": m, "value": v, "time": time_}) + chr(10)
        for m, v in records))
if failed:
    print("wide: error: 1 cell failed")
sys.exit(failed)
"""


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("compare_on_gpus", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def run(program, tmp_path, monkeypatch, capsys):
    """Return a function that runs the program on grids, given as name=(methods, mark); gives exit code and words."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    monkeypatch.setattr(program, "WIDE_COMPARE", (sys.executable, str(stand_in)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def run(*given, **grids):
        files = [tmp_path / f"{name}.yaml" for name in grids]
        for file, (methods, mark) in zip(files, grids.values(), strict=True):
            file.write_text(yaml.safe_dump({"methods": methods, "sparsities": 0.5, "description": mark}))
        code = program.main(["--output", str(tmp_path / "runs"), *map(str, files), *given])
        return code, capsys.readouterr().out

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_configurations_are_worked_through_by_as_many_processes_as_have_something_to_do(run, tmp_path):
    grids = {"first": ("slicegpt,tyr", ""), "second": ("ddp", "")}
    code, said = run("--gpus", "0,GPU-1", "--per_gpu=2", **grids)
    assert code == 0
    begun = [line.split(" ", 1)[1] for line in said.splitlines() if line.endswith("begun")]
    assert begun[:4] == [
        "process 0 on GPU 0: first begun",
        "process 1 on GPU GPU-1: first begun",
        "process 2 on GPU 0: first begun",
        "process 3 on GPU GPU-1: second begun",
    ]
    assert (
        "first: 3 of 3 stages finished\n    dense seed 17: finished (31.50)\n    slicegpt 0.5 seed 17: finished" in said
    )
    assert "second: 2 of 2 stages finished" in said
    assert (tmp_path / "runs/logs/second.3.log").read_text().split() == ["GPU-1", "2"]
    code, said = run("--gpus=", **grids)
    assert code == 0
    assert "begun" not in said


def test_what_a_dead_process_leaves_is_taken_up_and_what_failed_is_not(run):
    code, said = run("--gpus=", dies=("wide,ddp", "wide"), fails=("tyr", "tyr"))
    assert code == 1
    assert "process 0 on the CPU: dies ended with exit code -9:" in said
    assert said.count("dies begun") == 2
    assert "dies: 3 of 3 stages finished" in said
    assert "fails ended with exit code 1: wide: error: 1 cell failed (" in said
    assert said.count("fails begun") == 1
    assert "fails: 1 of 2 stages finished" in said
    assert "    tyr 0.5 seed 17: FAILED, OutOfMemoryError: no luck" in said


def test_time_and_signals_end_all_processes_and_the_same_command_goes_on(run, tmp_path):
    grid = {"long": ("ddp", "ddp")}
    code, said = run("--gpus=", "--seconds=0.1", **grid)
    assert code == 130
    assert "told to end: 1 running" in said
    assert "ddp 0.5 seed 17: not reached" in said

    def end_it():
        while not (tmp_path / "runs/long/cells/ddp-0.5-seed17/lock").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_it, daemon=True).start()
    code, said = run("--gpus=", **grid)
    assert code == 130
    assert "told to end: 1 running" in said
    assert "killed" not in said
    assert "long: 1 of 2 stages finished\n    dense seed 17: finished (31.50)\n    ddp 0.5 seed 17: not reached" in said
    code, said = run("--gpus=", long=("ddp", ""))
    assert code == 0


def test_wrong_configurations_are_refused_before_anything_is_begun(run, program, tmp_path, capsys):
    for name, text, words in (
        ("typo", "typo: 1\nmethods: ddp\ndescription: ''", "typo: wide: error: there is no key 'typo'"),
        ("grid", "methods: ddp\nsparsities: 2\ndescription: ''", "grid: sparsities must lie in"),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            program.main(["--gpus=", "--output", str(tmp_path / "runs"), str(file)])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["--gpus=", "--output", str(tmp_path / "runs"), "a/x.yaml", "b/x.yaml"])
    assert "several configurations are named x" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_cells_of_a_grid_are_those_of_its_comparison(program, tmp_path):
    flags = ["--config", str(CONFIGS / "common.yaml"), "--model", "lab"]
    found = program.read_grids([str(CONFIGS / "n50.yaml"), str(CONFIGS / "seeds-fitted.yaml")], flags, tmp_path)
    assert [grid.name for grid in found] == ["n50", "seeds-fitted"]
    assert (len(found[0].stages), sum(map(len, found[0].stages.values()))) == (16, 32)
    # The dense model itself is measured once, with LoRA for each seed.
    assert list(found[1].stages.values()) == [(False, True), (True,), (False, True), (False, True)]
    assert found[1].words[-6:-4] == ("--config", str(CONFIGS / "seeds-fitted.yaml"))


@pytest.mark.parametrize(
    "name", [name if place % 4 == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(GRIDS)]
)
def test_the_grids_of_the_lab_benchmark_are_understood(name, capsys):
    words = ["--config", str(CONFIGS / "common.yaml"), "--config", str(CONFIGS / f"{name}.yaml"), "--output=x"]
    assert main(["compare", *words, "--print_config"]) == 0
    asked = yaml.safe_load(capsys.readouterr().out)
    # Beyond what --print_config checks.
    assert request(asked).grid.cells(recovers=False)
    grid = GridOptions(methods=asked["methods"], variants=asked["variants"])
    assert set(grid.variants or ()) <= set(grid.method_names)
    measured = CONFIGS.parent / name / f"{name}.yaml"
    if measured.is_file():
        wanted, found = flatten(yaml.safe_load(measured.read_text())), flatten(asked)
        assert {key: found[key] for key in wanted} == wanted


@pytest.fixture
def comparison(tiny_model_folder, prose_folder, tmp_path):
    """Return the command line of a comparison whose LoRA takes a while."""
    settings = {
        "methods": "slicegpt",
        "sparsities": 0.5,
        "model": str(tiny_model_folder),
        "data": str(prose_folder),
        "dtype": "float32",
        "slicegpt": {"num_windows": 2, "window_length": 32},
        "train": {"sequence_length": 32},
        "recover": {"steps": 200, "batch_size": 2, "sequence_length": 32, "checkpoint_every": 0},
        "eval": {"tokens": 128, "window": 32},
    }
    (tmp_path / "real.yaml").write_text(yaml.safe_dump(settings))
    where = [str(tmp_path / "real.yaml"), "--output", str(tmp_path / "runs")]
    return [sys.executable, str(FILE), "--gpus=", "--per_gpu=2", *where]


@pytest.mark.slow
def test_comparisons_end_with_checkpoints_and_go_on(comparison, tmp_path):
    """The whole of it: two processes, ended by Ctrl-C in the middle of LoRA."""
    cells = tmp_path / "runs/real/cells"
    with subprocess.Popen(comparison, stdout=subprocess.PIPE, text=True) as first:
        while len(list(cells.glob("*/recovered"))) < 2 and first.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        first.send_signal(signal.SIGINT)
        said = first.communicate()[0]
    checkpoints = [path.name for path in cells.glob("*/recovered/checkpoints/step-*")]
    assert first.returncode == 130, said
    assert len(checkpoints) == 2, said
    assert "killed" not in said
    done = subprocess.run(comparison, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "real: 4 of 4 stages finished" in done.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "runs/logs").iterdir())
    assert "the same command goes on from there" in logs
