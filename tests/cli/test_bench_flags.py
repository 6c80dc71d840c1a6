"""`wide bench` and `wide profile` refuse flags that would do nothing, before they look at the device."""

import re
from pathlib import Path

import pytest

import wide.kernels
from benchmarks import bench
from benchmarks.operators import OPERATORS
from wide.cli import bench as command
from wide.cli.arguments import field_texts
from wide.cli.main import main
from wide.errors import EvaluationError, UsageError


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["bench", "--output", "o", "--operators", "gemv", "--rows", "4"], 2, "--rows does not go with gemv"),
        (
            ["bench", "--output", "o", "--operators", "decode,prefill", "--rows", "4"],
            2,
            "does not go with decode, prefill",
        ),
        (["bench", "--output", "o", "--backends", "triton"], 2, "--backends does not go with glue, naive"),
        (
            ["bench", "--output", "o", "--operators", "glue", "--rows", "4"],
            2,
            "--rows does not go with glue (got 4): it is for reorder, gemm_mn, gemm_k, coarse, naive, naive_depth, "
            "breakdown, traffic; leave it out, or name only those in --operators",
        ),
        (
            ["bench", "--output", "o", "--operators", "coarse", "--group_size", "64"],
            2,
            "with coarse (got 64): it is for gemm_mn",
        ),
        (["bench", "--output", "o", "--operators", "coarse", "--sparsity", "0.3"], 2, "with coarse (got 0.3)"),
        (["bench", "--output", "o", "--operators", "coarse", "--quick", "true"], 2, "with coarse (got True)"),
        (["bench", "--output", "o", "--operators", "gemm_mn,glue", "--group_size", "64"], 2, "with glue (got 64)"),
        (["bench", "--output", "o", "--operators", "gemm_mn,glue", "--sparsity", "0.3"], 2, "with glue (got 0.3)"),
        (["bench", "--output", "o", "--operators", "gemm_mn,glue", "--quick", "true"], 2, "with glue (got True)"),
        (
            ["bench", "--output", "o", "--operators", "naive_depth", "--group_size", "64"],
            2,
            "with naive_depth (got 64)",
        ),
        (["bench", "--output", "o", "--operators", "traffic", "--quick", "true"], 2, "with traffic (got True)"),
        (["bench", "--output", "o", "--operators", "reorder,gemm_k", "--sparsity", "0.3"], 2, "with reorder (got 0.3)"),
        (["bench", "--output", "o", "--operators", "gemm_k", "--backends", "torch"], 1, "got ['torch']"),
        (["bench", "--output", "o", "--operators", "prefill", "--backends", "cuda"], 1, "prefill have no cuda backend"),
        (["bench", "--output", "o", "--operators", "decode", "--backends", "cuda"], 1, "decode have no cuda backend"),
        (
            ["bench", "--output", "o", "--rows", "64,²"],
            1,
            "rows must be positive numbers separated by commas, got '64,²'",
        ),
        (["bench", "--output", "o", "--rows", ""], 1, "got ''"),
        (["tune", "--model", "m", "--rows", "²"], 1, "rows must be positive numbers separated by commas, got '²'"),
        (["profile", "--output", "o", "--prompt", ""], 1, "prompt must be positive numbers"),
        (["profile", "--output", "o", "--batched", "8,²"], 1, "batched must be positive numbers"),
        (["profile", "--output", "o", "--shape", "gpt"], 2, "unknown shape 'gpt'; choose one of llama-3.1-8b, tiny"),
        (
            ["profile", "--output", "o", "--model", "m", "--layers", "2"],
            2,
            "leave out --layers (got 2; null where a file",
        ),
        (["profile", "--output", "o", "--model", "m", "--shape", "tiny"], 2, "leave out --shape (got tiny"),
        (
            ["profile", "--output", "o", "--model", "m", "--adapter", "a", "--ffn_group_size", "128"],
            2,
            "the adapter says how large its groups are; leave out --ffn_group_size (got 128",
        ),
        (
            ["profile", "--model", "m", "--comparison", "c", "--ffn_group_size", "64"],
            2,
            "the adapter of each cell says how large its groups are; leave out --ffn_group_size (got 64",
        ),
    ],
)
def test_flags_without_effect_are_refused(command, code, words, capsys):
    assert main(command) == code
    assert words in capsys.readouterr().err


@pytest.fixture
def raced(monkeypatch):
    """What benches are asked for, of the package and of the checkout; nothing is raced."""
    calls = {}
    monkeypatch.setattr(bench, "require_gpu", lambda command: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)

    def run_bench(request, out, **_):
        calls["package"] = request
        return [name for name in calls.get("red", []) if name in request.names]

    monkeypatch.setattr("benchmarks.operators.run_bench", run_bench)
    for name in ("glue", "naive", "naive_depth", "breakdown"):

        def run(out, name=name, **options):
            calls[name] = options
            return name not in calls.get("red", [])

        monkeypatch.setattr(f"benchmarks.{name}.run", run)
    monkeypatch.setattr("benchmarks.naive.traffic", lambda out, **options: calls.setdefault("traffic", options))
    return calls


def test_rows_and_backends_reach_the_benches_that_take_them(raced):
    bench.run(["--output", "o", "--operators", "gemm_mn,gemm_k", "--backends", "cuda"])
    assert (raced["package"].names, raced["package"].backends) == (["gemm_mn", "gemm_k"], ("cuda",))
    assert list(raced["package"].rows) == [1024, 4096, 16384]
    bench.run(["--output", "o", "--operators", "gemm_mn", "--rows", "512"])
    assert raced["package"].rows == [512]
    bench.run(["--output", "o", "--operators", "naive_depth", "--rows", "64", "--sparsity", "0.5"])
    assert raced["naive_depth"] == {"rows": [64], "sparsity": 0.5, "quick": False}
    bench.run(["--output", "o", "--operators", "naive,traffic", "--rows", "64"])
    bench.run(["--output", "o", "--operators", "breakdown", "--rows", "64,128", "--group_size", "64"])
    assert raced["breakdown"] == {"rows": [64, 128], "group_size": 64, "quick": False}
    assert (raced["naive"], raced["traffic"]) == ({"sizes": [64], "quick": False}, {"sizes": [64]})


def test_all_operators_go_with_flags_that_some_of_them_take(raced):
    bench.run(["--output", "o", "--rows", "64", "--group_size", "64", "--sparsity", "0.3", "--quick", "true"])
    request = raced["package"]
    assert (request.group_size, request.sparsity, request.quick, request.rows) == (64, 0.3, True, [64])
    assert request.names == ["reorder", "gemm_mn", "gemm_k", "prefill", "decode", "decode_groups", "gemv"]
    # Rows are those of the others.
    assert raced["naive"] == {"group_size": 64, "sparsity": 0.3, "quick": True}
    assert raced["naive_depth"] == {"rows": [64], "sparsity": 0.3, "quick": True}
    assert raced["glue"] == {}
    assert not {"breakdown", "traffic"} & set(raced)


def test_a_red_bench_costs_no_other_and_all_red_ones_are_named(raced):
    raced["red"] = ["gemm_k", "glue"]
    with pytest.raises(EvaluationError, match=r"\(benches: gemm_k, glue; marked RED above"):
        bench.run(["--output", "o", "--operators", "gemm_mn,prefill,glue,gemm_k,naive"])
    assert {"package", "glue", "naive"} <= set(raced)


def test_without_a_checkout_the_command_says_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_CHECKOUT", tmp_path)
    with pytest.raises(UsageError, match="lies in benchmarks/ of the repository"):
        command.run(["--output", "o"])


def test_the_help_names_the_operators_of_each_backend_of_one_gpu():
    told = field_texts(bench.BenchOptions)["backends"]
    kernels = Path(wide.kernels.__file__).parent
    for backend in ("cuda", "tilelang"):
        having = [
            name
            for name, (first, *_) in OPERATORS.items()
            if backend in first.backends and list(kernels.glob(f"{first.name}/_{backend}.py"))
        ]
        assert re.search(rf"\b{backend}\b[^()]* \({', '.join(having)}\)", told)
