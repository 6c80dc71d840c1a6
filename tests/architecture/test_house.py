"""Rules of the package that no linter checks: light imports, documented names, nothing read by pickle."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from wide.methods.catalogue import get, names

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "wide").rglob("*.py"))


def test_what_a_sparsity_may_count_is_written_once():
    found = [file for file in SOURCES if 'Literal["nominal", "linear_flops"]' in file.read_text()]
    assert found == [ROOT / "src" / "wide" / "methods" / "catalogue.py"]


def test_methods_do_not_know_each_other():
    files = {get(name).code.partition(":")[0] for name in names()} - {"", "routed"}
    for file in files:
        text = (ROOT / "src" / "wide" / "methods" / f"{file}.py").read_text()
        assert not re.findall(rf"wide\.methods\.(?:{'|'.join(files - {file})})\b", text), file


def test_no_file_is_a_drawer():
    assert not [f for f in SOURCES if f.stem in ("utils", "misc", "common", "helpers")]


@pytest.mark.parametrize("module", ["wide", "wide.config", "wide.plan", "wide.cli.main", "wide.vllm.plugin"])
def test_light_modules_import_neither_torch_nor_transformers(module):
    heavy = ("torch", "transformers", "datasets", "peft", "lm_eval", "matplotlib", "triton", "vllm")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_kernels_import_with_torch_alone_operators_no_language_of_kernels_and_training_nothing_optional():
    # One process for all, since torch takes seconds to import.
    code = (
        "import sys\n"
        "absent = ('transformers', 'datasets', 'peft', 'lm_eval', 'matplotlib', 'jsonargparse')\n"
        "sys.modules |= dict.fromkeys(absent)\n"
        "import importlib, pathlib, pkgutil, wide.kernels\n"
        "for path in sorted(pathlib.Path(wide.kernels.__path__[0]).glob('*/op.py')):\n"
        "    importlib.import_module(f'wide.kernels.{path.parent.name}.op')\n"
        "print([name for name in ('triton', 'tilelang') if name in sys.modules])\n"
        "for module in pkgutil.walk_packages(wide.kernels.__path__, 'wide.kernels.'):\n"
        "    importlib.import_module(module.name)\n"
        "for name in absent:\n"
        "    del sys.modules[name]\n"
        "import wide.training.stages, wide.evaluation.harness\n"
        "optional = ('tensorboard', 'lm_eval', 'datasets', 'matplotlib', 'peft')\n"
        "print([name for name in optional if name in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "[]"]


def test_nothing_is_read_by_pickle_or_remote_code():
    banned = ("import pickle", "torch.load(", "trust_remote_code=True", "strict=False)")
    for file in SOURCES:
        text = file.read_text()
        assert not [word for word in banned if word in text and "zip(" not in text], file
