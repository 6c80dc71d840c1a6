"""Trains, is killed with SIGKILL at a chosen moment, resumes.

Every moment runs in a forked process of its own, which kills itself exactly there.
"""

import json
import os
import signal
from pathlib import Path

import torch
from tiny import RandomSource, in_child, routed_model, stage

from wide.config import ObjectiveConfig
from wide.training import checkpoint
from wide.training.objective import Objective
from wide.training.progress_log import StageOptions
from wide.training.trainer import Trainer

STEPS = 7


def train(folder, *, resume, prepare=lambda _trainer: None):
    """Train and return all router parameters as one list."""
    torch.manual_seed(0)
    model = routed_model()
    options = StageOptions(title="stage 1", output=folder, resume=resume, fingerprint="same")
    trainer = Trainer(
        model, Objective(model, ObjectiveConfig()), RandomSource(), stage(steps=STEPS, checkpoint_every=2), options
    )
    prepare(trainer)
    trainer.train()
    return [v for n, p in model.named_parameters() if "wide_router" in n for v in p.detach().flatten().tolist()]


def die(*_args):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(step):
    def prepare(trainer):
        inner = trainer._step

        def before(number):
            return die() if number == step else inner(number)

        trainer._step = before

    return prepare


def die_while_writing(call, *, half):
    """Die at the `call`-th file of the run, before it or in the middle of it."""

    def prepare(_trainer):
        inner, count = Path.write_bytes, 0

        def write(path, content):
            nonlocal count
            count += 1
            if count == call:
                if half:
                    inner(path, content[: len(content) // 2])
                die()
            return inner(path, content)

        Path.write_bytes = write

    return prepare


def die_after_rename(_trainer):
    inner = Path.rename
    Path.rename = lambda path, target: die(inner(path, target))


def die_while_deleting(_trainer):
    assert checkpoint._delete
    checkpoint._delete = die


MOMENTS = {
    "before the first checkpoint": die_in_step(1),
    "between checkpoints": die_in_step(5),
    "in the middle of the first checkpoint's tensors": die_while_writing(1, half=True),
    "before the manifest of the second checkpoint": die_while_writing(6, half=False),
    "in the middle of the manifest of the second checkpoint": die_while_writing(6, half=True),
    "right after the rename": die_after_rename,
    "while the oldest checkpoint is deleted": die_while_deleting,
}


def all_moments(root):
    """Return what is found after each moment."""
    wanted, results = train(root / "uninterrupted", resume=False), {}
    for number, (name, prepare) in enumerate(MOMENTS.items()):
        folder = root / str(number)
        status = in_child(lambda folder=folder, prepare=prepare: train(folder, resume=False, prepare=prepare))
        kept = checkpoint.CheckpointFolder(folder / "checkpoints", fingerprint="same").latest()
        found = train(folder, resume=True)
        results[name] = {
            "killed": status == -signal.SIGKILL,
            "kept": None if kept is None else kept.step,
            "same": found == wanted,
            "left": sorted(path.name for path in (folder / "checkpoints").iterdir()),
            "steps": [
                json.loads(line)["step"]
                for line in (folder / "metrics.jsonl").read_text().splitlines()
                if '"training.loss"' in line
            ],
        }
    return results
