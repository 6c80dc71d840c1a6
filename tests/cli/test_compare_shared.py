"""Processes that share a comparison cell by cell, and processes that are told to end in the middle of one."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import yaml

from wide.cli.main import main
from wide.comparison import run as cell_runner
from wide.comparison.cells import CellFolders, free_cells
from wide.comparison.grid import GridOptions
from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.records import Cell, Record, RecordFile, Stage, read_records
from wide.report.selection import Selection
from wide.runs.folder import RunFolder
from wide.runs.process import held, stoppable
from wide.training import trainer

SHORT = [
    *("--dtype=float32", "--device=cpu", "--sparsities=0.5", "--methods=slicegpt,wide"),
    *("--train.steps=4", "--train.batch_size=2", "--train.sequence_length=32", "--eval.tokens=128", "--eval.window=32"),
    *("--recover.steps=4", "--recover.batch_size=2", "--recover.sequence_length=32"),
]
A, B, C = (Cell(name, 0.5, 1) for name in "abc")


@pytest.fixture(scope="module")
def everyday(tiny_model_folder, prose_folder, tmp_path_factory, drawn_at_once):
    settings = tmp_path_factory.mktemp("settings") / "methods.yaml"
    wide = {"ffn_group_size": 16, "router_rank": 4}
    settings.write_text(yaml.safe_dump({"slicegpt": {"num_windows": 2, "window_length": 32}, "wide": wide}))
    where = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--config", str(settings)]
    return ["compare", *SHORT, *where, "--shard=next"]


def status(folder, subject):
    cell = subject.cell
    return Selection(*read_records(folder / "cells" / cell.folder / "records.jsonl")).text(subject, "status")


def test_one_process_holds_a_cell(tmp_path):
    with held(tmp_path / "cell") as mine:
        assert mine
        with held(tmp_path / "cell") as again, held(tmp_path / "other") as other:
            assert (again, other) == (False, True)
    with held(tmp_path / "cell") as mine:
        assert mine


def test_a_killed_process_holds_nothing(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom wide.runs.process import held\n"
        "with held(Path(sys.argv[1])) as mine:\n    print(mine, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline().strip() == "True"
        with held(tmp_path) as mine:
            assert not mine
        other.kill()
    with held(tmp_path) as mine:
        assert mine


def test_file_systems_without_locks_are_refused_with_the_way_out(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"No locks available.*a folder of its own"):
        list(free_cells([A], lambda cell: tmp_path / cell.method, lambda _: False))


def test_free_cells_leave_out_what_is_over_or_held_and_come_back_to_what_was_let_go(tmp_path):
    found, over = [], {A}
    with ExitStack() as others:
        assert others.enter_context(held(tmp_path / "b"))
        for cell in free_cells([A, B, C], lambda cell: tmp_path / cell.method, over.__contains__):
            found.append(cell)
            with held(tmp_path / cell.method) as mine:
                assert not mine
            # Its process dies; a cell that the other one has finished meanwhile is asked for after that.
            others.close()
    assert found == [C, B]
    assert list(free_cells([A, B, C], lambda cell: tmp_path / cell.method, {A, B, C}.__contains__)) == []


def test_what_takes_longest_is_begun_first():
    grid = GridOptions(
        methods="slicegpt,wide,tyr-few,ddp",
        variants={"tyr-few": {"method": "tyr", "generations": 2}},
        sparsities="0.25,0.5",
        shard="next",
    )
    cells = grid.own(grid.cells(recovers=False))
    names = [(cell.method, cell.sparsity) for cell in cells]
    assert names[:3] == [("dense", 0.0), ("tyr-few", 0.25), ("tyr-few", 0.5)]
    assert names[3:7] == [("wide", 0.25), ("ddp", 0.25), ("wide", 0.5), ("ddp", 0.5)]
    assert names[7:] == [("slicegpt", 0.25), ("slicegpt", 0.5)]


def test_a_folder_that_another_process_is_claiming_is_nobodys(tmp_path):
    (tmp_path / ".config.yaml.1.writing").write_text("half")
    RunFolder(tmp_path, {}, resume=True, overwrite=False)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder(tmp_path, {}, resume=True, overwrite=False)


def test_held_cells_are_left_to_their_process(everyday, tmp_path, monkeypatch, capsys):
    given = [*everyday, "--output", str(tmp_path / "run"), "--recover.steps=0"]
    claim = RunFolder.claim
    with ExitStack() as other, monkeypatch.context() as patch:
        place = tmp_path / "run/cells/wide-0.5-seed17"
        patch.setattr(RunFolder, "claim", lambda self: (claim(self), other.enter_context(held(place))))
        assert main(given) == 0
    said = capsys.readouterr().out
    assert "[3/3] slicegpt 0.5 seed 17: " in said
    assert "left     1 of 3 cells to the processes that hold them" in said
    assert not (place / "records.jsonl").exists()
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "[2/3] wide 0.5 seed 17: " in said
    assert "finished before" not in said
    assert "left  " not in said


@pytest.mark.parametrize(
    ("value", "seconds", "is_over"),
    [("no luck", -1, False), ("no luck", 0, True), ("no luck", 1, True), ("finished", -1, True), (None, 0, False)],
)
def test_what_failed_since_the_start_is_over_as_what_is_finished_is(tmp_path, value, seconds, is_over):
    stage = Stage(A, False)
    cells = CellFolders(SimpleNamespace(stages=lambda _: [stage]), SimpleNamespace(path=tmp_path))
    file = RecordFile(tmp_path / "cells" / A.folder / "records.jsonl")
    file.append([] if value is None else [Record(subject=stage, metric="status", value=value)])
    began = datetime.fromisoformat(cells.began)
    time = (began + timedelta(seconds=seconds)).isoformat()
    file.path.write_text(re.sub('"time": "[^"]*"', f'"time": "{time}"', file.path.read_text()))
    assert cells.is_over(A) == is_over


def test_every_row_is_rehearsed_with_the_first_seed_alone(everyday, tmp_path, monkeypatch):
    rehearsed = []

    def claim(_):
        raise ConfigError("after the rehearsal")

    monkeypatch.setattr(RunFolder, "claim", claim)
    monkeypatch.setattr(cell_runner.ComparisonRun, "_apply", lambda _, cell, output: rehearsed.append((cell, output)))
    assert main([*everyday, "--output", str(tmp_path / "run"), "--seeds=2,1,3"]) == 1
    assert rehearsed == [(Cell(method, 0.5, 2), None) for method in ("wide", "slicegpt")]


@pytest.mark.parametrize(
    ("name", "counted"), [("by-flops", True), ("wide-flops", True), ("wide", False), ("dense", False)]
)
def test_a_row_that_counts_in_its_own_way_says_so(tmp_path, name, counted):
    variant = {"method": "wide", "match": "linear_flops"}
    grid = GridOptions(methods="wide", variants={"by-flops": variant, "wide-flops": variant})
    report = dict.fromkeys([*cell_runner.SHARES, "tokens_forward", "tokens_backward", "seconds"], 0.0)
    report |= {"deviations": ["one of the method"], "settings": {}}
    records = cell_runner._stage_records(Stage(Cell(name, 0.5, 1), False), {cell_runner.PROVENANCE: report}, grid)
    said = next(record.value for record in records if record.metric == "deviations")
    words = "the target counts linear FLOPs of the decoder layers, in the other rows as the method does\n" * counted
    assert said == words + "one of the method"


def test_a_cell_is_told_in_words_as_far_as_it_was_measured():
    model = SimpleNamespace(perplexity=SimpleNamespace(perplexity=12.5), tasks=SimpleNamespace(average=0.5))
    saved = SimpleNamespace(linear_flops_layers=0.25)
    words = "perplexity 12.50, accuracy 50.0%, saves 25.0% of the layers' linear FLOPs"
    assert cell_runner._in_words(SimpleNamespace(model=model, sparsity=saved)) == words
    nothing = SimpleNamespace(perplexity=None, tasks=None)
    assert cell_runner._in_words(SimpleNamespace(model=nothing, sparsity=None)) == ""


def test_what_failed_is_tried_again_by_the_next_run_only(everyday, tmp_path, monkeypatch, capsys):
    given = [*everyday, "--output", str(tmp_path / "run"), "--recover.steps=0"]
    real, tried = cell_runner.apply, []

    def fail(model, method, *args, **kwargs):
        if kwargs["output"] is not None:
            tried.append(method.name)
        if tried[-1:] == ["wide"]:
            raise ConfigError("no luck")
        return real(model, method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cell_runner, "apply", fail)
        assert main(given) == 1
    assert tried == ["dense", "wide", "slicegpt"]
    assert "1 of 3 cells failed, see the table; the same command runs them again" in capsys.readouterr().err
    records = RecordFile(tmp_path / "run/cells/wide-0.5-seed17/records.jsonl")
    claim = RunFolder.claim

    def fail_elsewhere(self):
        claim(self)
        records.append(
            [Record(subject=Stage(Cell("wide", 0.5, 17), False), metric="status", value="no luck elsewhere")]
        )

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "claim", fail_elsewhere)
        assert main(given) == 0
    assert status(tmp_path / "run", Stage(Cell("wide", 0.5, 17), False)) == "no luck elsewhere"
    # As if this had been long before the next run, and not within the same second.
    records.path.write_text(records.path.read_text().replace('"time": "2', '"time": "1'))
    assert main(given) == 0
    assert status(tmp_path / "run", Stage(Cell("wide", 0.5, 17), False)) == "finished"


@pytest.mark.parametrize(("stage", "folder"), [("stage 1", "training"), ("stage 1+2", "recovered")])
def test_sigterm_in_training_keeps_a_checkpoint_and_the_same_command_goes_on(
    stage, folder, everyday, tmp_path, monkeypatch, capsys
):
    given = [*everyday, "--output", str(tmp_path / "run"), "--methods=wide"]
    real, steps = trainer.Trainer._step, []

    def step(self, number):
        real(self, number)
        if self._options.title == stage and attachment(self._model).plan.is_routed:
            steps.append(number)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer.Trainer, "_step", step)
    assert main(given) == 130
    said = capsys.readouterr().err
    assert "wide 0.5 seed 17" in said
    assert "stopped after step 2 of 4; its last checkpoint is kept; 1 of 2 cells is finished and kept" in said
    assert "the same command goes on from there" in said
    checkpoints = tmp_path / "run/cells/wide-0.5-seed17" / folder / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    assert main(given) == 0
    assert steps == [0, 1, 2, 3]
    assert all(status(tmp_path / "run", Stage(Cell("wide", 0.5, 17), done)) == "finished" for done in (False, True))


def test_sigterm_in_an_evaluation_costs_that_evaluation_only(everyday, tmp_path, monkeypatch, capsys):
    given = [*everyday, "--output", str(tmp_path / "run"), "--methods=slicegpt"]
    real, real_apply, decided = cell_runner.Materials.measure, cell_runner.apply, []

    def measure(self, subject):
        if subject == Stage(Cell("slicegpt", 0.5, 17), False):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, subject)

    def note(model, method, *args, **kwargs):
        # The rehearsal writes nowhere.
        decided.extend([method.name] if kwargs["output"] is not None else [])
        return real_apply(model, method, *args, **kwargs)

    monkeypatch.setattr(cell_runner, "apply", note)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(cell_runner.Materials, "measure", measure)
        assert main(given) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err
    assert "wide: interrupted: [2/2] slicegpt 0.5 seed 17 stopped by SIGTERM; what it decided is kept" in said
    assert main(given) == 0
    assert decided == ["dense", "slicegpt"]
    assert "slicegpt 0.5 seed 17: finished before" not in capsys.readouterr().out
    assert status(tmp_path / "run", Stage(Cell("slicegpt", 0.5, 17), True)) == "finished"


def test_sigterm_outside_the_main_thread_is_left_alone():
    before, found = signal.getsignal(signal.SIGTERM), []

    def look():
        with stoppable(str):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
