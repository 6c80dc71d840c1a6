"""The folder of a run: whose it is, what lies in it, and when it may be written to."""

import os
import shlex
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import yaml

from wide.config import BEFORE
from wide.data.corpus import places_read, reads
from wide.errors import ConfigError, UsageError
from wide.models.hub import ADAPTER
from wide.records import CELLS, COMPARISON, GRID, RECORDS, RecordFile, fingerprint
from wide.runs.process import LOCK, held, is_main_process, say
from wide.schema import flatten
from wide.version import __version__
from wide.writing import is_unfinished, write_whole

CONFIG = "config.yaml"
_OF_A_RUN = (ADAPTER, "stage1", "stage2", "dense", "tensorboard", RECORDS, "evaluation.json", CONFIG)
_OF_A_COMPARISON = (CELLS, GRID, COMPARISON, "table.md", "table.csv")
_PRODUCTS = (*_OF_A_RUN, *_OF_A_COMPARISON, "report.html", "figures")
# How a run is carried out, not what it is: left out of the saved configuration.
_NOT_SAVED = {"config", "print_config", "debug", "resume", "overwrite", "dry_run", "json", "shard", "table", "help"}
_NOT_SAVED |= {"parallel"}
# What commands read; of any group.
_READ = {"model", "adapter", "data", "local_data"}


class RunFolder(AbstractContextManager["RunFolder"]):
    """The output folder of one run, locked from `claim` to the end of the block that it is the context of.

    The system gives the lock back when the process ends, by `kill -9` too. Raises UsageError if both are asked for;
    ConfigError if the folder cannot be written to, is not empty and neither was asked for, holds something else than a
    run or something that the command reads, another process writes there, or the run to be continued had other
    settings. Nothing is written or removed then.

    Args:
        config: The values of all keys of the command, JSON-ready; those that say how a run is carried out are not kept.
        shared: Let other processes that share it write there, too; each continues what it finds.
        overwrite: Replace a run that lies there; files that wide did not write are left alone.
        resumable: Whether the command has --resume, for messages.
    """

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        resume: bool,
        overwrite: bool,
        shared: bool = False,
        resumable: bool = True,
    ) -> None:
        self.path, self.adapter = Path(path), Path(path) / ADAPTER
        self.config, self.resume, self.is_claimed = resolved(config), resume or shared, False
        self._overwrite, self._shared, self._resumable = overwrite, shared, resumable
        self._held = ExitStack()
        if resume and overwrite:
            raise UsageError("--resume continues a run and --overwrite replaces it; choose one")
        if is_main_process():
            if not self.resume:
                require_apart(self.path, config)
            self._check()
            if (self.path / LOCK).exists():
                # Nothing is written: what is refused later shall leave no trace.
                self._hold()
                self._held.close()

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self) -> None:
        """Remove the earlier run where it is to be replaced, and save the resolved configuration.

        To be called when everything that can be checked has been checked. If another process has begun to write there
        since, or has written, that is a ConfigError.
        """
        self.is_claimed = True
        if not is_main_process():
            return
        self._hold()
        try:
            self._check()
        except ConfigError:
            self._held.close()
            raise
        from wide.report.reading import BENCHES

        (self.path / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        # The report shows speeds that lie here, and they are those of what is replaced.
        for path in () if self.resume else (self.path / name for name in (*_PRODUCTS, *BENCHES)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        save_config(self.path / CONFIG, self.config)

    def kept(self) -> str:
        """Say what lies here when a run is stopped, and how it goes on."""
        if self.is_claimed:
            return (
                f"what this run finished is kept in {self.path}, and the same command with --resume (instead of "
                "--overwrite) continues from there"
            )
        return "nothing was written" + (f", and {self.path} is as it was" if self.path.exists() else "")

    def new_records(self, name: str = RECORDS, *, device: str = "") -> RecordFile:
        """Return a file of records in this folder, which are marked with the configuration and the device."""
        marks = {"config_fingerprint": fingerprint(self.config), "device": device}
        return RecordFile(self.path / name, silent=not is_main_process(), **marks)

    def _hold(self) -> None:
        try:
            mine = self._held.enter_context(held(self.path, shared=self._shared))
        except OSError as error:
            say(f"warning  {self.path} cannot be locked ({error.strerror}): start no second run there meanwhile")
            return
        if not mine:
            self._held.close()
            owner = (self.path / LOCK).read_text(errors="replace")[:256].strip() or "another process"
            raise ConfigError(
                f"--output {self.path} is being written by {owner}; wait for its end, or choose another folder"
            )

    def _check(self) -> None:
        self._check_writable()
        if not self.path.exists():
            return
        # What another process that shares the folder is just claiming it with does not make it anybody's.
        if all(is_unfinished(entry) or entry.name == LOCK for entry in self.path.iterdir()):
            return
        saved = self.path / CONFIG
        if not saved.is_file():
            raise ConfigError(f"--output {self.path} is not empty and holds no run of wide; choose another folder")
        if not self.resume and not self._overwrite:
            ways = "continue it with --resume, replace it" if self._resumable else "replace it"
            raise ConfigError(
                f"--output {self.path} holds a run already: {ways} with --overwrite, or choose another folder"
            )
        if self.resume:
            self._check_same(saved)

    def _check_writable(self) -> None:
        existing = self.path.absolute()
        # Path.exists would raise for a name that is too long.
        while not os.path.exists(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise ConfigError(f"--output {self.path} cannot be made: {existing} is a file; name a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"--output {self.path} cannot be written: no permission in {existing}; choose another")
        if existing != self.path.absolute():
            self._try_to_make(existing)

    def _try_to_make(self, existing: Path) -> None:
        # Permission is not enough everywhere (/proc, full disks, names too long), and a folder that cannot be made
        # must not be noticed when the work is done. Made beside, not in place: processes may share the folder.
        beside = None
        try:
            beside = Path(tempfile.mkdtemp(prefix=".wide.", dir=existing))
            (beside / self.path.absolute().relative_to(existing)).mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"--output {self.path} cannot be made in {existing}: {error.strerror or error}; choose another folder"
            ) from error
        finally:
            if beside is not None:
                shutil.rmtree(beside, ignore_errors=True)

    def _check_same(self, saved: Path) -> None:
        try:
            before = flatten(yaml.safe_load(saved.read_text(encoding="utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
            raise ConfigError(f"{saved} is damaged, so the run cannot be continued; use --overwrite") from error
        # YAML has no tuples.
        now: dict[str, Any] = flatten(yaml.safe_load(yaml.safe_dump(dict(self.config))))
        # What a run is called changes nothing in it.
        before = {key: BEFORE.get(key, BEFORE.get(key.rpartition(".")[2])) for key in now} | before
        keys = sorted(key for key in {*before, *now} - {"output", "description"} if before.get(key) != now.get(key))
        if keys:
            words = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in keys)
            raise ConfigError(
                f"the run in {self.path} had other settings ({words}); continue it with --config "
                f"{shlex.quote(str(saved))}, or start anew with --overwrite or another --output"
            )


def require_apart(output: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder that holds what a command reads, or lies in text of it: it would be replaced, or become text."""
    target = output.resolve()
    for key, value in flatten(config).items():
        name = key.rpartition(".")[2]
        if name in _READ and isinstance(value, str):
            read = places_read(value) if name == "data" else [Path(value).expanduser()]
            held = any(each.exists() and each.resolve().is_relative_to(target) for each in read)
            if held or (name == "data" and reads(value, output)):
                raise ConfigError(f"--output {output} holds or is part of --{key} {value}; choose another folder")


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that say what a run is, without those that say how it is carried out."""
    return {key: value for key, value in values.items() if key not in _NOT_SAVED}


def save_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a resolved configuration as YAML that `--config` reads."""
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_whole(path, f"# Resolved configuration, written by wide {__version__}; use it again with --config.\n{text}")
