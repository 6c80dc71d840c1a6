"""What a run works on: one base model, its tokenizer, the text that is trained on and the text that is scored."""

import gc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from wide.config import RecoverConfig, StageConfig
from wide.data.batches import TokenBlocks, load_blocks
from wide.data.corpus import is_same_source
from wide.data.documents import Document
from wide.data.tokenizer import check_positions, check_vocabulary, load_tokenizer
from wide.errors import ConfigError
from wide.evaluation.evaluate import evaluate
from wide.evaluation.report import EvaluationReport
from wide.models.attach import detach, is_attached
from wide.models.pretrained import device_name
from wide.records import Content, Record, RecordFile, Subject
from wide.runs.measuring import evaluation_records, routing_of
from wide.runs.process import say
from wide.runs.settings import EvalOptions, RunOptions, ScoredTasks, flags_named
from wide.runs.sources import check_window, held_out_documents, load_base


class Materials:
    """Model and texts of a run, each loaded when it is first asked for.

    Args:
        scoring: How much of the held-out text is scored, and how; with 0 tokens there is none.
        max_tokens: How much of a text that is streamed from a hub is read, at most.
        stages: What will be trained, for what it needs of a GPU's memory.
        distils: Whether the loss compares with the dense model, for the same.
    """

    def __init__(
        self,
        run: RunOptions,
        scoring: EvalOptions,
        tasks: ScoredTasks | None = None,
        *,
        max_tokens: int,
        stages: Sequence[StageConfig] = (),
        distils: bool = False,
    ) -> None:
        self._run = run
        # Whole, because the end of a path may be that of another file.
        data = scoring.data and str(Path(scoring.data).expanduser().absolute())
        if data is not None and (scoring.data == run.data or is_same_source(data, run.data)):
            # What is scored is held out of the training then.
            scoring = replace(scoring, data=None)
        self._scoring = scoring
        # What is trained on, and what a run that goes on from an adapter adds: that it was before.
        self.trained: dict[str, Any] = {} if scoring.data is None else {"run": {"text": run.data, "split": None}}
        self._tasks = tasks or ScoredTasks()
        self._max_tokens = max_tokens
        self._stages, self._distils = stages, distils
        self._packed: tuple[tuple[int, int], TokenBlocks] | None = None
        run.require_found()
        scoring.require_found()
        say(f"model    {run.model}")
        self.tokenizer = load_tokenizer(run.model)

    @cached_property
    def model(self) -> Any:
        """The base model, with whatever the run has attached to it."""
        return load_base(self._run, parallel=self._run.parallel, stages=self._stages, distils=self._distils)

    @cached_property
    def device(self) -> str:
        """What the model runs on, in words."""
        return device_name(self.model)

    @cached_property
    def held_out(self) -> tuple[list[Document] | None, str]:
        """The held-out documents and what to call them; None and '' where no text is scored."""
        if self._scoring.tokens == 0:
            return None, ""
        run, told = self._run, {"tokenizer": self.tokenizer, "provenance": self.trained}
        documents, name = held_out_documents(run.data, self._scoring, text_field=run.text_field, **told)
        say(f"held out {name}: {len(documents)} documents")
        return documents, name

    def take_off(self) -> None:
        """Make the model bare again, if it was loaded."""
        if "model" in self.__dict__ and is_attached(self.model):
            detach(self.model)

    def forget_model(self) -> None:
        """Let the model be loaded anew, because nobody knows its state after an error."""
        self.__dict__.pop("model", None)
        gc.collect()
        torch.cuda.empty_cache()

    def blocks(self, stage: StageConfig) -> TokenBlocks:
        """Return the text packed for a stage; the last packing is kept.

        Too little text is a DataError, and sequences that are longer than the model has positions for a ConfigError.
        """
        with flags_named("recover" if isinstance(stage, RecoverConfig) else "train", of=("sequence_length",)):
            check_positions("sequence_length", stage.sequence_length, self.model)
        run, key = self._run, (stage.sequence_length, stage.seed)
        if self._packed is None or self._packed[0] != key:
            holds_out = self._scoring.tokens != 0 and self._scoring.data is None
            told: dict[str, Any] = {"sequence_length": stage.sequence_length, "seed": stage.seed}
            told |= {"text_field": run.text_field, "max_documents": run.max_documents, "max_tokens": self._max_tokens}
            told |= {"cache": None if run.cache is None else Path(run.cache).expanduser()}
            blocks = load_blocks(run.data, self.tokenizer, split="train" if holds_out else None, **told)
            self._packed = key, blocks
        return self._packed[1]

    def check_text(self, stage: StageConfig) -> TokenBlocks:
        """Say which text is trained on, read the held-out text, and return the packed one.

        Ids of the text beyond the model's vocabulary, and no held-out text, are a DataError.
        """
        blocks = self.blocks(stage)
        check_vocabulary(blocks.largest_id, self.model)
        say(f"data     {self._run.data}: {len(blocks)} blocks of {blocks.sequence_length} tokens")
        with flags_named("eval", of=("window",)):
            check_window(self._scoring, self._tasks, self.model)
        _ = self.held_out
        return blocks

    def note(self, file: RecordFile, blocks: TokenBlocks, target: str, command: str, **more: Content) -> None:
        """Record what is run, on what and toward what, unless `file` has that.

        Raises ConfigError if the texts, packed and held out, are not those of then: rows would not compare.
        """
        texts = [blocks.content_hash(), *(document.text for document in self.held_out[0] or ())]
        facts: dict[str, Content] = {name: getattr(self._run, name) for name in ("description", "model", "data")}
        facts |= {"target": target, "held-out text": self.held_out[1], "command": command}
        facts["window"] = f"at most {self._scoring.window} tokens at once, in text and tasks"
        facts |= {"texts": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16], **more}
        before = file.latest("run", "texts")
        if before is not None and before.value != facts["texts"]:
            raise ConfigError(
                f"the text in {self._run.data}, or the held-out text, is not what {file.path} began with; bring it "
                "back, or start anew with --overwrite or another --output"
            )
        # A kill or a full disk may have cut them: the last one says that all are there.
        if file.latest("run", [*facts][-1]) is None:
            file.append(
                Record(subject="run", metric=name, value=value, unit="text" if isinstance(value, str) else "")
                for name, value in facts.items()
            )

    def measure(self, subject: Subject) -> tuple[EvaluationReport, Iterator[Record]]:
        """Score the model as it is now, and return what was found, as the records of `subject`, too."""
        documents, name = self.held_out
        told = {"tokenizer": self.tokenizer, **self._scoring.protocol, **self._tasks.protocol}
        report = evaluate(self.model, documents, compare_dense=False, **told)
        return report, evaluation_records(subject, report.model, report.sparsity, name)

    def measure_routing(self, subject: str, *, blocks: int | None = None) -> Iterator[Record]:
        """Return the records of how the attached model routes the beginning of the held-out text."""
        return routing_of(self.model, self.tokenizer, *self.held_out, self._scoring, subject, blocks=blocks)
