"""The lock on an output folder: two runs never write into one, and a run that was killed locks nobody out."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from wide.cli.main import main
from wide.errors import ConfigError
from wide.report.reading import read_profile
from wide.runs.folder import RunFolder


def folder(path, config=None, **how):
    return RunFolder(path, config or {"steps": 1}, **{"resume": False, "overwrite": False} | how)


def test_two_runs_that_begin_at_once_do_not_both_write(tmp_path):
    first, second = folder(tmp_path / "run"), folder(tmp_path / "run", {"steps": 2})
    with first:
        first.claim()
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(ConfigError, match=f"is being written by {owner}"):
            second.claim()
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match=f"is being written by {owner}"):
                folder(tmp_path / "run", **how)
    # Its end leaves the folder to others, but not to what knew nothing of it.
    with pytest.raises(ConfigError, match="holds a run already"):
        second.claim()
    with folder(tmp_path / "run", resume=True) as third:
        third.claim()


def test_other_settings_are_refused_with_a_flag_to_paste(tmp_path):
    with folder(tmp_path / "my run") as first:
        first.claim()
    with pytest.raises(ConfigError, match=r"steps 1 -> 2\); continue it with --config '[^']*/my run/config\.yaml',"):
        folder(tmp_path / "my run", {"steps": 2}, resume=True)


def test_a_run_that_was_killed_locks_nobody_out(tmp_path):
    code = (
        "import sys, time\nfrom wide.runs.folder import RunFolder\n"
        "run = RunFolder(sys.argv[1], {'steps': 1}, resume=False, overwrite=False)\nrun.claim()\n"
        "print('claimed', flush=True)\ntime.sleep(600)\n"
    )
    given = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on"):
            folder(tmp_path / "run", overwrite=True)
        other.kill()
    with folder(tmp_path / "run", overwrite=True) as run:
        run.claim()


@pytest.mark.parametrize("how", [{}, {"overwrite": True}])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "{}/run/base"),
        ("model", "{}/run"),
        ("adapter", "{}/run"),
        ("adapter", "{}/link"),
        ("adapter", "{}/run/adapter"),
        ("data", "{}/run/base/*.jsonl"),
        ("data", "{}/run/base"),
        ("data", "{}"),
        ("data", "python-docs=1,{}/run/base/a.jsonl=1"),
        ("local_data", "{}/run"),
    ],
)
def test_what_is_read_is_never_replaced(key, value, how, tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/base/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run/config.yaml").write_text("steps: 1\n")
    (tmp_path / "link").symlink_to(tmp_path / "run/adapter")
    value = value.format(tmp_path)
    for config, flag in (({key: value}, f"--{key}"), ({"eval": {key: value}}, f"--eval.{key}")):
        with pytest.raises(ConfigError, match=rf"run holds or is part of {flag} .*; choose another folder"):
            folder(tmp_path / "run", config, **how)
    # Beside what is read, or in a folder of a model or a run, there is room.
    folder(
        tmp_path / "run/eval", {"model": str(tmp_path / "run"), "adapter": str(tmp_path / "run"), "data": "python-docs"}
    )
    folder(tmp_path / "other", {key: value} if value != str(tmp_path) else {}, **how)
    assert (tmp_path / "run/base/a.jsonl").is_file()


def test_speeds_of_the_run_that_is_replaced_go_with_it(tmp_path):
    for place in ("endtoend.json", "profile/endtoend.json", "profile/mine.json", "bench/coarse/operators.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text('{"records": []}')
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    with folder(tmp_path, resume=True) as run:
        run.claim()
    assert len(read_profile(tmp_path).files) == 3
    with folder(tmp_path, overwrite=True) as run:
        run.claim()
    assert not read_profile(tmp_path).files
    # What wide did not write stays.
    assert (tmp_path / "profile/mine.json").is_file()


def test_processes_that_share_a_comparison_keep_others_out(tmp_path):
    with folder(tmp_path / "run", shared=True) as first, folder(tmp_path / "run", shared=True) as second:
        first.claim()
        second.claim()
        with pytest.raises(ConfigError, match="is being written by process"):
            folder(tmp_path / "run", resume=True)


def test_file_systems_without_locks_are_told_of(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder(tmp_path / "run") as run:
        run.claim()
    assert "cannot be locked (No locks available): start no second run" in capsys.readouterr().out


def test_a_second_run_in_a_folder_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    # A folder of a model without a model: found, and refused when it is loaded.
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    given = ["prune", f"--model={empty}", "--data=python-docs", "--output", str(tmp_path / "run"), "--overwrite"]
    with folder(tmp_path / "run") as run:
        run.claim()
        assert main(given) == 1
        assert "is being written by process" in capsys.readouterr().err
    assert main(given) == 1
    assert f"can be loaded from '{empty}'" in capsys.readouterr().err


def test_a_run_continues_under_another_description_but_not_with_other_settings(tmp_path):
    with folder(tmp_path / "run", {"steps": 1, "description": "one"}) as run:
        run.claim()
    folder(tmp_path / "run", {"steps": 1, "description": ""}, resume=True)
    with pytest.raises(ConfigError, match="steps 1 -> 2"):
        folder(tmp_path / "run", {"steps": 2, "description": "one"}, resume=True)


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        ({"ddp": {"compile": False}, "train": {"adam_beta2": 0.999}}, None),
        ({"ddp": {"compile": True}}, "ddp.compile False -> True"),
        ({"train": {"adam_beta2": 0.9}}, "train.adam_beta2 0.999 -> 0.9"),
    ],
)
def test_a_run_goes_on_with_what_options_that_came_later_stand_at(now, refused, tmp_path):
    before = {"steps": 1}
    with folder(tmp_path / "run", before) as run:
        run.claim()
    if refused is None:
        folder(tmp_path / "run", before | now, resume=True)
        return
    with pytest.raises(ConfigError, match=refused):
        folder(tmp_path / "run", before | now, resume=True)
