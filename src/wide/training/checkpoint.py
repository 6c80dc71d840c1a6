"""Resumable checkpoints: whole or not there, safetensors and JSON only.

A checkpoint is written into a hidden folder, forced to the disk and renamed, so no crash leaves half of one under its
name. Random numbers need no state: every step seeds its own noise, and its data follow from its number.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from wide.errors import ConfigError, TrainingError
from wide.models.lora import copy_strictly
from wide.records import fingerprint as hash_of
from wide.schema import flatten
from wide.writing import whole_folder

_PARAMETERS, _OPTIMIZER, _MANIFEST = "parameters.safetensors", "optimizer.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_FORMAT_VERSION = 1
_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and found whole.

    `seconds` is the wall time of training until then; `measured` holds fields of the outcome that a run with nothing
    left to do cannot measure again; `optimizer` has moments, `<name>.<moment>`.
    """

    step: int
    seconds: float
    measured: dict[str, Any]
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def has_checkpoint(output: Path) -> bool:
    """Return whether a stage that wrote to a folder left a checkpoint there."""
    return bool(CheckpointFolder(output / "checkpoints", fingerprint="").steps())


class CheckpointFolder:
    """The checkpoints of one run, of which the newest two are kept, in a folder that is made at the first `write`.

    `fingerprint` is a hash of what the course of the run depends on, and `facts` say what that is and the rest of it,
    JSON-ready, by name.
    """

    def __init__(self, path: Path, *, fingerprint: str, facts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._fingerprint = fingerprint
        # What is short can be named where it differs.
        self._facts = {
            name: value if isinstance(value, str | int | float | None) else hash_of(value)
            for name, value in flatten(facts or {}).items()
        }

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that have their name, ascending."""
        if not self.path.is_dir():
            return []
        matches = (_NAME.fullmatch(folder.name) for folder in self.path.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def write(
        self,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        seconds: float,
        measured: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint, delete those that are too old, and return the new one's folder.

        Raises TrainingError if it cannot be written (disk full); earlier checkpoints are intact.
        """
        files = {
            _PARAMETERS: save({name: p.detach().cpu().contiguous() for name, p in parameters.items()}),
            _OPTIMIZER: save(_moments(parameters, optimizer)),
        }
        manifest = {
            "format_version": _FORMAT_VERSION,
            "step": step,
            "seconds": seconds,
            "measured": dict(measured),
            "fingerprint": self._fingerprint,
            "facts": self._facts,
            "files": {
                name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in files.items()
            },
        }
        files[_MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
        target = self.path / f"step-{step:08d}"
        try:
            with whole_folder(target) as folder:
                for name, content in files.items():
                    (folder / name).write_bytes(content)
        except OSError as error:
            raise TrainingError(
                f"the checkpoint of step {step} cannot be written to {self.path} ({error}); {self.describe_last()}. "
                "Free some space and start again with resume"
            ) from error
        for old in self.steps()[:-_KEPT]:
            _delete(self.path / f"step-{old:08d}")
        return target

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, None if there are none at all; damaged ones are passed over.

        Raises ConfigError if it belongs to a run with other settings, model or data; TrainingError if none is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            found = self._read(self.path / f"step-{step:08d}")
            if found is not None:
                return found
        if steps:
            # What did not see that the run has checkpoints must not begin it anew in their folder.
            raise TrainingError(
                f"{self.path} has checkpoints of steps {steps}, and none is whole or of this version; put whole ones "
                "back, or delete that folder, and the run begins anew"
            )
        return None

    def remove_unfinished(self) -> None:
        """Delete what a crash left of checkpoints that were being written."""
        if self.path.is_dir():
            for folder in self.path.glob(".step-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def describe_last(self) -> str:
        """Say which checkpoint is the last one, for messages."""
        steps = self.steps()
        if not steps:
            return "there is no earlier checkpoint"
        return f"the last good checkpoint is {self.path / f'step-{steps[-1]:08d}'}"

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            contents = {name: (folder / name).read_bytes() for name in (_PARAMETERS, _OPTIMIZER)}
            whole = all(
                hashlib.sha256(content).hexdigest() == manifest["files"][name]["sha256"]
                for name, content in contents.items()
            )
            if not whole or manifest["format_version"] != _FORMAT_VERSION:
                return None
            fingerprint, step, seconds = manifest["fingerprint"], int(manifest["step"]), float(manifest["seconds"])
            measured = dict(manifest.get("measured", {}))
            # Checkpoints of earlier versions have none.
            facts: dict[str, Any] = dict(manifest.get("facts", self._facts))
            tensors = {name: load(content) for name, content in contents.items()}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None
        pairs = {name: (facts.get(name), self._facts.get(name)) for name in sorted({*facts, *self._facts})}
        words = ", ".join(f"{name} {was!r} -> {now!r}" for name, (was, now) in pairs.items() if was != now)
        if fingerprint != self._fingerprint or words:
            what = f"other settings, model or data{words and f' ({words})'}"
            raise ConfigError(f"{folder} is of {what}; repeat those, or choose another folder")
        return Checkpoint(
            step=step,
            seconds=seconds,
            measured=measured,
            parameters=tensors[_PARAMETERS],
            optimizer=tensors[_OPTIMIZER],
        )


def restore(checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Copy a checkpoint into parameters and optimiser; raises AdapterError if parameters do not fit."""
    copy_strictly(dict(parameters), checkpoint.parameters, "checkpoint")
    for name, parameter in parameters.items():
        prefix = f"{name}."
        moments = {k.removeprefix(prefix): v for k, v in checkpoint.optimizer.items() if k.rpartition(".")[0] == name}
        # Fused AdamW keeps its step counter beside the parameter, the plain one on the CPU.
        fused = bool(optimizer.param_groups[0].get("fused"))
        if moments:
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if fused or key != "step" else value for key, value in moments.items()
            }


def _moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _delete(folder: Path) -> None:
    # Without its manifest a folder is no checkpoint, so a crash in between leaves nothing that looks whole.
    (folder / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
