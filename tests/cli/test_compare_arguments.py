"""Which words `wide compare` and `wide prune --method` take, and what they mean."""

import subprocess
import sys

import pytest
import yaml

from wide.cli import compare, prune
from wide.cli.arguments import look_ahead
from wide.cli.main import main
from wide.comparison.grid import GridOptions, as_many_tokens
from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.errors import ConfigError, UsageError
from wide.methods.catalogue import DDPConfig, DenseConfig, SliceGPTConfig, TyrConfig, WideMethodConfig, get, names
from wide.records import Cell
from wide.runs.folder import RunFolder, resolved, save_config

EVERYDAY = ["--model", "M", "--data", "D", "--output", "O"]


def asked(*more, methods="slicegpt,tyr"):
    values = compare.arguments(methods.split(",")).parse([*EVERYDAY, "--methods", methods, *more])
    return compare.request(values)


def test_settings_reach_their_method():
    request = asked("--slicegpt.num_windows", "5", "--tyr.stage_tokens", "[64, 128]", "--tyr.survivors", "[2]")
    assert request.settings["slicegpt"] == SliceGPTConfig(num_windows=5)
    assert request.settings["tyr"].stage_tokens == (64, 128)
    assert request.settings["dense"] == DenseConfig()


def test_a_saved_comparison_is_recognised(tmp_path):
    # Týr's settings hold tuples, which YAML does not know.
    values = resolved(compare.arguments(["tyr"]).parse([*EVERYDAY, "--methods", "tyr"]))
    RunFolder(tmp_path / "run", values, resume=False, overwrite=False).claim()
    RunFolder(tmp_path / "run", values, resume=True, overwrite=False)
    other = resolved(compare.arguments(["tyr"]).parse([*EVERYDAY, "--methods", "tyr", "--tyr.stage_tokens", "[1]"]))
    with pytest.raises(ConfigError, match="stage_tokens"):
        RunFolder(tmp_path / "run", other, resume=True, overwrite=False)


def test_names_with_dashes_have_flags_and_keys_with_dashes(tmp_path):
    request = asked("--shortened-ppl.num_windows", "5", methods="shortened-ppl")
    assert request.settings["shortened-ppl"].num_windows == 5
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"methods": "shortened-ppl", "shortened-ppl": {"num_windows": 6}}))
    values = compare.arguments(["shortened-ppl"]).parse(["--config", str(file), *EVERYDAY])
    assert compare.request(values).settings["shortened-ppl"].num_windows == 6
    save_config(tmp_path / "again.yaml", resolved(values))
    again = compare.arguments(["shortened-ppl"]).parse(["--config", str(tmp_path / "again.yaml")])
    assert compare.request(again) == compare.request(values)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["compare", "--methods", "tyr", "--slicegpt.round_to", "4"],
            "flag of method slicegpt, and the command runs --met",
        ),
        (["compare", "--methods", "tyr", "--train.seed", "3"], "--seeds are those of every stage"),
        (["compare", "--methods", "tyr,slicegpta"], "did you mean slicegpt?"),
        (["compare", "--methods", "tyr,tyr"], "different values"),
        (["compare", "--methods", "dense"], "different values"),
        # Both would be in the folder tyr-0.333333-seed17.
        (["compare", "--methods", "tyr", "--sparsities", "0.3333331,0.3333332"], "different values"),
        (["compare", "--methods", "tyr", "--sparsities", "0,0.5"], "lie in (0, 1)"),
        (["compare", "--methods", "tyr", "--sparsities", "half"], "must be numbers"),
        (["compare", "--methods", "tyr", "--seeds", "1.5"], "whole numbers"),
        (["compare", "--methods", "tyr", "--shard", "1/2"], "shard: "),
        (["compare", "--methods", "tyr", "--shard", "next", "--overwrite"], "remove the folder"),
        (["compare", "--methods", "tyr", "--eval.tokens", "0"], "nothing to compare by"),
        (["compare"], "required"),
        (["prune", "--method", "slicegpta"], "did you mean slicegpt?"),
        (["prune", "--method", "tyr", "--slicegpt.round_to", "4"], "flag of method slicegpt"),
        (["prune", "--method", "tyr", "--ffn_group_size", "64"], "flag of method wide"),
        (["prune", "--method", "tyr", "--train.steps", "64"], "for methods that train routers"),
        (["prune", "--method", "tyr", "--objective.weight", "1"], "for methods that train routers"),
        (["prune", "--method", "skipgpt", "--objective.target", "mean"], "skipgpt takes --match"),
        (["prune", "--wide.uniform", "true"], "without a prefix"),
        (["prune", "--method", "skipgpt", "--tracker", "wandb"], "runs --method skipgpt --match nominal"),
        (["prune", "--match", "linear_flops", "--tracker", "wandb"], "runs --method wide --match linear_flops"),
        (["compare", "--methods", "wide", "--variants", "{a:"], "--variants cannot be read as YAML"),
        (["compare", "--methods", "wide", "--variants", "{a: {}, a: {}}"], "the key 'a' stands in line 1 already"),
        (["methods", "burn"], "cannot understand"),
    ],
)
def test_misplaced_words_are_refused_with_the_reason(arguments, words, capsys):
    more = EVERYDAY if arguments[0] in ("prune", "compare") else []
    assert main([*arguments, *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("method", [name for name in names() if get(name).trains])
def test_every_trained_method_takes_the_same_of_the_objective(method):
    wanted = {"weight": 3.0, "distillation": 0.5, "smoothing": 0.05}
    given = [word for name, value in wanted.items() for word in (f"--objective.{name}", str(value))]
    alone = prune.request(prune.arguments(method).parse([*EVERYDAY, "--method", method, *given])).objective
    together = asked(*given, methods=method).objective
    assert alone == together == ObjectiveConfig(**wanted)


def test_every_row_gets_the_lora_that_the_objective_asks_for():
    lora, taught = ["--recover.steps", "5"], ["--objective.distillation", "0.5"]
    found = [
        asked(*lora, *more).recover.distillation for more in ([], taught, [*taught, "--recover.distillation", "0"])
    ]
    assert found == [None, 0.5, 0.0]


def test_a_file_may_say_where_the_data_of_tasks_lies_that_a_comparison_does_not_score(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"eval": {"local_data": "tasks", "limit": 5}}))
    tasks = asked("--config", str(file)).tasks
    assert (tasks.names, tasks.local_data, tasks.limit) == ([], "tasks", 5)
    with pytest.raises(ConfigError, match="limit must be at least 1 or null, got -3"):
        asked("--eval.limit", "-3")


@pytest.mark.parametrize("method", ["tyr", "wide", "skipgpt"])
def test_a_file_may_serve_runs_of_other_methods(method, tmp_path):
    file = tmp_path / "c.yaml"
    settings = {"slicegpt": {"round_to": 4}, "ffn_group_size": 32, "train": {"steps": 3, "seed": 4}}
    file.write_text(yaml.safe_dump(settings))
    given = ["--config", str(file), "--method", method, *EVERYDAY]
    flags = prune.arguments(method, look_ahead(given))
    asked = prune.request(flags.parse(given))
    assert (asked.method, asked.stage.seed) == (method, 4)
    assert asked.settings == WideConfig(ffn_group_size=32) if method == "wide" else get(method).settings()
    with pytest.raises(UsageError, match=f"flag of method slicegpt, and the command runs --method {method}"):
        flags.parse([*given, "--slicegpt.round_to", "4"])
    if method == "tyr":
        for flag in ("--ffn_group_size=32", "--train.steps=3"):
            with pytest.raises(UsageError, match=r"flag of method wide|for methods that train routers"):
                flags.parse([*given, flag])


def test_a_file_may_serve_comparisons_of_other_methods(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"shortened-ppl": {"num_windows": 5}}))
    flags = compare.arguments(["tyr"], ["shortened-ppl"])
    request = compare.request(flags.parse(["--config", str(file), "--methods", "tyr", *EVERYDAY]))
    assert set(request.settings) == {"dense", "tyr"}
    with pytest.raises(UsageError, match="flag of method shortened-ppl"):
        flags.parse(["--methods", "tyr", "--shortened-ppl.num_windows", "5", *EVERYDAY])


@pytest.mark.parametrize("arguments", [["compare", "--methods", "tyr,ddp"], ["prune", "--method", "tyr"], ["methods"]])
def test_help_and_wrong_words_need_no_torch(arguments):
    code = (
        "import sys; from wide.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or int('torch' in sys.modules))"
    )
    for more, expected in (["--help"], 0), (["--nonsense", "1"], 2):
        result = subprocess.run([sys.executable, "-c", code, *arguments, *more], capture_output=True, text=True)
        assert result.returncode == expected, result.stderr


def test_the_default_of_prune_is_the_papers_method():
    request = prune.request(prune.arguments().parse(EVERYDAY))
    assert (request.method, request.match, type(request.settings).__name__) == ("wide", "nominal", "WideConfig")


def test_wide_at_linear_flops_counts_as_the_other_methods_do():
    more = ["--match", "linear_flops", "--ffn_group_size", "64"]
    request = prune.request(prune.arguments().parse([*EVERYDAY, *more, "--objective.target", "uniform"]))
    assert request.settings == WideMethodConfig(ffn_group_size=64, uniform=True)
    with pytest.raises(ConfigError, match="says itself what is counted"):
        prune.request(prune.arguments().parse([*EVERYDAY, *more, "--objective.target", "linear_flops"]))


def test_looking_ahead_follows_the_flags_before_the_files(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("method: slicegpt\n")
    assert look_ahead(["--config", str(file)]) == {"method": "slicegpt"}
    assert look_ahead(["--method=tyr", "--config", str(file)]) == {"method": "tyr"}
    assert look_ahead(["--resume", "--method", "tyr", "--method", "ddp"])["method"] == "ddp"
    assert "method" not in look_ahead(["--sparsity", "0.5"])


def grid(**changes):
    return GridOptions(**{"methods": "slicegpt,tyr", "sparsities": "0.5,0.25", "seeds": "1,2"} | changes)


def test_cells_are_all_combinations_and_dense_once():
    cells = grid().cells(recovers=False)
    assert cells[0] == Cell("dense", 0.0, 1)
    assert len(cells) == len(set(cells)) == 1 + 2 * 2 * 2
    assert len(grid().cells(recovers=True)) == 2 + 2 * 2 * 2


def test_a_shard_is_next_or_nothing():
    cells = grid().cells(recovers=True)
    assert sorted(grid(shard="next").own(cells)) == sorted(grid().own(cells)) == sorted(cells)
    with pytest.raises(ConfigError, match="shard must be 'next'"):
        grid(shard="1/2")


def test_all_methods_can_be_named_at_once():
    assert grid(methods="all").method_names == [name for name in names() if name != "dense"]
    assert grid(methods="dense,tyr").method_names == ["tyr"]


STAGE = StageConfig(steps=10, batch_size=4, sequence_length=64)
MUCH = 10**9


def test_the_equal_budget_is_the_text_that_routers_read():
    ddp = as_many_tokens(DDPConfig(batch_size=2, sequence_length=None), STAGE, MUCH)
    assert ddp.steps * 2 * 64 == 10 * 4 * 64
    tyr = as_many_tokens(TyrConfig(window_length=32), STAGE, MUCH)
    assert tyr.num_windows * tyr.window_length == 10 * 4 * 64
    assert as_many_tokens(TyrConfig(window_length=32), STAGE, 320).num_windows == 10
    # Two windows of 24 fit into each of the five blocks of 64.
    assert as_many_tokens(TyrConfig(window_length=24), STAGE, 320).num_windows == 10
    assert as_many_tokens(DenseConfig(), STAGE, MUCH) == DenseConfig()


VARIANTS = {"wide-g32": {"method": "wide", "ffn_group_size": 32}, "wide-uniform": {"method": "wide", "uniform": True}}


def with_variants(tmp_path, methods="wide,wide-g32,wide-uniform", variants=VARIANTS, **more):
    file = tmp_path / "v.yaml"
    file.write_text(yaml.safe_dump({"methods": methods, "variants": variants} | more))
    values = compare.arguments(["wide", "tyr"]).parse(["--config", str(file), *EVERYDAY])
    return compare.request(values)


def test_variants_are_rows_of_their_own_with_the_settings_of_their_method(tmp_path):
    request = with_variants(tmp_path, wide={"router_rank": 8, "ffn_group_size": 64})
    assert request.settings["wide"] == WideMethodConfig(router_rank=8, ffn_group_size=64)
    assert request.settings["wide-g32"] == WideMethodConfig(router_rank=8, ffn_group_size=32)
    assert request.settings["wide-uniform"] == WideMethodConfig(router_rank=8, ffn_group_size=64, uniform=True)
    assert {cell.method for cell in request.grid.cells(recovers=False)} == {"dense", "wide", *VARIANTS}
    assert request.grid.method_of("wide-g32") == "wide"


def test_a_variant_may_count_its_sparsity_otherwise(tmp_path):
    variants = VARIANTS | {"wide-flops": {"method": "wide", "match": "linear_flops", "ffn_group_size": 32}}
    request = with_variants(tmp_path, "wide,wide-g32,wide-flops", variants)
    assert request.settings["wide-flops"] == request.settings["wide-g32"]
    assert [request.grid.match_of(name) for name in ("wide", "wide-g32", "wide-flops")] == [
        "nominal",
        "nominal",
        "linear_flops",
    ]


def test_settings_of_variants_are_converted_as_flags_are(tmp_path):
    given = {"tyr-short": {"method": "tyr", "stage_tokens": [64, 128], "survivors": [2]}}
    assert with_variants(tmp_path, "tyr-short", given).settings["tyr-short"].stage_tokens == (64, 128)
    with pytest.raises(UsageError, match=r"variants: g: .*ffn_group_size"):
        with_variants(tmp_path, "g", {"g": {"method": "wide", "ffn_group_size": "many"}})
    with pytest.raises(ConfigError, match=r"variants: t: .*survivors"):
        with_variants(tmp_path, "t", {"t": {"method": "tyr", "survivors": [1]}})


def test_variants_without_a_row_are_told(tmp_path, capsys):
    file = tmp_path / "v.yaml"
    file.write_text(yaml.safe_dump({"methods": "wide,wide-g32", "variants": VARIANTS}))
    given = ["--config", str(file), "--model", "./nowhere", "--data", "D", "--output", str(tmp_path / "run")]
    assert main(["compare", *given]) == 1
    assert "--methods does not name are left out: wide-uniform\n" in capsys.readouterr().out
    main(["compare", *given, "--methods", "wide-g32,wide-uniform"])
    assert "left out" not in capsys.readouterr().out


def test_all_names_the_variants_too(tmp_path):
    names_of_all = GridOptions(methods="all", variants=VARIANTS).method_names
    assert names_of_all == [name for name in [*names(), *VARIANTS] if name != "dense"]


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ({"tyr": {"method": "wide"}}, "a name of its own"),
        ({"a/b": {"method": "wide"}}, "a name of its own"),
        ({"a": {"method": "wied"}}, "variants: a: there is no method 'wied'; did you mean wide?"),
        ({"a": {"method": "dense"}}, "variants: a: the dense model has no variants"),
        ({"a": {"ffn_group_size": 32}}, "with the key 'method'"),
        ({"a": "wide"}, "with the key 'method'"),
        ({"a": {"method": "wide", "fnn_group_size": 32}}, "did you mean ffn_group_size?"),
        ({"a": {"method": "tyr", "seed": 3}}, "has no setting 'seed'"),
        ({"a": {"method": "wide", "match": "flops"}}, "match must be one of nominal, linear_flops, got 'flops'"),
        (["wide"], "must be a mapping"),
    ],
)
def test_variants_that_are_none_are_refused(variants, words, tmp_path, capsys):
    file = tmp_path / "v.yaml"
    file.write_text(yaml.safe_dump({"methods": "wide", "variants": variants}))
    assert main(["compare", "--config", str(file), *EVERYDAY]) == 2
    assert words in capsys.readouterr().err


def test_a_variant_is_saved_and_read_again(tmp_path):
    file = tmp_path / "v.yaml"
    file.write_text(yaml.safe_dump({"methods": "wide-g32", "variants": VARIANTS}))
    values = compare.arguments(["wide"]).parse(["--config", str(file), *EVERYDAY])
    save_config(tmp_path / "again.yaml", resolved(values))
    again = compare.arguments(["wide"]).parse(["--config", str(tmp_path / "again.yaml")])
    assert compare.request(again) == compare.request(values)
