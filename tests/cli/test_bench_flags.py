"""`wide bench` and `wide profile` refuse flags that would do nothing, before they look at the device."""

import pytest

from wide.cli import bench
from wide.cli.main import main


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["bench", "--out", "o", "--operators", "gemv", "--rows", "4"], 2, "--rows does not go with gemv"),
        (
            ["bench", "--out", "o", "--operators", "decode,prefill", "--rows", "4"],
            2,
            "does not go with decode, prefill",
        ),
        (["bench", "--out", "o", "--backends", "triton"], 2, "--backends does not go with glue, naive"),
        (["bench", "--out", "o", "--operators", "gemm_k", "--backends", "torch"], 1, "got ['torch']"),
        (["bench", "--out", "o", "--operators", "prefill", "--backends", "cuda"], 1, "prefill have no cuda backend"),
        (["bench", "--out", "o", "--operators", "gemv", "--backends", "gluon"], 1, "gemv have no gluon backend"),
        (["profile", "--out", "o", "--shape", "gpt"], 2, "unknown shape 'gpt'; choose one of llama-3.1-8b, tiny"),
    ],
)
def test_flags_without_effect_are_refused(command, code, words, capsys):
    assert main(command) == code
    assert words in capsys.readouterr().err


def test_rows_and_backends_reach_the_benches_that_take_them(monkeypatch):
    calls = {}
    monkeypatch.setattr(bench, "require_gpu", lambda command: None)
    for name in ("operators", "attention", "naive_depth"):
        monkeypatch.setattr(
            f"wide.profiling.{name}.main", lambda given, name=name: calls.setdefault(name, given) is None
        )
    bench.run(["--out", "o", "--operators", "gemm_mn,prefill", "--backends", "gluon"])
    bench.run(["--out", "o", "--operators", "gemm_mn", "--rows", "512"])
    bench.run(["--out", "o", "--operators", "naive_depth", "--rows", "64", "--sparsity", "0.5", "--group_size", "64"])
    assert calls == {
        "operators": ["--out", "o", "--operators", "gemm_mn", "--backends", "gluon", "--rows", "1024,4096,16384"],
        "attention": ["--out", "o", "--operators", "prefill", "--backends", "gluon"],
        "naive_depth": ["--out", "o", "--rows", "64", "--sparsity", "0.5"],
    }
