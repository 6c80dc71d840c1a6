import dataclasses
import subprocess
import sys

import pytest
from depth_toys import blocks_of, own_text, toy_model

from wide.errors import ConfigError
from wide.methods import catalogue
from wide.methods.apply import apply
from wide.methods.method import Target
from wide.models.attach import attachment
from wide.plan import Dense

ROWS = catalogue.names()


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_complete(name):
    method = catalogue.get(name)
    assert method.name == name
    assert name == "dense" or callable(method.function())
    settings = method.settings()
    assert type(settings) is method.settings
    assert dataclasses.is_dataclass(settings)
    assert method.summary
    assert method.source


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(ConfigError, match=r"'shortened'.*shortened-ppl, shortened-taylor"):
        catalogue.get("shortened")


def test_listing_the_names_imports_no_torch():
    code = "import sys, wide.methods.catalogue as c; c.names(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_dense_row_prunes_nothing_whatever_the_target():
    model = toy_model(3)
    report = apply(model, catalogue.get("dense"), blocks_of(own_text(model, 1, 4)), Target(sparsity=0.5), seed=17)
    assert all(isinstance(half, Dense) for layer in attachment(model).plan.layers for _, half in layer.halves())
    assert (report["nominal"], report["tokens_forward"], report["tokens_backward"]) == (0, 0, 0)


def test_a_method_is_registered_by_its_settings_alone(monkeypatch):
    monkeypatch.setattr(catalogue, "_ROWS", {})

    @catalogue.method("mine", kind="depth", summary="-", source="-", code=len)
    @dataclasses.dataclass(frozen=True)
    class Mine:
        share: float = 0.5

    assert catalogue.names() == ("mine",)
    assert catalogue.get("mine").settings() == Mine()
    assert catalogue.get("mine").function() is len
