"""What a run measures on held-out text: its records, what stays beside the adapter, and what is said at the end."""

from pathlib import Path
from typing import Any

from wide.data.batches import TokenBlocks
from wide.models.attach import attachment, is_attached
from wide.records import Record, read_records
from wide.report.drawing import FOLDER
from wide.report.folders import PAGE, draw_folder
from wide.report.selection import Selection, measure_of
from wide.report.table import summary_table, verdict
from wide.runs.folder import CONFIG, RunFolder
from wide.runs.materials import Materials
from wide.runs.process import is_main_process, say
from wide.runs.settings import GenerationOptions, RunRequest, flags_named
from wide.runs.text import continue_prompt, encode
from wide.training.parallel import DataParallel

BOARD = "tensorboard"
DENSE_ADAPTED = "dense + LoRA"
_PERPLEXITY = "token_perplexity"


class RunResults:
    """The records of a run, subject by subject: the dense model, and what each stage leaves.

    Raises ConfigError if the prompt of the sample does not fit into the model.
    """

    def __init__(self, request: RunRequest, folder: RunFolder, materials: Materials, processes: DataParallel) -> None:
        self._folder, self._materials, self._processes = folder, materials, processes
        self._draws, self._prompt, self._target = request.run.report, request.sample.prompt, ""
        self._sampling = GenerationOptions(max_new_tokens=request.sample.tokens, temperature=0.8, top_p=0.9)
        self.records = folder.new_records(device=materials.device)
        if self._prompt and request.scoring.tokens != 0:
            with flags_named("sample", of=()):
                encode(materials.model, materials.tokenizer, self._prompt, self._sampling)

    def begin(self, blocks: TokenBlocks, target: str, sparsity: float | None, command: str) -> None:
        """Claim the folder, and note what is run; toward no sparsity where nothing is steered."""
        self._folder.claim()
        self._target = target
        steered = {} if sparsity is None else {"target.sparsity": sparsity}
        self._materials.note(self.records, blocks, target, command, **steered)

    def is_due(self, subject: str) -> bool:
        """Return whether a subject is to be measured, and was not yet."""
        if self._materials.held_out[0] is None:
            return False
        # The main process writes the file, so others may read it too early.
        return self._processes.agree(self.records.latest(subject, _PERPLEXITY) is None)

    def is_done(self, subject: str) -> bool:
        """Return whether an earlier part of this run finished a stage, as this process reads it."""
        metric = "training.seconds" if self._materials.held_out[0] is None else _PERPLEXITY
        return self.records.latest(subject, metric) is not None

    def measure(self, subject: str) -> None:
        """Measure a subject, if it is due."""
        if self.is_due(subject):
            self.records.append(self.of(subject))

    def of(self, subject: str) -> list[Record]:
        """Return what is measured of the model now, as records, and note it beside the adapter; none without text."""
        if self._materials.held_out[0] is None:
            return []
        # On every process: layers of a sharded model are gathered from all, and those of a replicated one would wait.
        model, records = self._materials.model, list[Record]()
        if is_attached(model) and attachment(model).routers():
            records += self._materials.measure_routing(subject)
        report, scores = self._materials.measure(subject)
        records += scores
        assert report.model.perplexity is not None
        if report.sparsity is not None:
            known = {name: self.records.latest(name, _PERPLEXITY) for name in ("dense", DENSE_ADAPTED)}
            # Beside the adapter stays what it was worth.
            attachment(model).provenance["held_out"] = {
                "data": self._materials.held_out[1],
                "token_perplexity": report.model.perplexity.to_json(),
                # The same text: what pruning costs is the distance from these.
                "of_dense": {name: found.value for name, found in known.items() if found is not None},
                "sparsity": report.sparsity.to_json(),
            }
        field, words = measure_of(self._target)
        sparsity = "" if report.sparsity is None else f", skipped {getattr(report.sparsity, field):.1%} {words}"
        say(f"{subject}: perplexity {report.model.perplexity.perplexity:.2f}{sparsity}")
        if self._prompt:
            text, _ = continue_prompt(model, self._materials.tokenizer, self._prompt, self._sampling)
            records.append(Record(subject=subject, metric="sample", value=self._prompt + text, unit="text"))
        return records

    def finish(self, seconds: float) -> None:
        """Draw the report, and print figures and files; `seconds` is how long the run took."""
        if not is_main_process():
            return
        folder = self._folder.path
        paths: list[Path] = [self._folder.adapter, self.records.path, folder / CONFIG]
        if self._draws:
            paths += [folder / name for name in (PAGE, FOLDER)]
            # A resume that had nothing left to do changes nothing.
            if self.records.has_grown or not (folder / PAGE).is_file():
                say("\ndrawing the report")
                draw_folder(folder)
        if (folder / BOARD).is_dir():
            paths.append(folder / BOARD)
        run, lines = Selection(*read_records(self.records.path)), list[Any]()
        if self._materials.held_out[0] is not None:
            lines += ["", *verdict(run), "", summary_table(run).to_text()]
            if text := run.text(run.subjects()[-1], "sample"):
                lines += ["", f"sample ({run.subjects()[-1]}):", *(f"  | {line}" for line in text.splitlines())]
        lines += ["", f"finished in {seconds:.0f} s; written:", *(f"  {path}" for path in paths)]
        say("\n".join(lines))
