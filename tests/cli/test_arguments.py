"""The schema: flags and YAML are the same keys, unknown ones are refused, and what was resolved can be fed back."""

import re

import pytest
import yaml

from benchmarks import bench
from wide.cli import compare, evaluate, profile, prune, recover
from wide.cli.arguments import field_texts
from wide.cli.main import main
from wide.cli.recipes import recipe_command, recipe_names, recipe_path
from wide.config import RecoverConfig
from wide.errors import ConfigError, UsageError
from wide.profiling.options import ProfileOptions
from wide.runs.folder import resolved, save_config
from wide.runs.settings import build

EVERYDAY = ["--model", "M", "--data", "D", "--output", "O"]


def parse(*more):
    return prune.arguments().parse([*EVERYDAY, *more])


def test_everyday_flags_reach_the_configurations():
    asked = prune.request(
        parse("--sparsity", "0.25", "--ffn_group_size", "64", "--train.steps", "7", "--objective.target", "uniform")
    )
    assert asked.objective.sparsity == 0.25
    assert asked.objective.target == "uniform"
    assert asked.settings.ffn_group_size == 64
    assert asked.settings.attention_group_size is None
    assert asked.stage.steps == 7
    assert asked.recover is None


def test_steps_of_recover_switch_stage_2_on():
    asked = prune.request(parse("--recover.steps", "9"))
    assert isinstance(asked.recover, RecoverConfig)
    assert asked.recover.steps == 9
    assert asked.recover.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--ffn_group_sise", "--ffn_group_size"),
        ("--ffn-group-size", "--ffn_group_size"),
        ("--train.stepz", "--train.steps"),
        ("--recover.lora_rnak", "--recover.lora_rank"),
        ("--learning_rate", "learning_rate"),
    ],
)
def test_unknown_flag_is_refused_with_the_nearest(flag, nearest):
    with pytest.raises(UsageError, match=f"no flag {flag}; did you mean .*{nearest}"):
        parse(flag, "3")


def test_a_flag_is_known_by_the_name_that_it_has_in_the_other_command():
    assert prune.request(parse("--wide.ffn_group_size", "64")).settings.ffn_group_size == 64
    flags = compare.arguments(["wide", "slicegpt"])
    for flag in ("--ffn_group_size=64", "--wide.ffn_group_size=64"):
        values = flags.parse([*EVERYDAY, "--methods=wide,slicegpt", flag])
        assert compare.request(values).settings["wide"].ffn_group_size == 64


@pytest.mark.parametrize(
    ("command", "given", "key", "value"),
    [
        (evaluate, ["--model=M", "--eval.window=64"], ("window",), 64),
        (recover, [*EVERYDAY, "--adapter=A", "--steps=7"], ("recover", "steps"), 7),
        (recover, [*EVERYDAY, "--adapter=A", "--lora_rank", "4"], ("recover", "lora_rank"), 4),
        (prune, [*EVERYDAY, "--window", "64"], ("eval", "window"), 64),
    ],
)
def test_a_flag_may_be_spelled_as_in_other_commands_where_only_one_is_meant(command, given, key, value):
    found = command.arguments().parse(given)
    for name in key:
        found = found[name]
    assert found == value


@pytest.mark.parametrize("given", ["--batch_size=3", "--sequence_length=3", "--train.lora_rank=3", "--eval.steps=3"])
def test_a_flag_that_two_may_mean_is_refused(given):
    with pytest.raises(UsageError, match=r"has no flag --.*; did you mean"):
        parse(given)


@pytest.mark.parametrize(
    ("settings", "key", "nearest"),
    [
        ({"ffn_group_sise": 3}, "ffn_group_sise", "ffn_group_size"),
        ({"ffn-group-size": 3}, "ffn-group-size", "ffn_group_size"),
        ({"train": {"stesp": 3}}, "train.stesp", "train.steps"),
        ({"trian": {"steps": 3}}, "trian", "train"),
        ({"train": {"steps": 3, "objective": {"target": "mean"}}}, "train.objective", "objective"),
        ({"description": "x", "steps": 3}, "steps", "steps"),
    ],
)
def test_unknown_key_of_a_file_is_refused_at_any_depth(tmp_path, settings, key, nearest):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(UsageError, match=f"no key '{key}'; did you mean .*{nearest}"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    "more",
    [
        ("--train.steps", "many"),
        ("--train.steps", "2.5"),
        ("--objective.target", "flops"),
        ("--router_input", "raw"),
        ("--report", "perhaps"),
        ("stray",),
        ("--sparsity",),
        ("--config",),
    ],
)
def test_wrong_values_are_refused_in_one_paragraph(more):
    with pytest.raises(UsageError) as caught:
        parse(*more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        ("--sparsity", "1.0"),
        ("--train.batch_size", "0"),
        ("--train.weight_decay", "-1"),
        ("--recover.weight_decay", "-0.1"),
        ("--recover.lora_alpha", "0"),
        ("--max_documents", "0"),
        ("--eval.stride", "4096"),
    ],
)
def test_values_out_of_range_are_refused(more):
    with pytest.raises(ConfigError, match=r"got|wanted"):
        prune.request(parse("--recover.steps", "1", *more))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--train.batch_size=0"], "train.batch_size must be at least 1, got 0"),
        (["--eval.batch_size=0"], "eval.batch_size must be at least 1, got 0"),
        (["--recover.steps=-1"], "recover.steps must be at least 0, got -1; 0 leaves LoRA out"),
        (["--recover.steps=1", "--recover.lora_rank=0"], "recover.lora_rank must be at least 1"),
        (["--eval.window=0"], "eval.window=0 and stride=None: wanted 1 <= stride"),
        (["--objective.weight=-1"], "objective.weight must be at least 0"),
        (["--train.temperature_end=0"], "train.temperature_end must be above 0"),
        # Flags of no group, one of which is checked together with a group.
        (["--sparsity=1.0"], "sparsity must lie in"),
        (["--ffn_group_size=0"], "ffn_group_size must be at least 1"),
    ],
)
def test_values_out_of_range_are_named_as_their_flags_are(more, words):
    with pytest.raises(ConfigError) as caught:
        prune.request(parse(*more))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("prune", "method: null"),
        ("prune", "router_bias: null"),
        ("prune", "eval: {window: null}"),
        ("prune", "method: tyr\ntyr: {stage_tokens: null}"),
        ("eval", "tasks: null"),
        ("bench", "operators: null"),
        ("tune", "executed: null"),
        ("profile", "calls: null"),
        ("compare", "shard: [1]"),
        ("prune", "train: 5"),
        ("report", "folders: {a: 1}"),
    ],
)
def test_what_a_setting_cannot_be_is_refused_in_words(command, settings, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(settings + "\n")
    words = {"prune": EVERYDAY, "bench": EVERYDAY[4:], "report": ["."]}.get(command, EVERYDAY[:2])
    assert main([command, "--config", str(path), *words]) != 0
    said = capsys.readouterr().err
    assert said.startswith("wide: error: ")
    assert "Error:" not in said.removeprefix("wide: error: ")
    if "null" in settings:
        assert "must not be null; give a value, or leave it out" in said


def test_settings_of_methods_are_named_as_their_flags_are():
    flags = prune.arguments("dllm-original")
    with pytest.raises(ConfigError, match=r"^dllm-original\.router_rank must be at least 1, got 0"):
        prune.request(flags.parse([*EVERYDAY, "--method=dllm-original", "--dllm-original.router_rank=0"]))


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n"])
def test_an_empty_file_is_called_empty(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"c.yaml is empty; write keys and values into it"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: D\nsparsity: 0.3\nsparsity: 0.5\n", "line 3: the key 'sparsity' stands in line 2 already; keep one"),
        ("train: {steps: 1, steps: 2}\n", "line 1: the key 'steps' stands in line 1 already; keep one"),
        ("train: {steps: 1}\ntrain.steps: 2\n", "c.yaml: train.steps and train.steps are one key; keep one of them"),
        ("dense-x: 1\nmax_documents: 3\nmax-documents: 2\n", "max_documents and max-documents are one key"),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(tmp_path, text, said):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("command", "recipe", "owner"),
    [("prune", "compare-nano", "compare"), ("compare", "paper-50", "prune"), ("recover", "fig-kernels", "bench")],
)
def test_a_recipe_of_another_command_says_whose_it_is(command, recipe, owner, capsys):
    assert main([command, "--config", recipe, "--model=M", "--data=D", "--output=O"]) == 2
    said = capsys.readouterr().err
    assert f"{recipe} is a recipe of wide {owner}, not of wide {command}: run wide {owner} --config {recipe}" in said


def test_missing_model_is_named():
    with pytest.raises(UsageError, match="model"):
        prune.arguments().parse(["--data", "D", "--output", "O"])


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words", "\x00"])
def test_files_that_are_no_configuration_are_refused(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError):
        parse("--config", str(file))


def test_flags_win_over_files_wherever_they_stand(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("sparsity: 0.1\ntrain: {steps: 5, seed: 3}\n")
    values = parse("--train.steps", "6", "--config", str(file))
    assert values["train"]["steps"] == 6
    assert values["train"]["seed"] == 3
    assert values["sparsity"] == 0.1


def test_a_file_describes_a_run_and_a_recipe_does_not(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("description: five steps\ntrain: {steps: 5}\n")
    assert parse("--config", str(file))["description"] == "five steps"
    assert parse("--config", "fitted-50")["description"] == ""
    assert parse("--config", "fitted-50", "--description", "mine")["description"] == "mine"


def test_resolved_configuration_gives_the_same_run_again(tmp_path):
    values = parse("--sparsity", "0.3", "--train.learning_rate", "1e-3", "--recover.steps", "4", "--overwrite")
    save_config(tmp_path / "config.yaml", resolved(values))
    again = prune.arguments().parse(["--config", str(tmp_path / "config.yaml")])
    assert prune.request(again) == prune.request(values)
    assert not again["overwrite"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_fits_the_schema_and_says_what_it_is_for(name):
    settings = yaml.safe_load(recipe_path(name).read_text())
    assert settings["description"]
    places = [argument for key in ("model", "data") if key not in settings for argument in (f"--{key}", "X")]
    given = ["--config", name, "--output", "O", *places]
    if recipe_command(settings) in ("bench", "profile"):
        command, options = {
            "bench": (bench, bench.BenchOptions),
            "profile": (profile, ProfileOptions),
        }[recipe_command(settings)]
        build(options, command.arguments().parse(["--config", name, "--output", "O"]))
        return
    if recipe_command(settings) == "compare":
        compare.request(compare.arguments(settings["methods"].split(",")).parse(given))
    else:
        prune.request(prune.arguments(in_files=settings).parse(given))


def test_group_sizes_are_swept_as_in_the_paper():
    settings = yaml.safe_load(recipe_path("fig-group-size").read_text())
    sizes = {
        name: (variant["ffn_group_size"], variant["attention_group_size"])
        for name, variant in settings["variants"].items()
    }
    assert set(sizes.values()) == {(16 << n, 512) for n in range(6)} | {(32, 128 << n) for n in range(6)}
    assert all(name == f"f{ffn}-a{attention}" for name, (ffn, attention) in sizes.items())
    assert sorted(settings["methods"].split(",")) == sorted(sizes)


def test_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean quickstart"):
        parse("--config", "quikstart")


def test_every_field_of_every_configuration_has_a_help_text():
    texts = field_texts(RecoverConfig)
    assert texts["lora_rank"].startswith("r of LoRA")
    assert texts["learning_rate"].startswith("Peak for LoRA")
    assert texts["steps"].startswith("Optimiser steps")
