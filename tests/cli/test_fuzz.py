"""The command line under flags and files that nobody meant: whatever does not work is refused in words.

A case is made from its number: a command that works with a few of its flags changed, or with one byte, key or line of a
file that it reads. It may work, or reach the work (which is stopped), or end with 1 or 2 and one sentence that wide
chose; anything that falls through to the last resort of `wide.cli.main`, a traceback, another exit code, or a file of
the input that has changed is a defect. With CASE=n in the environment a test runs that case alone.
"""

import contextlib
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from wide.cli.inspect import describe_adapter
from wide.cli.main import main
from wide.config import WideConfig
from wide.errors import AdapterError
from wide.materialisation.checkpoint import save_checkpoint
from wide.models.adapter import save
from wide.models.attach import attach, attachment
from wide.models.files import SUMS
from wide.models.lora import add_lora

QUICK, ALL, PART = 125, 10_000, 125
# What a case may take before it counts as at work, and how much memory more than there is now.
SECONDS, MEMORY = 0.2, 4 * 2**30
# What `wide.cli.main` says of errors that wide did not foresee.
UNFORESEEN = re.compile(r"error: [\w.]+: .*--debug shows where")
SMALL = ["--dtype=float32", "--device=cpu"]
TRAIN = [
    "--train.steps=1",
    "--train.batch_size=2",
    "--train.sequence_length=32",
    "--eval.tokens=64",
    "--eval.window=32",
]
TRAIN += ["--eval.batch_size=2", "--report=false", "--tensorboard=false"]
RECOVER = [word.replace("train.", "recover.") for word in TRAIN]
COMPARE = [word for word in TRAIN if not word.startswith(("--report", "--tensorboard"))]
COMMANDS = {
    "prune": [
        "--model={base}",
        "--data={data}",
        "--output={out}",
        "--ffn_group_size=16",
        "--router_rank=2",
        *SMALL,
        *TRAIN,
    ],
    "prune ": [
        "--model={base}",
        "--data={data}",
        "--output={out}",
        "--method=tyr",
        *SMALL,
        "--train.sequence_length=32",
    ],
    "recover": ["--model={base}", "--adapter={adapter}", "--data={data}", "--output={out}", *SMALL, *RECOVER],
    "eval": ["--model={base}", "--adapter={adapter}", "--data={data}", "--tokens=64", "--window=32", *SMALL],
    "eval ": ["--model={checkpoint}", "--data={data}", "--tokens=64", "--window=32", *SMALL],
    "compare": [
        "--model={base}",
        "--data={data}",
        "--output={out}",
        "--methods=wide",
        "--sparsities=0.5",
        "--ffn_group_size=16",
        *SMALL,
        *COMPARE,
    ],
    "generate": ["--model={base}", "--adapter={adapter}", "--prompt=a b", "--max_new_tokens=2", *SMALL],
    "export": ["--model={base}", "--adapter={adapter}", "--output={out}", *SMALL],
    "inspect": ["--model={base}"],
    "inspect ": ["--adapter={adapter}"],
    "report": ["{run}"],
    "serve": ["--model={base}", "--adapter={adapter}", *SMALL],
    "bench": ["--output={out}"],
    "tune": ["--model={base}", "--output={out}"],
    "profile": ["--model={base}", "--output={out}"],
    "recipes": ["show", "quickstart"],
    "methods": ["tyr"],
    "env": [],
}
WITHOUT_FLAGS = ("recipes", "methods", "env")
VALUES = [
    "",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "16",
    "64",
    "1000",
    "-0.5",
    "0.5",
    "1.0",
    "1e30",
    "-inf",
    "nan",
    "1" * 25,
    "null",
]
VALUES += [
    "true",
    "false",
    "auto",
    "cpu",
    "cuda",
    "cuda:9",
    "linear_flops",
    "all",
    "dense",
    "wide",
    "tyr,wide",
    "0.2,0.4",
]
VALUES += [
    "[1, 2]",
    "{}",
    "{a: 1}",
    "{x: {method: wide, ffn_group_size: 16}}",
    "no/such/place",
    "/dev/null",
    "/proc/x",
    "é\n",
]
VALUES += [
    "{base}",
    "{adapter}",
    "{checkpoint}",
    "{data}",
    "{run}",
    "{out}",
    "{data}/0.txt",
    "quickstart",
    "a=b",
    "1/2",
    "next",
]
JSON = [None, True, -1, 0, 1, 3, 10**20, 0.5, -1e30, float("nan"), float("inf"), "", "x", "inf", [], [1], {}, {"a": 1}]


class AtWork(BaseException):
    """Raised in a case that nothing refused in time."""


@pytest.fixture(scope="module")
def places(request, tiny_model_folder, tmp_path_factory, drawn_at_once):
    """Return folders of everything that commands read, by name."""
    import datasets  # noqa: F401  an import that is stopped is broken for the next case

    here = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(tiny_model_folder, here / "base")
    (here / "data").mkdir()
    for number in range(12):
        (here / "data" / f"{number}.txt").write_text("A list holds values in order. " * 12)
    (here / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "A list holds values. " * 9}) + "\n" for _ in range(12))
    )
    (here / "rows.csv").write_text("text,n\n" + "".join(f'"A list, of values. {n}",{n}\n' for n in range(40)))
    model = attach(AutoModelForCausalLM.from_pretrained(here / "base"), WideConfig(ffn_group_size=16, router_rank=2))
    attachment(model).provenance = {"prune": {"objective": {"sparsity": 0.5}}}
    attachment(model).thresholds_by_sparsity = [(0.2, -0.1), (0.5, 0.0), (0.7, 0.1)]
    add_lora(model, rank=2)
    save(model.eval(), here / "adapter")
    attachment(model).lora.merge()
    save_checkpoint(model, here / "checkpoint")
    for file in (here / "base").glob("tokenizer*"):
        shutil.copy(file, here / "checkpoint")
    found = {name: here / name for name in ("base", "data", "adapter", "checkpoint", "run", "grid", "out")}
    # Not in fuzzed time: what is imported when it is first used.
    for name, out in {"prune": "run", "compare": "grid"}.items():
        assert main([name, *filled(COMMANDS[name], found | {"out": here / out})]) == 0
    for name in ("eval", "generate", "export", "inspect", "report"):
        assert main([name, *filled(COMMANDS[name], found)]) == 0
    shutil.rmtree(here / "out")
    if request.config.getoption("--slow"):
        # Languages of kernels, which only a rare value of a flag has imported.
        assert main(["bench", f"--output={here / 'out'}", "--backends=none"]) == 1
    return found


def filled(words, places):
    names = re.compile(r"\{(" + "|".join(places) + r")\}")
    return [names.sub(lambda match: str(places[match[1]]), word) for word in words]


def module_of(command):
    return import_module(f"wide.cli.{'evaluate' if command == 'eval' else command}")


@functools.cache
def known_flags(command):
    if command in WITHOUT_FLAGS:
        return ["json"]
    return [key for key in module_of(command).arguments().known_keys() if key not in ("config", "debug")]


def made_once(arguments):
    """Return a function that keeps what it made for each method, and for each set of keys of files."""
    kept = functools.cache(arguments)
    return lambda *given: kept(*(each if isinstance(each, str) else tuple(sorted(each)) for each in given))


def changed_flags(draw, places):
    """Return a command line with a few flags changed."""
    name = draw.choice([*COMMANDS, "prune", "compare", "recover"])
    words = list(COMMANDS[name])
    known = known_flags(name.strip())
    for _ in range(draw.choice((1, 1, 2, 3))):
        way, place = draw.random(), draw.randrange(len(words) + 1)
        if way < 0.8:
            key = draw.choice(known)
            words = [word for word in words if not word.startswith(f"--{key}=")]
            words.append(f"--{key}={draw.choice(VALUES)}" if draw.random() < 0.95 else f"--{key}")
        elif way < 0.9 and words:
            del words[min(place, len(words) - 1)]
        elif way < 0.95:
            words.insert(place, draw.choice(VALUES))
        else:
            words.append(f"--{draw.choice(known)}x={draw.choice(VALUES)}")
    return [name.strip(), *filled(words, places)]


def changed_file(draw, places, here):
    """Damage a copy of one file, and return a command line that reads it."""
    kinds = {"adapter": 4, "base": 3, "checkpoint": 3, "run": 1, "grid": 1, "data": 1, "config": 2}
    kinds |= {"rows.jsonl": 2, "rows.csv": 2}
    (kind,) = draw.choices([*kinds], [*kinds.values()])
    source = places["run"] / "config.yaml" if kind == "config" else places["base"].parent / kind
    target = here / kind
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    files = [path for path in sorted(target.rglob("*")) if path.is_file()] or [target]
    file = draw.choice(files)
    if kind == "adapter" and draw.random() < 0.7:
        config = target / "wide_config.json"
        facts = json.loads(config.read_text())
        del facts["files"]
        config.write_text(json.dumps(facts))
    if kind == "checkpoint" and file.name != SUMS and draw.random() < 0.7:
        (target / SUMS).unlink()
    damage(draw, file)
    now = places | {kind: target}
    if kind in ("adapter", "base", "checkpoint"):
        fitting = [name for name, words in COMMANDS.items() if any(f"{{{kind}}}" in word for word in words)]
        name = draw.choice([name for name in fitting if name not in ("prune ", "compare", "serve", "tune", "profile")])
        words = COMMANDS[name]
    elif kind in ("run", "grid"):
        name = draw.choice(("report", "again"))
        words = [f"{{{kind}}}"]
        if name == "again":
            name = "prune" if kind == "run" else "compare"
            words = [*COMMANDS[name], f"--output={{{kind}}}", "--resume"]
    elif kind == "config":
        name, words = "prune", [f"--config={target}", "--output={out}"]
    else:
        name = draw.choice(("prune", "eval"))
        words = [*COMMANDS[name], f"--data={target}"]
    return [name.strip(), *filled(words, now)], file


def damage(draw, file):
    content = bytearray(file.read_bytes())
    way = draw.randrange(8)
    if file.suffix == ".json" and way < 5:
        facts = json.loads(content)
        place, key = facts, None
        while isinstance(place, dict | list) and place:
            key = draw.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.2:
                break
            place = place[key]
        if way < 4:
            place[key] = draw.choice(JSON)
        else:
            del place[key]
        file.write_text(json.dumps(facts))
        return
    at = draw.randrange(len(content) + 1)
    if way == 5:
        file.unlink()
        return
    if way == 6:
        content = content[:at]
    elif way == 7:
        content[at:at] = draw.randbytes(draw.choice((1, 3, 100)))
    else:
        lines = content.split(b"\n")
        chosen = draw.randrange(len(lines))
        if way < 2:
            lines[chosen] = draw.choice((b"", b"{}", b"- x", b"null", b"x: y", b"[1, 2]"))
        elif way == 2:
            lines = lines[:chosen]
        elif content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
            lines = content.split(b"\n")
        content = b"\n".join(lines)
    file.write_bytes(content)


def stop(*_):
    raise AtWork


@contextlib.contextmanager
def limited():
    """Stop what works for long, and refuse memory that a mistake would ask for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Of the processor's time, so that a busy machine decides nothing.
    fired = []

    def alarm(_, frame):
        # Whoever enters or leaves a context, or imports, would leave it half done for all that comes after.
        while frame is not None:
            if frame.f_code.co_name in ("__enter__", "__exit__") or "importlib" in frame.f_code.co_filename:
                signal.setitimer(signal.ITIMER_PROF, 0.001)
                return
            frame = frame.f_back
        fired.append(True)
        raise AtWork

    handler = signal.signal(signal.SIGPROF, alarm)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield fired
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def end_of(words):
    """Run a command; return how it ended, and what it said."""
    said, code = io.StringIO(), None
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(AtWork),
        limited() as fired,
    ):
        code = main(words)
    text = said.getvalue()
    if fired:
        # Code of C can take the exception of the alarm for an error of its own, and say something else.
        return "at work", text
    if "Traceback" in text or UNFORESEEN.search(text):
        return "unforeseen", text
    if code in (None, 0):
        return "at work" if code is None else "done", text
    is_in_words = code in (1, 2) and text.rpartition("wide: error: ")[2].strip()
    return ("refused" if is_in_words else f"exit code {code}"), text


def run_case(number, places, folder):
    """Return what was changed, how the command ended, and what it said."""
    draw = random.Random(number)
    here = folder / str(number)
    here.mkdir()
    os.chdir(here)
    places, file = places | {"out": here / "out"}, None
    if number % 2:
        words = changed_flags(draw, places)
    else:
        words, file = changed_file(draw, places, here)
    end, text = end_of(words)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32), words
    shutil.rmtree(here, ignore_errors=True)
    changed = f"flags of {words[0]}" if file is None else f"files: {file.relative_to(here).parts[0]}"
    return changed, end, f"case {number}, {end}, {' '.join(words)}, {file and file.name}: {text[-600:]}"


def no_hub(*_):
    raise OSError("no network")


def contents(places):
    return {
        path: path.read_bytes()
        for name in ("base", "data", "adapter", "checkpoint")
        for path in places[name].rglob("*.*")
    }


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=[] if n < QUICK else pytest.mark.slow) for n in range(0, ALL, PART)]
)
def test_what_does_not_work_is_refused_in_words(first, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wide.data.local_names._ask_hub", no_hub)
    monkeypatch.setattr("wide.runs.serving.serve", stop)
    warnings.simplefilter("ignore")
    for command in {name.strip() for name in COMMANDS} - {"compare", *WITHOUT_FLAGS}:
        # Making them takes as long as most of the cases.
        module = module_of(command)
        monkeypatch.setattr(module, "arguments", made_once(module.arguments))
    before = contents(places)
    numbers = [int(os.environ["CASE"])] if "CASE" in os.environ else range(first, first + PART)
    found = [run_case(number, places, tmp_path) for number in numbers]
    for (changed, end), count in sorted(Counter(case[:2] for case in found).items()):
        print(f"{changed:<24}{end:<12}{count:>5}")
    assert before.items() <= contents(places).items()
    wrong = [words for _, end, words in found if end not in ("done", "at work", "refused")]
    assert not wrong, f"{len(wrong)} cases:\n" + "\n\n".join(wrong)


def test_every_altered_file_of_an_adapter_is_noticed(places, tmp_path):
    counts = Counter()
    for number in range(300):
        draw, folder = random.Random(number), tmp_path / str(number)
        shutil.copytree(places["adapter"], folder)
        # Reports that other tests of this process wrote there are none of its files.
        file = draw.choice(sorted(path for path in folder.rglob("*.*") if path.suffix in (".json", ".safetensors")))
        whole = file.read_bytes()
        damage(draw, file)
        now = file.read_bytes() if file.exists() else None
        # Of this file what it says is proved, not how it is set.
        is_same = now == whole or (file.name == "wide_config.json" and now and says(now) == says(whole))
        try:
            describe_adapter(folder)
        except AdapterError:
            counts["refused"] += 1
            assert not is_same
        else:
            counts["as it was"] += 1
            assert is_same, (number, file)
    print(dict(counts))


def says(content):
    try:
        return json.dumps(json.loads(content), sort_keys=True)
    except ValueError:
        return None
