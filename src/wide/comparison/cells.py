"""What lies on disk of a comparison's cells, and which of them a process takes next."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from wide.comparison.grid import CompareRequest
from wide.errors import ConfigError
from wide.models.hub import ADAPTER
from wide.records import CELLS, RECORDS, Cell, Record, RecordFile, Stage
from wide.report.comparison import FINISHED
from wide.runs.folder import RunFolder
from wide.runs.process import held

RECOVERED, TRAINING = "recovered", "training"
"""Folders of a cell in which LoRA and routers are trained."""


class CellFolders:
    """The folders of a comparison's cells: what is finished there, what failed, and what is kept of each."""

    def __init__(self, request: CompareRequest, folder: RunFolder) -> None:
        self._request, self._folder = request, folder
        # As records write it.
        self.began = datetime.now(UTC).isoformat(timespec="seconds")

    def path(self, cell: Cell) -> Path:
        """Return the folder of a cell, which need not exist."""
        return self._folder.path / CELLS / cell.folder

    def records(self, cell: Cell, device: str) -> RecordFile:
        """Return the file of a cell's records, which are marked with what they are measured on."""
        return self._folder.new_records(f"{CELLS}/{cell.folder}/{RECORDS}", device=device)

    def _status(self, stage: Stage) -> Record | None:
        """Return what became of a stage: finished, or why it failed; None where neither is recorded."""
        return RecordFile(self.path(stage.cell) / RECORDS).latest(stage, "status")

    def is_finished(self, stage: Stage) -> bool:
        """Return whether a stage of a cell is measured."""
        status = self._status(stage)
        return status is not None and status.value == FINISHED

    def is_complete(self, cell: Cell) -> bool:
        """Return whether all stages of a cell are measured."""
        return all(map(self.is_finished, self._request.stages(cell)))

    def is_over(self, cell: Cell) -> bool:
        """Return whether a cell is measured, or failed since this process began: here, or in one that shares the run.

        What failed for one process would fail for the next.
        """
        found = list(map(self._status, self._request.stages(cell)))
        failed = [status for status in found if status is not None and status.value != FINISHED]
        return any(status.time >= self.began for status in failed) or (None not in found and not failed)

    def kept(self) -> str:
        """Say what is kept of a comparison that was stopped."""
        if not self._folder.is_claimed:
            return self._folder.kept()
        own = self._request.own_cells()
        finished = sum(map(self.is_complete, own))
        cells = f"{finished} of {len(own)} cells" if finished else f"none of {len(own)} cells"
        verb = "are" if finished > 1 else "is"
        where = f" and kept in {self._folder.path}" if finished else ""
        return f"{cells} {verb} finished{where}, and {self.again} goes on from there"

    def kept_of(self, cell: Cell) -> str:
        """Say what is kept of a cell that was stopped."""
        # Torch, which programs that look at cells need not import.
        from wide.training.checkpoint import has_checkpoint

        folder = self.path(cell)
        decided = (folder / ADAPTER).is_dir()
        if has_checkpoint(folder / (RECOVERED if decided else TRAINING)):
            return "its last checkpoint is kept"
        return "what it decided is kept" if decided else "nothing of it is kept"

    @property
    def again(self) -> str:
        """The command that goes on, in words."""
        # Processes that share a folder go on with what they find there, whether told so or not.
        if self._request.grid.shard:
            return "the same command"
        return "the same command with --resume (instead of --overwrite)"


def free_cells(
    cells: Sequence[Cell], folder: Callable[[Cell], Path], is_over: Callable[[Cell], bool]
) -> Generator[Cell, None, None]:
    """Yield the cells that are left and that no other process works on; each is held until the next is asked for.

    The search begins anew for each, so that a cell whose process has died is taken up by the next one that is free. No
    cell is yielded twice. Raises ConfigError if the file system has no locks.
    """
    left = list(cells)
    with ExitStack() as own:
        while free := next((cell for cell in left if _takes(own, folder(cell))), None):
            left.remove(free)
            # Asked for under the lock: whoever held it before may have finished it.
            if not is_over(free):
                yield free
            own.close()


def _takes(own: ExitStack, folder: Path) -> bool:
    try:
        return own.enter_context(held(folder))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be locked ({error.strerror or error}), and --shard next shares cells by locks; let "
            "--output lie on a file system that has locks, or give each process rows and a folder of its own"
        ) from error
