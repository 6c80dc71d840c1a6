"""One cell of a comparison: the method, LoRA on top, the evaluation of both, and their records."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wide.comparison.grid import DENSE, CompareRequest
from wide.config import ObjectiveConfig, StageConfig
from wide.evaluation.report import EvaluationReport
from wide.methods.apply import PROVENANCE, apply, recover_row
from wide.methods.catalogue import Match, get
from wide.methods.method import Target
from wide.models.adapter import load, save
from wide.models.attach import attachment, is_attached
from wide.records import Cell, Record, RecordFile, read_records
from wide.report.comparison import FINISHED
from wide.report.selection import Selection
from wide.runs.folder import ADAPTER, CELLS, RECORDS, RunFolder
from wide.runs.materials import Materials
from wide.training.checkpoint import has_checkpoint

_RECOVERED, _TRAINING = "recovered", "training"
_SHARES = {
    "mean": "nominal",
    "attention": "attention",
    "ffn": "ffn",
    "linear_flops_layers": "linear_flops",
    "parameters_removed": "parameters_removed",
    "kv_cache_kept": "kv_cache_kept",
}
"""Metric below 'sparsity.' -> field of a method's report."""
# Choices of the machine or of chance, and what the cell's name and settings say already.
_NOT_OF_TRAINING = frozenset(
    {"seed", "micro_batch_size", "gradient_checkpointing", "compile", "checkpoint_every", "sparsity", "include_fixed"}
)
_COUNTED: dict[Match, str] = {"nominal": "as the method does", "linear_flops": "linear FLOPs of the decoder layers"}


class CellRunner:
    """Runs cells one after the other on one model, and knows what became of them.

    Args:
        request: The comparison.
        folder: Of the comparison, which holds a folder for each cell.
        materials: Model and texts, the same for all cells.
    """

    def __init__(self, request: CompareRequest, folder: RunFolder, materials: Materials) -> None:
        """Run nothing yet."""
        self._request = request
        self._run = folder
        self.materials = materials
        # As records write it.
        self._began = datetime.now(UTC).isoformat(timespec="seconds")

    def is_finished(self, cell: Cell, recovered: bool) -> bool:
        """Return whether a stage of a cell has been measured."""
        status = self._status(cell, recovered)
        return status is not None and status.value == FINISHED

    def is_over(self, cell: Cell) -> bool:
        """Return whether a cell is measured, or failed since this process began: here, or in one that shares the run.

        What failed for one process would fail for the next.
        """
        found = [self._status(cell, recovered) for recovered in self._request.stages(cell)]
        failed = [status for status in found if status is not None and status.value != FINISHED]
        return any(status.time >= self._began for status in failed) or (None not in found and not failed)

    def is_complete(self, cell: Cell) -> bool:
        """Return whether all stages of a cell have been measured."""
        return all(self.is_finished(cell, recovered) for recovered in self._request.stages(cell))

    def kept(self, cell: Cell) -> str:
        """Say what lies of a cell that was stopped."""
        folder = self.folder(cell)
        if has_checkpoint(folder / _RECOVERED):
            return "its last checkpoint is kept"
        if (folder / ADAPTER).is_dir():
            return "what it decided is kept"
        return "its last checkpoint is kept" if has_checkpoint(folder / _TRAINING) else "nothing of it is kept"

    def folder(self, cell: Cell) -> Path:
        """Return the folder of a cell, which need not exist."""
        return self._run.path / CELLS / cell.folder

    def run(self, cell: Cell, recovered: bool) -> str:
        """Run a stage of a cell, and return in words what came out.

        Raises:
            WideError: Whatever the method, the training or the evaluation refuses.
        """
        folder = self.folder(cell)
        self._bring(cell, folder)
        subject = cell.subject(recovered=recovered)
        if recovered:
            self._recover(cell, folder)
        facts = attachment(self.materials.model).provenance
        records = self._records(cell)
        records.append(self._stage_records(cell, facts, recovered))
        report = self.materials.measure(subject, records)
        records.append([Record(subject=subject, metric="status", value=FINISHED, unit="text")])
        return _in_words(report)

    def note_failure(self, cell: Cell, recovered: bool, error: Exception) -> None:
        """Record why a stage of a cell could not be run."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        subject = cell.subject(recovered=recovered)
        self._records(cell).append([Record(subject=subject, metric="status", value=reason, unit="text")])

    def remove_weights(self, cell: Cell) -> None:
        """Delete adapters and checkpoints of a finished cell; its records stay."""
        for name in (ADAPTER, _RECOVERED, _TRAINING):
            shutil.rmtree(self.folder(cell) / name, ignore_errors=True)

    def _bring(self, cell: Cell, folder: Path) -> None:
        """Attach what the method decided: as it is, from disk, or by letting it decide now."""
        model, request = self.materials.model, self._request
        if is_attached(model):
            return
        if (folder / ADAPTER).is_dir():
            load(model, folder / ADAPTER)
            return
        stage = replace(request.stage, seed=cell.seed)
        blocks = self.materials.blocks(stage)
        apply(
            model,
            get(request.grid.method_of(cell.method)),
            blocks,
            Target(sparsity=cell.sparsity, match=request.grid.match_of(cell.method)),
            request.budget.of_method(request.settings[cell.method], stage, blocks.num_tokens),
            stage=request.budget.of_training(stage),
            objective=request.objective,
            output=folder / _TRAINING,
            resume=True,
            seed=cell.seed,
        )
        save(model, folder / ADAPTER)

    def _recover(self, cell: Cell, folder: Path) -> None:
        assert self._request.recover is not None
        stage = replace(self._request.recover, seed=cell.seed)
        blocks = self.materials.blocks(stage)
        recover_row(self.materials.model, blocks, stage, output=folder / _RECOVERED, resume=True, seed=cell.seed)

    def _status(self, cell: Cell, recovered: bool) -> Record | None:
        """Return what became of a stage of a cell: finished, or why it failed; None where neither is recorded."""
        file = self.folder(cell) / RECORDS
        if not file.is_file():
            return None
        return Selection(*read_records(file)).record(cell.subject(recovered=recovered), "status")

    def _records(self, cell: Cell) -> RecordFile:
        file = self._run.new_records(f"{CELLS}/{cell.folder}/{RECORDS}")
        file.device = self.materials.device
        return file

    def _stage_records(self, cell: Cell, provenance: dict[str, Any], recovered: bool) -> Iterator[Record]:
        """Yield what the method's report says, with the cost of LoRA in its place where that is the stage."""
        report, subject = provenance[PROVENANCE], cell.subject(recovered=recovered)
        for metric, name in _SHARES.items():
            yield Record(subject=subject, metric=f"sparsity.{metric}", value=report[name], unit="share")
        cost = report
        if recovered:
            facts = provenance["recover"]
            cost = {"tokens_forward": 0, "tokens_backward": facts["tokens"], "seconds": facts["seconds"]}
        for name, unit in (("tokens_forward", "token"), ("tokens_backward", "token"), ("seconds", "s")):
            yield Record(subject=subject, metric=f"method.{name}", value=cost[name], unit=unit)
        if not recovered:
            lines = "\n".join([*self._own_target(cell), *report["deviations"]])
            yield Record(subject=subject, metric="deviations", value=lines, unit="text")
            yield Record(subject=subject, metric="settings", value=report["settings"])
            if "prune" in provenance:
                yield Record(subject=subject, metric="training", value=_training(provenance["prune"]))

    def _own_target(self, cell: Cell) -> Iterator[str]:
        """Yield a sentence where a row counts its sparsity otherwise than the comparison."""
        grid = self._request.grid
        own = grid.match_of(cell.method)
        if own != grid.match and cell.method != DENSE:
            yield f"the target counts {_COUNTED[own]}, in the other rows {_COUNTED[grid.match]}"


def _training(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how routers were trained, as far as not by default: options of later versions leave old records as equal.

    Args:
        facts: What the training left in the provenance.
    """
    pairs = ((facts["stage"], StageConfig()), (facts["objective"], ObjectiveConfig()))
    return {
        name: value
        for options, usual in pairs
        for name, value in options.items()
        if name not in _NOT_OF_TRAINING and value != asdict(usual).get(name)
    }


def _in_words(report: EvaluationReport) -> str:
    words = []
    if report.model.perplexity is not None:
        words.append(f"perplexity {report.model.perplexity.perplexity:.2f}")
    if report.model.tasks is not None and report.model.tasks.average is not None:
        words.append(f"accuracy {report.model.tasks.average:.1%}")
    if report.sparsity is not None:
        words.append(f"saves {report.sparsity.linear_flops_layers:.1%} of the layers' linear FLOPs")
    return ", ".join(words)
