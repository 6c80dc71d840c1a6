"""The entry point: exit codes, messages without tracebacks, and a quick help."""

import errno
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from wide.cli import inspect, prune
from wide.cli.main import COMMANDS, main
from wide.cli.recipes import recipe_path
from wide.version import __version__


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "wide.cli.main", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["prune", "--help"], ["eval", "--help"]])
def test_help_is_quick_and_imports_no_torch(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "wide.cli.main", *arguments], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0
    assert "usage: wide" in result.stdout
    assert " torch" not in result.stderr
    assert " transformers" not in result.stderr
    # Of the processor, because the machine may be busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_model_that_was_inspected_before_is_inspected_without_torch(tiny_model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path))
    assert main(["inspect", "--model", str(tiny_model_folder)]) == 0
    command = [sys.executable, "-X", "importtime", "-m", "wide.cli.main", "inspect", "--model", str(tiny_model_folder)]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.stdout == capsys.readouterr().out
    assert "can be pruned" in second.stdout
    assert " torch" not in second.stderr


@pytest.mark.parametrize("changed", ["config.py", "data/local_names.py", "models/cost.py"])
def test_an_answer_of_other_code_is_not_used(changed, tiny_model_folder, tmp_path, monkeypatch):
    package = tmp_path / "wide"
    for name in ("cli/inspect.py", changed):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    answers = iter(("old", "new"))
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inspect, "__file__", str(package / "cli/inspect.py"))
    monkeypatch.setattr(inspect, "describe_model", lambda _name: next(answers))
    assert [inspect._known_or_described(str(tiny_model_folder)) for _ in range(2)] == ["old", "old"]
    os.utime(package / changed, (1, 1))
    assert inspect._known_or_described(str(tiny_model_folder)) == "new"


def test_import_wide_is_light():
    code = (
        "import sys, wide, wide.cli.main, wide.config; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert f"wide {command}" in told
    # What a beginner reads; the rest is in --help_all.
    assert len(told.splitlines()) <= 45
    assert "None" not in told


def test_help_all_explains_every_flag(capsys):
    assert main(["prune", "--help"]) == 0
    brief = capsys.readouterr().out
    assert main(["prune", "--help_all"]) == 0
    told = capsys.readouterr().out
    assert "None" not in told
    for flag in prune.arguments().known_keys():
        assert f"--{flag} " in told.replace("\n", " ")
        assert f"--{flag}" in brief or f"--{flag.partition('.')[0]}.*" in brief


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "the memory is full; use smaller batches",
        ),
        (MemoryError(), "the memory is full; use smaller batches"),
        (
            RuntimeError("unable to mmap 9 bytes from file <model.bin>: Cannot allocate memory (12)"),
            "the memory is full; use smaller batches",
        ),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "the memory is full; use smaller batches"),
        (RuntimeError("CUDA error: out of memory"), "the memory is full; use smaller batches"),
        (RuntimeError("two\nlines"), "RuntimeError: two lines; what was written before is kept (--debug"),
    ],
)
def test_what_nobody_foresaw_is_one_sentence(error, words, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr("wide.cli.env._facts", fail)
    assert main(["env"]) == 1
    assert f"wide: error: {words}" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"wide {__version__}\n"


def test_env_tells_versions_and_devices(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path))
    assert main(["env"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["wide"] == __version__
    assert facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["WIDE_CACHE"] == str(tmp_path)
    assert {"gpu", "gpu-0"} & set(facts)
    assert main(["env", "all"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, None),
        (["prun"], 2, "did you mean wide prune?"),
        (["prune"], 2, "required"),
        (["prune", "--ffn_group_sise", "3"], 2, "did you mean --ffn_group_size?"),
        (["recipes", "show", "paper-5"], 2, "did you mean paper-50?"),
        (["recipes", "burn"], 2, "usage"),
        (["eval", "--model", "M"], 2, "nothing to evaluate"),
        (["eval", "--model", "M", "--data", "D", "--tokens", "0"], 2, "nothing to evaluate"),
        (["inspect", "--model", "M", "--adapter", "A"], 2, "got both"),
        (["eval", "--model", "M", "--data", "D", "--fused"], 2, "give --adapter"),
        (["eval", "--model", "M", "--data", "D", "--limit", "5"], 2, "--limit 5 is for tasks, and none is named"),
        (["eval", "--model", "M", "--data", "D", "--local_data=X", "--tasks", ","], 2, "--local_data X is for tasks"),
        (["eval", "--model", "M", "--tasks", "piqa", "--limit", "-3"], 1, "limit must be at least 1 or null, got -3"),
        (["eval", "--model", "M", "--tasks", "piqa", "--limit", "0"], 1, "limit must be at least 1 or null, got 0"),
        (["inspect"], 2, "got neither"),
        (["prune", "--model", "M", "--data", "D", "--output", "O", "--train.seed", "-1"], 1, "train.seed must lie in"),
        (["prune", "--model", "M", "--data", "D", "--output", "O", "--train.seed", "1" + "0" * 20], 1, "must lie in"),
        (["generate", "--model", "M"], 2, "give --prompt with the beginning of the text, or --chat"),
        (["generate", "--model", "M", "--prompt", "a", "--system", "b"], 2, "give --chat, too"),
        (["serve", "--model", "M", "--port", "70000"], 1, "port must lie in [1, 65535], got 70000"),
        (["generate", "--model", "M", "--prompt", "a", "--seed", "-1"], 1, "seed must lie in"),
        (["prune", "--model", "M", "--data", "D", "--output", "O", "--sparsity", "1.5"], 1, "0.5 skips half"),
        (["inspect", "--adapter", "nowhere"], 1, "there is no folder 'nowhere'; check the path"),
        (["inspect", "--model", "./nowhere"], 1, "there is no folder './nowhere'"),
    ],
)
def test_errors_have_codes_and_messages_and_no_traceback(arguments, code, words, capsys):
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert words is None or words in error


def test_a_file_may_serve_evaluations_with_tasks_and_without(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("local_data: tasks\nlimit: 5\n")
    assert main(["eval", "--config", str(file), "--model", "./nowhere", "--data", "D"]) == 1
    assert "./nowhere" in capsys.readouterr().err


def test_what_nobody_foresaw_ends_in_one_sentence(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("the sky\nhas fallen")

    monkeypatch.setattr("wide.cli.recipes.run", fail)
    assert main(["recipes", "list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("wide: error: RuntimeError: the sky has fallen; what was written before is kept (--debug")
    assert said.count("\n") == 1
    with pytest.raises(RuntimeError):
        main(["recipes", "list", "--debug"])


def test_debug_shows_the_traceback():
    result = run("recipes", "nowhere", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_ctrl_c_exits_with_130_and_says_what_was_kept(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt("step 12 was kept")

    monkeypatch.setattr("wide.cli.recipes.run", interrupt)
    assert main(["recipes", "list"]) == 130
    assert "step 12 was kept" in capsys.readouterr().err


def test_ctrl_c_promises_nothing_that_no_command_has_said(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("wide.cli.recipes.run", interrupt)
    assert main(["recipes", "list"]) == 130
    assert capsys.readouterr().err == "wide: interrupted\n"


def test_recipes_can_be_listed_and_shown(capsys):
    assert main(["recipes", "list"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["recipes", "show", "paper-50"]) == 0
    assert capsys.readouterr().out == recipe_path("paper-50").read_text()


def test_pruning_nothing_is_refused(capsys):
    assert main(["prune", "--model", "M", "--data", "D", "--sparsity", "0", "--output", "O"]) == 2
    error = capsys.readouterr().err
    assert "--sparsity 0 leaves nothing to prune" in error
    assert "wide eval --sparsity 0" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("wide pr", {"prune", "profile"}),
        ("wide prune --ffn_g", {"--ffn_group_size", "--ffn_grouping"}),
        ("wide prune --method tyr --tyr.prop", {"--tyr.propagation"}),
        ("wide prune --config nowhere.yaml --method ty", {"tyr"}),
        ("wide eval --dtype ", {"auto", "float32", "bfloat16", "float16"}),
        ("wide compare --config quick", {"quickstart"}),
        ("wide generate --model REA", {"README.md"}),
        ("wide recipes sh", {"show"}),
        ("wide recipes show qu", {"quickstart"}),
        ("wide methods ", {"list"}),
    ],
)
def test_a_shell_is_told_how_a_line_goes_on(line, words, tmp_path):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    told |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "wide.cli.main"], env=os.environ | told, cwd=root, check=True, timeout=100)
    assert {word.strip() for word in answer.read_text().splitlines()} == words


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "--data=python-docs", "--output=O"],
        ["recover", "--data=python-docs", "--output=O", "--adapter=A"],
        ["compare", "--data=python-docs", "--output=O", "--methods=wide", "--sparsities=0.5"],
        ["eval", "--data=python-docs"],
        ["generate", "--prompt=a"],
        ["serve"],
    ],
    ids=lambda words: words[0],
)
def test_a_model_or_text_that_is_nowhere_is_told_before_anything_heavy_is_imported(
    words, monkeypatch, tmp_path, capsys
):
    def silent(_name, _kind):
        raise OSError("no answer")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wide.data.local_names._ask_hub", silent)
    for name in ("wide.runs.run", "wide.comparison.run", "wide.evaluation.evaluate", "wide.runs.serving", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([words[0], "--model=some/unknown", *words[1:]]) == 1
    assert "there is no folder 'some/unknown'" in capsys.readouterr().err
    assert main([words[0], f"--model={tmp_path}", *words[1:]]) == 1
    assert f"{tmp_path} holds no config.json, so it is no model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    for word in words[1:]:
        flag, _, source = word.partition("=")
        if source == "python-docs":
            assert main([words[0], f"--model={tmp_path}", *words[1:], f"{flag}=some/text"]) == 1
            assert "cache has no dataset of this name" in capsys.readouterr().err


def test_warnings_of_commands_have_no_place_in_the_source(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert main(["methods"]) == 0
    assert warnings.formatwarning("as it is said", UserWarning, "evaluate.py", 130) == "warning: as it is said\n"
