"""Runs the cells of a comparison, or a share of them; what one cell does wrong costs no other."""

import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wide.comparison.cells import RECOVERED, TRAINING, CellFolders, free_cells
from wide.comparison.grid import DENSE, CompareRequest, GridOptions, as_many_tokens
from wide.errors import EvaluationError, WideError
from wide.evaluation.report import EvaluationReport
from wide.evaluation.tasks import check_tasks
from wide.methods.apply import PROVENANCE, SHARES, apply, expected_time, shares_of
from wide.methods.catalogue import Match, get
from wide.methods.method import Target
from wide.methods.routed import effort_of
from wide.models.adapter import load, save
from wide.models.attach import attachment, is_attached
from wide.models.hub import ADAPTER
from wide.records import COMPARISON, GRID, Cell, Record, Stage
from wide.report.comparison import FINISHED, read_comparison
from wide.report.comparison_tables import to_text
from wide.report.folders import draw_comparison
from wide.runs.folder import RunFolder
from wide.runs.materials import Materials
from wide.runs.process import say, stoppable
from wide.runs.sources import require_lora
from wide.training.modes import rehearsal
from wide.training.stages import recover
from wide.training.trainer import micro_batch_size

_COUNTED: dict[Match, str] = {"nominal": "as the method does", "linear_flops": "linear FLOPs of the decoder layers"}


class ComparisonRun:
    """One `wide compare`; with `debug` a cell that fails ends the run with its error."""

    def __init__(
        self, request: CompareRequest, folder: RunFolder, *, command: Sequence[str], debug: bool = False
    ) -> None:
        self._request, self._folder = request, folder
        self._command, self._debug = shlex.join(command), debug
        self._cells = CellFolders(request, folder)

    @cached_property
    def _materials(self) -> Materials:
        asked = self._request
        return Materials(asked.run, asked.scoring, asked.tasks, max_tokens=asked.max_tokens)

    def run(self) -> None:
        """Run the cells that are not finished, and draw tables and page, also of a comparison that is stopped.

        Raises EvaluationError if cells failed, when the others are measured and drawn, and KeyboardInterrupt after
        Ctrl-C or SIGTERM, when training has written a checkpoint.
        """
        with stoppable(self._cells.kept), self._folder:
            self._prepare()
            try:
                finished = self._run_cells()
            except KeyboardInterrupt:
                # Leave the page of what was measured, if that is anything.
                if any(map(self._cells.is_complete, self._request.own_cells())):
                    draw_comparison(read_comparison(self._folder.path), self._folder.path)
                raise
            say()
            draw(self._folder.path)
        if not all(finished):
            counted = f"{finished.count(False)} of {len(finished)} cells failed"
            raise EvaluationError(f"{counted}, see the table; {self._cells.again} runs them again")

    def _prepare(self) -> None:
        """Check everything that can be checked, then claim the folder."""
        request = self._request
        for stage in (request.stage, *([] if request.recover is None else [request.recover])):
            micro_batch_size(stage, 1)
        if request.recover is not None:
            require_lora()
        check_tasks(request.tasks.names, request.tasks.local_data)
        seed = request.grid.seed_values[0]
        if request.recover is not None:
            # Too little text must not be noticed after the first row.
            self._materials.blocks(replace(request.recover, seed=seed))
        blocks = self._materials.check_text(replace(request.stage, seed=seed))
        self._rehearse(seed)
        self._folder.claim()
        file, grid = self._folder.new_records(GRID, device=self._materials.device), request.grid
        target = f"sparsities match {grid.match}; {grid.budget} budget"
        told: dict[str, Any] = {"grid.methods": grid.method_names, "grid.sparsities": grid.sparsity_values}
        told |= {"LoRA": _recipe(request), "grid.recovers": float(request.recover is not None)}
        self._materials.note(file, blocks, target, self._command, **told)

    def _rehearse(self, seed: int) -> None:
        """Refuse rows that cannot work, up to where their methods read text; whoever began the comparison did that."""
        if (self._folder.path / GRID).is_file() and self._folder.resume:
            return
        for cell in self._request.own_cells():
            if cell.seed != seed or cell.method == DENSE:
                continue
            try:
                with rehearsal(self._materials.model):
                    self._apply(cell, None)
            except WideError as error:
                raise type(error)(f"{cell.title}: {error}") from error

    def _run_cells(self) -> list[bool]:
        own = self._request.own_cells()
        titles = {cell: f"[{n}/{len(own)}] {cell.title}" for n, cell in enumerate(own, 1)}
        if self._request.grid.shard is None:
            say(f"cells    {len(own)} of this process\n")
            return [self._run_cell(cell, titles[cell]) for cell in own]
        say(f"cells    {len(own)}, of which this process takes one after the other that is free\n")
        with closing(free_cells(own, self._cells.path, self._cells.is_over)) as free:
            finished = [self._run_cell(cell, titles[cell]) for cell in free]
        others = sum(not self._cells.is_over(cell) for cell in own)
        if others:
            say(f"left     {others} of {len(own)} cells to the processes that hold them")
        return finished

    def _run_cell(self, cell: Cell, title: str) -> bool:
        try:
            for stage in self._request.stages(cell):
                name = f"{title} + LoRA" if stage.recovered else title
                if self._cells.is_finished(stage):
                    say(f"{name}: finished before")
                elif not self._run_stage(stage, name):
                    return False
        finally:
            self._materials.take_off()
        if not self._request.grid.keep_adapters:
            # The records stay.
            for name in (ADAPTER, RECOVERED, TRAINING):
                shutil.rmtree(self._cells.path(cell) / name, ignore_errors=True)
        return True

    def _run_stage(self, stage: Stage, name: str) -> bool:
        began, failed = time.monotonic(), False
        try:
            found = self._measure(stage)
        except KeyboardInterrupt as interrupt:
            kept = self._cells.kept_of(stage.cell)
            raise KeyboardInterrupt(f"{name} {str(interrupt) or 'stopped'}; {kept}") from interrupt
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._cells.records(stage.cell, self._materials.device).append(
                [Record(subject=stage, metric="status", value=reason, unit="text")]
            )
            if self._debug:
                raise
            found, failed = f"FAILED, {error}", True
        say(f"{name}: {found}, {time.monotonic() - began:.0f} s")
        if failed:
            # Only now the error's frames hold none of its memory any more.
            self._materials.forget_model()
        return not failed

    def _measure(self, stage: Stage) -> str:
        """Run a stage of a cell, and return in words what came out."""
        model, cell = self._materials.model, stage.cell
        folder = self._cells.path(cell)
        if not is_attached(model) and (folder / ADAPTER).is_dir():
            # The method has decided before.
            load(model, folder / ADAPTER)
        elif not is_attached(model):
            self._apply(cell, folder / TRAINING)
            save(model, folder / ADAPTER)
        if stage.recovered:
            assert self._request.recover is not None
            lora = replace(self._request.recover, seed=cell.seed)
            recover(model, self._materials.blocks(lora), stage=lora, output=folder / RECOVERED, resume=True)
        records, provenance = self._cells.records(cell, self._materials.device), attachment(model).provenance
        if stage.recovered:
            # Routers decide otherwise after LoRA.
            blocks = self._materials.blocks(replace(self._request.stage, seed=cell.seed))
            provenance = provenance | {PROVENANCE: provenance[PROVENANCE] | shares_of(model, blocks)}
        records.append(_stage_records(stage, provenance, self._request.grid))
        report, found = self._materials.measure(stage)
        records.append([*found, Record(subject=stage, metric="status", value=FINISHED, unit="text")])
        return _in_words(report)

    def _apply(self, cell: Cell, output: Path | None) -> None:
        """Let the method of a cell decide or train; without a folder it rehearses."""
        model, request = self._materials.model, self._request
        stage = replace(request.stage, seed=cell.seed)
        blocks, method = self._materials.blocks(stage), get(request.grid.method_of(cell.method))
        settings = request.settings[cell.method]
        if request.grid.budget == "equal":
            settings = as_many_tokens(settings, stage, blocks.num_tokens)
        if output is not None and (expected := expected_time(model, method, blocks, cell.sparsity, settings, stage)):
            say(f"{cell.title}: {expected}")
        target = Target(sparsity=cell.sparsity, match=request.grid.match_of(cell.method))
        how: dict[str, Any] = {"stage": stage, "objective": request.objective, "seed": cell.seed}
        apply(model, method, blocks, target, settings, output=output, resume=output is not None, **how)


def draw(folder: Path) -> None:
    """Write tables, page and figures of whatever has been measured, and print the tables.

    Raises DataError if it is not the folder of a comparison.
    """
    comparison = read_comparison(folder)
    say(f"drawing  {folder}")
    paths, notes = draw_comparison(comparison, folder)
    written = [f"  {path}" for path in (folder / COMPARISON, *paths)]
    say("\n".join([to_text(comparison), "\nwritten:", *written, *(f"note     {n}" for n in dict.fromkeys(notes))]))


def _stage_records(stage: Stage, provenance: dict[str, Any], grid: GridOptions) -> Iterator[Record]:
    """Yield what the method's report says, with the cost of LoRA in its place where that is the stage."""
    report = provenance[PROVENANCE]
    for name, metric in SHARES.items():
        yield Record(subject=stage, metric=f"sparsity.{metric}", value=report[name], unit="share")
    cost = report
    if stage.recovered:
        facts = provenance["recover"]
        cost = asdict(effort_of(facts)) | {"seconds": facts["seconds"]}
    for name, unit in (("tokens_forward", "token"), ("tokens_backward", "token"), ("seconds", "s")):
        yield Record(subject=stage, metric=f"method.{name}", value=cost[name], unit=unit)
    if stage.recovered:
        return
    lines, own = [*report["deviations"]], grid.match_of(stage.cell.method)
    if own != grid.match:
        lines.insert(0, f"the target counts {_COUNTED[own]}, in the other rows {_COUNTED[grid.match]}")
    yield Record(subject=stage, metric="deviations", value="\n".join(lines), unit="text")
    yield Record(subject=stage, metric="settings", value=report["settings"])


def _in_words(report: EvaluationReport) -> str:
    words = []
    if report.model.perplexity is not None:
        words.append(f"perplexity {report.model.perplexity.perplexity:.2f}")
    if report.model.tasks is not None and report.model.tasks.average is not None:
        words.append(f"accuracy {report.model.tasks.average:.1%}")
    if report.sparsity is not None:
        words.append(f"saves {report.sparsity.linear_flops_layers:.1%} of the layers' linear FLOPs")
    return ", ".join(words)


def _recipe(request: CompareRequest) -> str:
    stage = request.recover
    if stage is None:
        return ""
    taught = f"{stage.distillation:g} of the loss distilled from the dense model, " if stage.distillation else ""
    return (
        f"{stage.steps} steps of {stage.batch_size} x {stage.sequence_length} tokens, rank {stage.lora_rank}, alpha "
        f"{stage.lora_alpha:g}, learning rate {stage.learning_rate:g}, {taught}the same for all rows"
    )
