"""What stage 1 does before its first step: groups of channels, and routers that know something already."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import BatchSource, TokenBatch
from wide.errors import TrainingError
from wide.models.discovery import discover
from wide.plan import Plan
from wide.training.activations import first_batches
from wide.training.channel_clusters import cluster_channels
from wide.training.checkpoint import CheckpointFolder
from wide.training.parallel import DataParallel
from wide.training.router_fit import fit_routers
from wide.training.trainer import micro_batch_size

_ORDER_FILE = "channel_order.safetensors"
# Groups are made for skipping shares in between; at the ends nothing would tell them apart.
_LEAST, _MOST = 0.1, 0.9


class Start:
    """The start of one run of stage 1: first `orders`, then, once the routers are attached, `fit`.

    A run that continues from a checkpoint takes the orders that lie beside it, and leaves the routers to it.

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
        checkpoints = None if folder is None else CheckpointFolder(folder / "checkpoints", fingerprint="")
        self._continues = resume and checkpoints is not None and bool(checkpoints.steps())
        self._seconds = 0.0
        self._text: list[TokenBatch] = []

    def orders(self) -> dict[str, Tensor] | None:
        """Return the orders of the FFN channels, None where they stay as they are.

        Raises:
            TrainingError: If a run is to be continued and its orders cannot be read.
        """
        if self._config.ffn_grouping == "adjacent":
            return None
        if self._continues:
            return self._read_orders()
        began = time.monotonic()
        orders = cluster_channels(
            self._model,
            discover(self._model),
            self._plan,
            self._batches(),
            skipped=min(max(self._objective.sparsity, _LEAST), _MOST),
            seed=self._stage.seed,
        )
        orders = {name: order.to(self._parallel.device) for name, order in orders.items()}
        self._parallel.broadcast(orders.values())
        orders = {name: order.cpu() for name, order in orders.items()}
        if self._folder is not None and self._parallel.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Whole or not there: a run that is killed here must not find half of it.
            temporary = self._folder / f".{_ORDER_FILE}"
            save_file(orders, str(temporary))
            os.replace(temporary, self._folder / _ORDER_FILE)
        self._seconds += time.monotonic() - began
        return orders

    def fit(self) -> None:
        """Fit the routers of the attached model, if the configuration says so."""
        if self._config.router_start == "random" or self._continues:
            return
        began = time.monotonic()
        fit_routers(self._model, self._batches(), self._objective)
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        self._seconds += time.monotonic() - began

    def facts(self) -> dict[str, Any]:
        """Return what was done, JSON-ready; empty for the paper's start."""
        if self._config.ffn_grouping == "adjacent" and self._config.router_start == "random":
            return {}
        return {
            "ffn_grouping": self._config.ffn_grouping,
            "router_start": self._config.router_start,
            "tokens": sum(int(batch.valid.sum()) for batch in self._text),
            "seconds": self._seconds,
            "resumed": self._continues,
        }

    def _batches(self) -> list[TokenBatch]:
        if not self._text:
            self._text = first_batches(
                self._source,
                batch_size=self._stage.batch_size,
                micro_batch_size=micro_batch_size(self._stage, self._parallel.world),
                tokens=self._config.start_tokens,
            )
        return self._text

    def _read_orders(self) -> dict[str, Tensor]:
        assert self._folder is not None
        file = self._folder / _ORDER_FILE
        try:
            return load_file(str(file))
        except (SafetensorError, OSError) as error:
            raise TrainingError(
                f"{file} cannot be read ({error}), so the groups of the checkpoints beside it are not known; begin "
                "anew in another folder"
            ) from error
