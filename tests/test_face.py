"""The face of the package: every public name resolves, and only when it is used."""

import subprocess
import sys

import pytest
from families import make

import wide
from wide.comparison.compare import _listed
from wide.errors import WideError


def test_every_public_name_resolves_and_is_documented():
    for name in wide.__all__:
        value = getattr(wide, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name


def test_all_and_homes_agree():
    assert set(wide.__all__) == {*wide._HOMES, "__version__"}
    assert set(wide.__all__) <= set(dir(wide))


def test_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(AttributeError, match=r"no attribute 'prun'.*prune"):
        wide.prun  # noqa: B018


def test_arguments_of_another_type_are_refused_in_words(tmp_path):
    """A wrong name, a dictionary for settings, a tokenizer's name for a tokenizer."""
    small = wide.WideConfig(ffn_group_size=16, router_rank=4)
    model, bare = wide.attach(make("llama"), small), make("llama")
    (tmp_path / "file").write_text("")
    text = ["A few words. "] * 40
    short = wide.StageConfig(batch_size=1, sequence_length=8)
    for call, words in (
        (lambda: wide.attach("models/nano"), "model must be a model that is loaded .* got str 'models/nano'"),
        (lambda: wide.attach(bare, {"ffn_group_size": 16}), "must be a WideConfig or a Plan, got dict"),
        (lambda: wide.load(object(), "adapter"), "must be a model, or its name or folder"),
        (lambda: wide.prune(bare, text, config={}), "config must be a WideConfig or a Plan, got dict"),
        (lambda: wide.prune(bare, text, stage={"steps": 1}), "stage must be a StageConfig, got dict"),
        (lambda: wide.prune(model, text, stage=wide.StageConfig(sequence_length=8), tokenizer="x"), "tokenizer must"),
        (lambda: wide.recover(model, text, stage=wide.StageConfig()), "stage must be a RecoverConfig"),
        (lambda: wide.evaluate("models/nano"), "model must be a model that is loaded"),
        (lambda: wide.evaluate(model, text, tokenizer=str, window=4096), "window 4096 exceeds the"),
        (lambda: wide.evaluate(model, text, tokenizer=str, window=0), "window must be at least 1"),
        (lambda: wide.generate("models/nano", "a"), "model must be a model that is loaded"),
        (lambda: wide.generate(model, 3), "prompt must be a text or a list of messages, got int 3"),
        (lambda: wide.set_sparsity(model, "0.5"), "sparsity must be a number"),
        (lambda: wide.evaluate(model, 5, tokenizer=str), "data holds int, not text; give texts, packed blocks or a so"),
        (lambda: wide.evaluate(model, {"train": text}, tokenizer=str), "data holds dict, not text"),
        (lambda: wide.evaluate(model, [{"text": "a"}], tokenizer=str), "data holds dict, not text"),
        (lambda: wide.evaluate(model, b"text", tokenizer=str), "data holds int, not text"),
        (lambda: wide.evaluate(model, "a few words " * 40, tokenizer=str), "is no name .*; give texts as a list"),
        (lambda: wide.evaluate(model, "a = few words " * 40, tokenizer=str), "cannot be read as a mixture|is no name"),
        (lambda: wide.evaluate(model, text, window="16"), "window must be a whole number, got str '16'"),
        (lambda: wide.evaluate(model, text, window=16.0), "window must be a whole number, got float"),
        (lambda: wide.evaluate(model, text, stride=8.5), "stride must be a whole number, got float"),
        (lambda: wide.evaluate(model, text, max_windows=1.5), "max_windows must be a whole number"),
        (lambda: wide.evaluate(model, text, limit="all"), "limit must be a whole number"),
        (lambda: wide.evaluate(model, tasks="pika", tokenizer=str), "no task 'pika'"),
        (
            lambda: wide.prune(bare, text, stage=wide.StageConfig(batch_size=1), output=3),
            "output must be a folder, got",
        ),
        (
            lambda: wide.prune(bare, {"train": text}, config=small, stage=short, tokenizer=str),
            "data holds dict, not text",
        ),
        (lambda: wide.recover(model, text, objective=0.5), "objective must be an ObjectiveConfig, got float 0.5"),
        (
            lambda: wide.recover(model, text, objective={"sparsity": 0.5}),
            "objective must be an ObjectiveConfig, got dict",
        ),
        (lambda: wide.save(model, None), "path must be a folder, got NoneType"),
        (lambda: wide.load("adapter", model), "path must be an adapter's folder or name .* got Llama"),
        (lambda: wide.load_checkpoint(model), "path must be a checkpoint's folder or name, got Llama"),
        (lambda: wide.routing_stats(model, text, tokenizer="models/nano"), "tokenizer must be a tokenizer that is loa"),
        (lambda: wide.generate(model, "a", tokenizer="models/nano"), "tokenizer must be a tokenizer that is loaded"),
        (lambda: wide.generate(model, ["a"]), "prompt must be a text, or messages with role and content, got str 'a'"),
        (lambda: wide.set_sparsity(model, threshold="0"), "threshold must be a number, got str '0'"),
        (lambda: wide.compare("m", "d", ["wide"], output="o", variants=["x"]), "variants must be a mapping"),
        (
            lambda: wide.compare("m", "d", ["wide"], output="o", variants={"x": "wide"}),
            "x must be a mapping with the key",
        ),
        (lambda: wide.compare("m", "d", "wade", output="o"), "'wade'"),
        (lambda: wide.optimize(model, backend="torch", executed=0.5), "executed must be two shares"),
        (lambda: wide.optimize(model, backend="torch", executed=(0.5, 3)), "executed must be two shares"),
        (lambda: wide.save_checkpoint(model, tmp_path / "file"), "is a file; name a folder"),
    ):
        with pytest.raises(WideError, match=words):
            call()


@pytest.mark.parametrize(
    ("given", "words"),
    [(0.5, 0.5), ([0.5], 0.5), ("wide", "wide"), (["a", "b"], "a,b"), ((), ""), (range(2), "0,1"), ({0.5}, 0.5)],
)
def test_one_value_of_a_comparison_may_stand_alone(given, words):
    assert _listed(given) == words


def test_import_is_light():
    code = "import sys, wide; assert not {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
