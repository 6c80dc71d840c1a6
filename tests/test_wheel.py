"""A built wheel, away from the checkout: what it brings, and that it runs under each Python that it is declared for."""

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NANO = str(ROOT / "models/nano")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
pytestmark = pytest.mark.slow


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1500, **options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    code, said = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    if code and "hatchling" in said:
        pytest.skip(f"the build backend cannot be installed here: {said.strip().splitlines()[-1]}")
    assert not code, said
    return next(folder.glob("wide-*.whl"))


def test_a_wheel_holds_the_package_and_asks_for_little(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        name = next(file for file in files if file.endswith("METADATA"))
        facts = Parser().parsestr(archive.read(name).decode())
    assert "wide/recipes/nano.yaml" in files
    assert {file.split("/")[0] for file in files} == {"wide", name.split("/")[0]}
    needed = {
        line.split(">")[0].split("<")[0].strip() for line in facts.get_all("Requires-Dist") if "extra" not in line
    }
    assert "torch" in needed
    assert not needed & {"datasets", "pyarrow", "peft", "lm-eval", "matplotlib", "tensorboard", "triton", "argcomplete"}
    assert set(facts.get_all("Provides-Extra")) == {
        *("lora", "data", "eval", "report", "gguf", "log", "serve", "tilelang", "vllm"),
        *("all", "docs", "dev"),
    }


@pytest.mark.parametrize("version", ["here", "3.11", "3.12", "3.13", "3.14"])
def test_a_wheel_runs_in_an_environment_of_its_own(version, wheel, tmp_path):
    python = (_beside_our_libraries if version == "here" else _with_its_own_libraries)(version, wheel, tmp_path / "env")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for words, expected in (
        (["-c", "import wide; print(wide.__file__)"], str(tmp_path)),
        (["-m", "wide.cli.main", "--version"], "wide "),
        (["-m", "wide.cli.main", "env"], "transformers"),
        (["-m", "wide.cli.main", "methods"], "Týr"),
        (["-m", "wide.cli.main", "recipes", "show", "nano"], "models/nano"),
        (["-m", "wide.cli.main", "inspect", "--model", NANO], "layers"),
        (
            [
                *("-m", "wide.cli.main", "prune", "--config", "nano", "--model", NANO, "--train.steps=2"),
                *("--train.batch_size=1", "--train.sequence_length=64", "--eval.tokens=0", "--output", "run"),
            ],
            "finished",
        ),
        (
            [
                *("-m", "wide.cli.main", "generate", "--model", NANO, "--adapter", "run", "--max_new_tokens=4"),
                *("--prompt", "Return a"),
            ],
            "Return a",
        ),
    ):
        code, said = run(python, *words, cwd=tmp_path, env=clean)
        assert (code, expected in said) == (0, True), (words, said)


def _beside_our_libraries(_version, wheel, folder):
    """Return the Python of a new environment that finds the libraries of this one, and wide from the wheel alone."""
    venv.EnvBuilder(with_pip=False).create(folder)
    own = folder / "lib" / f"python{HERE}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)
    # Its folders are searched after this one, and .pth files in them (editable installs) are not read.
    (own / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin" / "python"


def _with_its_own_libraries(version, wheel, folder):
    """Return the Python of a new environment with everything from an index; skips where that fails."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed, which finds interpreters and makes environments quickly")
    code, said = run(uv, "venv", "--no-python-downloads", "--python", version, folder)
    if code:
        pytest.skip(f"there is no Python {version} here: {said.strip().splitlines()[-1]}")
    python = folder / "bin" / "python"
    code, said = run(uv, "pip", "install", "-q", "--python", python, "--torch-backend", "cpu", wheel)
    if code:
        # Without the index of PyTorch's CPU builds any torch that is within reach is welcome.
        code, said = run(uv, "pip", "install", "-q", "--python", python, wheel)
    if code:
        pytest.skip(f"the libraries cannot be installed for Python {version}: {said.strip().splitlines()[-1]}")
    return python
