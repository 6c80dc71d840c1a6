"""The face of the package: every public name resolves, and only when it is used."""

import subprocess
import sys

import pytest
from families import make

import wide
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
    model, bare = wide.attach(make("llama"), wide.WideConfig(ffn_group_size=16, router_rank=4)), make("llama")
    (tmp_path / "file").write_text("")
    text = ["A few words. "] * 40
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
        (lambda: wide.optimize(model, backend="torch", executed=0.5), "executed must be two shares"),
        (lambda: wide.optimize(model, backend="torch", executed=(0.5, 3)), "executed must be two shares"),
        (lambda: wide.save_checkpoint(model, tmp_path / "file"), "is a file; name a folder"),
    ):
        with pytest.raises(WideError, match=words):
            call()


def test_import_is_light():
    code = "import sys, wide; assert not {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
