"""What stage 1 does before its first step: groups of channels, and routers that know something already."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import BatchSource, TokenBatch
from wide.errors import TrainingError
from wide.models.discovery import discover
from wide.plan import Plan
from wide.training.activations import TokensRead, counting
from wide.training.channel_groups import cluster_channels
from wide.training.checkpoint import has_checkpoint
from wide.training.parallel import DataParallel
from wide.training.router_fit import fit_routers
from wide.training.text_source import first_batches
from wide.training.trainer import micro_batch_size

_ORDER_FILE, _FACTS_FILE = "channel_order.safetensors", "start.json"
# Groups are made for skipping shares in between; at the ends nothing would tell them apart.
_LEAST, _MOST = 0.1, 0.9


class Start:
    """The start of one run of stage 1: first `orders`, then, once the routers are attached, `fit`.

    A run that continues from a checkpoint takes the orders and the facts that lie beside it, and leaves the routers to
    it.

    Args:
        model: Without routers.
        plan: That will be attached.
        config: What the plan was made from; a plan given as such begins as the paper does.
        source: The training text, of which the first batches are read.
        objective: The target.
        stage: Sizes and seed.
        parallel: The processes of the run; all read the same text and end with the orders of the first.
        folder: Where the run writes; None writes nothing.
        resume: Whether it continues from a checkpoint in `folder`, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: WideConfig | Plan | None,
        source: BatchSource,
        objective: ObjectiveConfig,
        stage: StageConfig,
        parallel: DataParallel,
        folder: Path | None,
        *,
        resume: bool,
    ) -> None:
        """Read nothing yet."""
        self._model, self._plan, self._source, self._objective = model, plan, source, objective
        self._config = config if isinstance(config, WideConfig) else WideConfig()
        self._stage, self._parallel, self._folder = stage, parallel, folder
        self._continues = resume and folder is not None and has_checkpoint(folder)
        self._seconds = 0.0
        self._text: list[TokenBatch] = []
        self._read = TokensRead()
        self._recorded: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's course depends on here; empty for the paper's start."""
        config = self._config
        if config.ffn_grouping == "adjacent" and config.router_start == "random":
            return {}
        return {
            "ffn_grouping": config.ffn_grouping,
            "router_start": config.router_start,
            "start_tokens": config.start_tokens,
        }

    def orders(self) -> dict[str, Tensor] | None:
        """Return the orders of the FFN channels, None where they stay as they are.

        Raises:
            TrainingError: If a run is to be continued and its orders, or the facts of its start, cannot be read.
        """
        if self._continues and self.settings:
            self._recorded = self._recorded_file(
                _FACTS_FILE,
                lambda file: json.loads(file.read_text(encoding="utf-8")),
                "it is not known how the run beside it began; continue it with its own ffn_grouping and router_start, "
                "or begin",
            )
        if self._config.ffn_grouping == "adjacent":
            return None
        if self._continues:
            known = "the groups of the checkpoints beside it are not known; begin"
            found: dict[str, Tensor] = self._recorded_file(_ORDER_FILE, load_file, known)
            return found
        with self._measured():
            orders = cluster_channels(
                self._model,
                discover(self._model),
                self._plan,
                self._batches(),
                skipped=min(max(self._objective.sparsity, _LEAST), _MOST),
                seed=self._stage.seed,
                parallel=self._parallel,
            )
            self._write(_ORDER_FILE, save(orders))
        return orders

    def fit(self) -> None:
        """Fit the routers of the attached model, if the configuration says so; then write what was done."""
        if self._continues or not self.settings:
            return
        if self._config.router_start == "fitted":
            recompute = self._stage.gradient_checkpointing
            with self._measured():
                fit_routers(self._model, self._batches(), self._objective, gradient_checkpointing=recompute)
        self._write(_FACTS_FILE, json.dumps(self.facts(), indent=2).encode())

    def facts(self) -> dict[str, Any]:
        """Return what was done, by this run or the one that it continues, JSON-ready; empty for the paper's start."""
        if not self.settings:
            return {}
        if self._recorded is not None:
            return self._recorded | {"resumed": True}
        return {
            "ffn_grouping": self._config.ffn_grouping,
            "router_start": self._config.router_start,
            "tokens": sum(int(batch.valid.sum()) for batch in self._text),
            "tokens_forward": self._read.forward,
            "tokens_backward": self._read.backward,
            "seconds": self._seconds,
            "resumed": False,
        }

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Count the tokens and the time of what is done inside the block."""
        began = time.monotonic()
        with counting(self._model, self._read):
            yield
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        self._seconds += time.monotonic() - began

    def _batches(self) -> list[TokenBatch]:
        if not self._text:
            self._text = first_batches(
                self._source,
                batch_size=self._stage.batch_size,
                micro_batch_size=micro_batch_size(self._stage, self._parallel.world),
                tokens=self._config.start_tokens,
            )
        return self._text

    def _write(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all: a run that is killed here must not find half of it."""
        if self._folder is None or not self._parallel.is_first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}"
        temporary.write_bytes(content)
        os.replace(temporary, self._folder / name)

    def _recorded_file(self, name: str, read: Callable[[Path], Any], otherwise: str) -> Any:
        assert self._folder is not None
        file = self._folder / name
        try:
            return read(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise TrainingError(f"{file} cannot be read ({error}), so {otherwise} anew in another folder") from error
