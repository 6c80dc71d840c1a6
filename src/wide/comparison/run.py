"""Runs the cells of a comparison, or a share of them; what one cell does wrong costs no other."""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from wide.comparison.cell import CellRunner
from wide.comparison.grid import NEXT, CompareRequest
from wide.comparison.results import collect, draw
from wide.comparison.sharing import free_cells
from wide.errors import EvaluationError, MissingExtraError
from wide.evaluation.tasks import find_task
from wide.models.discovery import discover
from wide.records import Cell, Record
from wide.report.comparison import read_comparison
from wide.report.drawing import FOLDER
from wide.runs.folder import GRID, RunFolder
from wide.runs.materials import Materials
from wide.runs.process import say, stoppable
from wide.runs.sources import require_lora
from wide.training.trainer import micro_batch_size


class ComparisonRun:
    """One `wide compare`.

    Args:
        request: What is asked for.
        folder: Where everything goes.
        command: The command line, for the records.
        debug: Whether a cell that fails ends the run with its error.
    """

    def __init__(
        self, request: CompareRequest, folder: RunFolder, *, command: Sequence[str], debug: bool = False
    ) -> None:
        """Keep what was asked for; nothing is loaded yet."""
        self._request = request
        self._folder = folder
        self._command = shlex.join(command)
        self._debug = debug
        self._runner: CellRunner | None = None

    def run(self) -> None:
        """Run the cells that are not finished, and draw tables and page, also of a comparison that is stopped.

        Raises:
            EvaluationError: If cells failed; the others are measured and the tables drawn then.
            KeyboardInterrupt: After Ctrl-C or SIGTERM; training has written a checkpoint then.
        """
        with stoppable(self._kept):
            runner = self._runner = self._prepare()
            try:
                finished = self._run_cells(runner)
            except KeyboardInterrupt:
                self._draw_stopped(runner)
                raise
            say()
            draw(self._folder.path, later=self._leaves_figures(runner))
        if not all(finished):
            raise EvaluationError(
                f"{finished.count(False)} of {len(finished)} cells failed, see the table; {self._again} runs them again"
            )

    def _run_cells(self, runner: CellRunner) -> list[bool]:
        """Run the cells of this process, and return of each whether it is complete now."""
        grid, own = self._request.grid, self._request.own_cells()
        titles = {cell: f"[{n}/{len(own)}] {cell.title}" for n, cell in enumerate(own, 1)}
        if grid.shard != NEXT:
            say(f"cells    {len(own)} of this process\n")
            return [self._run_cell(runner, cell, titles[cell]) for cell in own]
        say(f"cells    {len(own)}, of which this process takes one after the other that is free\n")
        with closing(free_cells(own, runner.folder, runner.is_over)) as free:
            finished = [self._run_cell(runner, cell, titles[cell]) for cell in free]
        others = sum(not runner.is_over(cell) for cell in own)
        if others:
            say(f"left     {others} of {len(own)} cells to the processes that hold them")
        return finished

    def _draw_stopped(self, runner: CellRunner) -> None:
        """Leave the page of what a stopped comparison has measured, if that is anything."""
        if any(map(runner.is_complete, self._request.own_cells())):
            draw(self._folder.path, later=self._leaves_figures(runner), quiet=True)

    def _leaves_figures(self, runner: CellRunner) -> bool:
        """Return whether drawing is left to another process: only the one that ends last need spend the time."""
        folder = self._folder.path
        # Figures that lie there already are kept up to date, lest a page lose them.
        if self._request.grid.shard is None or (folder / FOLDER).is_dir():
            return False
        failed = {failure.cell.folder for failure in read_comparison(collect(folder)).failures()}
        return not all(cell.folder in failed or runner.is_complete(cell) for cell in self._request.cells())

    def _kept(self) -> str:
        """Say what is kept of a comparison that was stopped."""
        if self._runner is None:
            return self._folder.kept()
        own = self._request.own_cells()
        finished = sum(map(self._runner.is_complete, own))
        cells = f"{finished} of {len(own)} cells" if finished else f"none of {len(own)} cells"
        verb = "are" if finished > 1 else "is"
        where = f" and kept in {self._folder.path}" if finished else ""
        return f"{cells} {verb} finished{where}, and {self._again} goes on from there"

    @property
    def _again(self) -> str:
        # Processes that share a folder go on with what they find there, whether told so or not.
        if self._request.grid.shard:
            return "the same command"
        return "the same command with --resume (instead of --overwrite)"

    def _prepare(self) -> CellRunner:
        """Check everything that can be checked, then claim the folder."""
        request = self._request
        for stage in (request.stage, *([] if request.recover is None else [request.recover])):
            micro_batch_size(stage, 1)
        if request.recover is not None:
            require_lora()
        for name in request.tasks.names:
            find_task(name)
        if request.tasks.names and find_spec("lm_eval") is None:
            raise MissingExtraError("--eval.tasks needs lm-evaluation-harness: pip install 'wide[eval]'")
        materials = Materials(request.run, request.scoring, request.tasks)
        materials.check_text(replace(request.stage, seed=request.grid.seed_values[0]))
        runner = CellRunner(request, self._folder, materials)
        self._folder.claim()
        file = self._folder.new_records(GRID)
        if not file.path.is_file():
            file.device = materials.device
            file.append(self._grid_records(materials))
        return runner

    def _grid_records(self, materials: Materials) -> Iterator[Record]:
        request, grid, budget = self._request, self._request.grid, self._request.budget
        facts: dict[str, Any] = {
            "description": request.run.description,
            "model": request.run.model,
            "data": request.run.data,
            "target": f"sparsities match {grid.match}; {budget.budget} budget x {budget.budget_scale:g}",
            "held-out text": materials.held_out[1],
            "LoRA": _recipe(request),
            "command": self._command,
            "grid.methods": list(grid.method_names),
            "grid.sparsities": list(grid.sparsity_values),
        }
        for name, value in facts.items():
            yield Record(subject="run", metric=name, value=value, unit="text")
        yield Record(subject="run", metric="grid.recovers", value=float(request.recover is not None))
        sizes = {spec.attention.kv_group_size for spec in discover(materials.model)}
        if len(sizes) == 1:
            # What rows that name no size have: they share lines with those that name it.
            yield Record(subject="run", metric="model.attention_group_size", value=sizes.pop(), unit="channel")

    def _run_cell(self, runner: CellRunner, cell: Cell, title: str) -> bool:
        """Run what is missing of a cell, and return whether it is complete now."""
        try:
            for recovered in self._request.stages(cell):
                name = f"{title} + LoRA" if recovered else title
                if runner.is_finished(cell, recovered):
                    say(f"{name}: finished before")
                elif not self._run_stage(runner, cell, recovered, name):
                    return False
        finally:
            runner.materials.take_off()
        if not self._request.grid.keep_adapters:
            runner.remove_weights(cell)
        return True

    def _run_stage(self, runner: CellRunner, cell: Cell, recovered: bool, name: str) -> bool:
        began, failed = time.monotonic(), False
        try:
            found = runner.run(cell, recovered)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"{name} {str(interrupt) or 'stopped'}; {runner.kept(cell)}") from interrupt
        except Exception as error:
            runner.note_failure(cell, recovered, error)
            if self._debug:
                raise
            found = f"FAILED, {error}"
            failed = True
        say(f"{name}: {found}, {time.monotonic() - began:.0f} s")
        if failed:
            # Only now the error's frames hold none of its memory any more.
            runner.materials.forget_model()
        return not failed


def _recipe(request: CompareRequest) -> str:
    stage = request.recover
    if stage is None:
        return ""
    return (
        f"{stage.steps} steps of {stage.batch_size} x {stage.sequence_length} tokens, rank {stage.lora_rank}, alpha "
        f"{stage.lora_alpha:g}, learning rate {stage.learning_rate:g}, the same for all rows"
    )
