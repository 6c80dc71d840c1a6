"""What stage 1 does before its first step: groups of channels, and routers that know something already."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import BatchSource
from wide.errors import TrainingError
from wide.models.attach import attach
from wide.models.discovery import discover
from wide.models.observe import now
from wide.models.pretrained import require_in_memory
from wide.plan import Plan
from wide.training.activations import TokensRead, counting
from wide.training.channel_groups import cluster_channels
from wide.training.checkpoint import has_checkpoint
from wide.training.parallel import DataParallel
from wide.training.router_fit import fit_routers
from wide.training.text_source import read_batches
from wide.training.trainer import micro_batch_size
from wide.writing import replacing

_ORDER_FILE, _FACTS_FILE = "channel_order.safetensors", "start.json"
# Groups are made for skipping shares in between; at the ends nothing would tell them apart.
_LEAST, _MOST = 0.1, 0.9


def start_settings(config: WideConfig | Plan | None) -> dict[str, Any]:
    """Return the settings of the start that a run's course depends on; empty for the paper's start."""
    if not isinstance(config, WideConfig) or (config.ffn_grouping, config.router_start) == ("adjacent", "random"):
        return {}
    return {name: getattr(config, name) for name in ("ffn_grouping", "router_start", "start_tokens")}


def attach_started(
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
) -> dict[str, Any]:
    """Attach routers, with channels clustered and routers fitted where the configuration says so.

    A run that continues from a checkpoint takes the channel permutations and the facts that lie beside it, and leaves
    the routers to it. All processes read the same text, the first batches of the source, and end with the permutations
    of the first one. Return what was done, by this run or the one that it continues, JSON-ready; empty for the paper's
    start.

    Args:
        config: What is attached; a plan given as such begins as the paper does.
        folder: Where the run writes, and a resumed one finds its checkpoint; None writes nothing.

    Raises:
        TrainingError: If a run is to be continued and its permutations, or the facts of its start, cannot be read.
        UnsupportedModelError: If weights are offloaded.
    """
    if not isinstance(config, WideConfig) or not start_settings(config):
        attach(model, config)
        return {}
    require_in_memory(model, "fitting routers or clustering channels")
    clustered, without_fit = config.ffn_grouping == "clustered", dataclasses.replace(config, router_start="random")
    if resume and folder is not None and has_checkpoint(folder):
        facts: dict[str, Any] = _recorded(
            folder / _FACTS_FILE,
            lambda file: json.loads(file.read_text(encoding="utf-8")),
            "it is not known how the run beside it began; continue it with its own ffn_grouping and router_start, or "
            "begin",
        )
        known = "the groups of the checkpoints beside it are not known; begin"
        attach(model, without_fit, orders=_recorded(folder / _ORDER_FILE, load_file, known) if clustered else None)
        return facts | {"resumed": True}
    writes = folder if parallel.is_first else None
    micro = micro_batch_size(stage, parallel.world)
    text = read_batches(source, batch_size=stage.batch_size, micro_batch_size=micro, tokens=config.start_tokens)
    read, seconds, orders, always = TokensRead(), 0.0, None, []

    @contextmanager
    def measured() -> Iterator[None]:
        nonlocal seconds
        began = now(parallel.device)
        with counting(model, read):
            yield
        seconds += now(parallel.device) - began

    if clustered:
        skipped = min(max(objective.sparsity, _LEAST), _MOST)
        with measured():
            orders = cluster_channels(
                model, discover(model), plan, text, skipped=skipped, seed=stage.seed, parallel=parallel
            )
            _write(writes, _ORDER_FILE, save(orders))
    attach(model, without_fit, orders=orders)
    if config.router_start == "fitted":
        with measured():
            always = fit_routers(model, text, objective, gradient_checkpointing=stage.gradient_checkpointing)
    facts = {
        "ffn_grouping": config.ffn_grouping,
        "router_start": config.router_start,
        "tokens": sum(int(batch.valid.sum()) for batch in text),
        "tokens_forward": read.forward,
        "tokens_backward": read.backward,
        "seconds": seconds,
        "always": always,
        "resumed": False,
    }
    _write(writes, _FACTS_FILE, json.dumps(facts, indent=2).encode())
    return facts


def _write(folder: Path | None, name: str, content: bytes) -> None:
    if folder is not None:
        with replacing(folder / name) as file:
            file.write_bytes(content)


def _recorded(file: Path, read: Callable[[Path], Any], otherwise: str) -> Any:
    try:
        return read(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise TrainingError(f"{file} cannot be read ({error}), so {otherwise} anew in another folder") from error
