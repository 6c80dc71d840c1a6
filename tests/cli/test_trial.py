"""A trial of what happens to work: killed, stopped, out of disk, and with a second writer; `-rP` shows the counts.

Runs are forked from this process, which has imported everything, and die there as they would anywhere.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import Counter

import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from wide.cli.main import main
from wide.config import WideConfig
from wide.models.adapter import ROUTER_FILE, load, save
from wide.models.attach import attach, detach

FILES = (ROUTER_FILE, "lora/adapter_model.safetensors")
SIZES = [*("--dtype=float32", "--device=cpu", "--ffn_group_size=16", "--router_rank=2"), "--eval.tokens=64"]
SIZES += ["--eval.window=32", "--report=false", "--tensorboard=false"]
for _stage in ("train", "recover"):
    SIZES += [f"--{_stage}.steps=12", f"--{_stage}.batch_size=2", f"--{_stage}.sequence_length=32"]
    SIZES += [f"--{_stage}.checkpoint_every=4"]

CONFIG = WideConfig(ffn_group_size=16, router_rank=2)
slow = pytest.mark.slow


def forked(work, said):
    """Run something in a process of its own, whose words go into a file; return its number."""
    process = os.fork()
    if process:
        return process
    code = 99
    # Forks share the usual lock, and one that was killed may hold it for ever.
    tqdm.set_lock(threading.RLock())
    file = said.open("w")
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = work()
    file.close()
    os._exit(code)


def ended(process):
    """Wait for a process; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture(scope="module")
def command(tiny_model_folder, prose_folder):
    return ["prune", "--model", str(tiny_model_folder), "--data", str(prose_folder), *SIZES]


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """Return what a run leaves that nothing happens to, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")
    # The first one imports.
    assert main([*command, "--output", str(folder / "first")]) == 0
    began = time.monotonic()
    process = forked(lambda: main([*command, "--output", str(folder / "run")]), folder / "said.txt")
    assert ended(process) == 0
    return contents(folder / "run" / "adapter"), time.monotonic() - began


def contents(adapter):
    return [(adapter / name).read_bytes() for name in FILES]


@slow
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGKILL, {-9}), (signal.SIGINT, {130}), (signal.SIGTERM, {130})])
def test_a_run_that_is_ended_at_any_moment_goes_on_to_the_same_result(number, codes, command, whole, tmp_path):
    expected, seconds = whole
    moments, counts = 12, Counter()
    for moment in range(moments):
        output, said = tmp_path / f"run{moment}", tmp_path / "said.txt"
        process = forked(lambda output=output: main([*command, "--output", str(output)]), said)
        time.sleep(seconds * (moment + 0.5) / moments)
        os.kill(process, number)
        code = ended(process)
        # On a busy machine the signal may come before the command listens.
        assert code in {0, *codes} or (code == -number and not output.exists()), said.read_text()
        assert "Traceback" not in said.read_text()
        counts["ended before" if code == 0 else "stopped"] += 1
        process = forked(lambda output=output: main([*command, "--output", str(output), "--resume"]), said)
        assert ended(process) == 0, said.read_text()
        counts["same result"] += contents(output / "adapter") == expected
    print(f"{number.name}: {dict(counts)}")
    assert counts["same result"] == moments


@pytest.fixture
def disk(tmp_path):
    """Return a small disk, and a function that makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")

    def resize(kilobytes):
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(place)], check=True)

    yield place, resize
    subprocess.run(["umount", "-l", str(place)], check=True)


@slow
def test_a_full_disk_is_said_in_words_and_costs_no_finished_work(disk, command, whole, tmp_path):
    expected, (place, resize), counts = whole[0], disk, Counter()
    for kilobytes in (16, 32, 64, 128, 256, 512, 1024, 4096):
        resize(kilobytes)
        output, said = place / "run", tmp_path / "said.txt"
        process = forked(lambda output=output: main([*command, "--output", str(output)]), said)
        code, words = ended(process), said.read_text()
        assert code in (0, 1), words
        assert "Traceback" not in words
        if code == 1:
            assert "No space left" in words or "cannot be" in words, words
            counts["refused in words"] += 1
        else:
            counts["fitted"] += 1
        if (output / "adapter").exists():
            load(AutoModelForCausalLM.from_pretrained(command[2]), output / "adapter")
        resize(8192)
        again = forked(lambda output=output: main([*command, "--output", str(output), "--resume"]), said)
        assert ended(again) == 0, said.read_text()
        counts["same result"] += contents(output / "adapter") == expected
        subprocess.run(["rm", "-rf", str(output)], check=True)
    print(f"full disk, prune: {dict(counts)}")
    assert counts["same result"] == counts["refused in words"] + counts["fitted"]
    assert counts["refused in words"] > 2
    assert counts["fitted"]


@slow
@pytest.mark.parametrize("name", ["export", "compare"])
def test_a_full_disk_leaves_no_half_checkpoint_and_no_half_cell(name, disk, command, whole, tmp_path):
    (place, resize), counts = disk, Counter()
    adapter = save(attach(AutoModelForCausalLM.from_pretrained(command[2]), CONFIG), tmp_path / "adapter")
    given = [*command, "--methods=wide", "--sparsities=0.5"]
    given = [word for word in given if not word.startswith(("--report", "--tensorboard"))]
    if name == "export":
        given = ["export", *command[1:3], "--adapter", str(adapter), "--device=cpu"]
    for kilobytes in (16, 64, 128, 256, 4096):
        resize(kilobytes)
        output, said = place / "out", tmp_path / "said.txt"
        words = [name, *given[1:], "--output", str(output)]
        code = ended(forked(lambda words=words: main(words), said))
        assert code in (0, 1), said.read_text()
        assert "Traceback" not in said.read_text()
        assert code == 0 or "No space left" in said.read_text(), said.read_text()
        counts["refused in words" if code else "fitted"] += 1
        if name == "export":
            assert output.exists() == (code == 0)
            assert code == 0 or not list(place.iterdir())
        resize(8192)
        again = [] if name == "export" else ["--resume"]
        if code == 1:
            assert ended(forked(lambda words=words, again=again: main([*words, *again]), said)) == 0, said.read_text()
        counts["done afterwards"] += 1
        subprocess.run(["rm", "-rf", str(output)], check=True)
    print(f"full disk, {name}: {dict(counts)}")
    assert counts["refused in words"] > 1


@slow
def test_the_second_writer_is_refused_and_the_first_one_untouched(command, whole, tmp_path):
    expected, seconds = whole
    moments, refused = 6, 0
    for moment in range(moments):
        output = tmp_path / f"run{moment}"
        first = forked(lambda output=output: main([*command, "--output", str(output)]), tmp_path / "first.txt")
        time.sleep(seconds * moment / moments)
        others = [*command, "--output", str(output), "--train.seed=3", "--overwrite"]
        second = forked(lambda others=others: main(others), tmp_path / "second.txt")
        codes, words = (ended(first), ended(second)), (tmp_path / "second.txt").read_text()
        # Whoever claims the folder first; the other one never has.
        assert sorted(codes) in ([0, 1], [0, 0]), words
        if codes == (0, 1):
            assert "is being written by process" in words, words
            assert contents(output / "adapter") == expected
        refused += 1 in codes
        load(AutoModelForCausalLM.from_pretrained(command[2]), output / "adapter")
    print(f"two writers: {moments} tried, {refused} refused, {moments - refused} came one after the other")


@slow
def test_a_save_that_is_killed_leaves_a_whole_adapter(tiny_model_folder, tmp_path):
    base, adapter = AutoModelForCausalLM.from_pretrained(tiny_model_folder), tmp_path / "adapter"
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(attach(AutoModelForCausalLM.from_pretrained(tiny_model_folder), CONFIG))

    def work():
        while True:
            for model in models:
                save(model, adapter)

    save(models[0], adapter)
    values = [{n: p for n, p in model.named_parameters() if n.endswith("wide_router.up")} for model in models]
    counts = Counter()
    for moment in range(60):
        process = forked(work, tmp_path / "said.txt")
        time.sleep(0.05 + 0.0031 * moment)
        os.kill(process, signal.SIGKILL)
        ended(process)
        folder = adapter
        if not adapter.exists():
            # Between two renames: the earlier one is whole, beside.
            (folder,) = tmp_path.glob(".adapter.*.earlier")
            counts["whole, under its other name"] += 1
        load(base, folder)
        found = {n: p for n, p in base.named_parameters() if n.endswith("wide_router.up")}
        counts["whole"] += any(all(torch.equal(found[n], one[n]) for n in one) for one in values)
        detach(base)
        for rest in tmp_path.glob(".adapter.*"):
            subprocess.run(["rm", "-rf", str(rest)], check=True)
    print(f"killed while it saves: {dict(counts)}")
    assert counts["whole"] == 60
