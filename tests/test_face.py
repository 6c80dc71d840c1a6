"""The face of the package: every public name resolves, and only when it is used."""

import subprocess
import sys

import pytest

import wide


def test_every_public_name_resolves_and_is_documented():
    for name in wide.__all__:
        value = getattr(wide, name)
        assert name == "__version__" or value.__doc__, name


def test_all_and_homes_agree():
    assert set(wide.__all__) == {*wide._HOMES, "__version__"}
    assert set(wide.__all__) <= set(dir(wide))


def test_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(AttributeError, match=r"no attribute 'prun'.*prune"):
        wide.prun  # noqa: B018


def test_import_is_light():
    code = "import sys, wide; assert not {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
