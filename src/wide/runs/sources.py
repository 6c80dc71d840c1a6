"""The models and texts of a run, as its settings name them."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from wide.config import StageConfig
from wide.data.corpus import load_documents
from wide.data.documents import Document, first_documents
from wide.data.progress import loading
from wide.data.tokenizer import check_positions
from wide.errors import DataError, MissingExtraError
from wide.evaluation.evaluate import scored_split
from wide.kernels.native.build import cache_folder
from wide.materialisation.checkpoint import load_checkpoint
from wide.models.adapter import load
from wide.models.pretrained import (
    choose_device,
    is_pruned_checkpoint,
    is_quantised_checkpoint,
    load_pretrained,
    load_skeleton,
    stored_facts,
)
from wide.models.thresholds import set_sparsity
from wide.runs.process import num_processes, say
from wide.runs.settings import AdapterOptions, EvalOptions, ModelOptions, Parallel, ScoredTasks
from wide.training.memory import needed
from wide.training.parallel import DataParallel
from wide.writing import write_whole

_WITHOUT_HELD_OUT = "Name some with --eval.data (and --eval.split), or switch the evaluation off with --eval.tokens 0"
# Weights take twice the memory in float32: that is for a clear gain only.
_WORTH_FLOAT32 = 1.5


def load_base(
    options: ModelOptions,
    *,
    pruned_too: bool = False,
    parallel: Parallel = "replicate",
    stages: Sequence[StageConfig] = (),
    distils: bool = False,
    keeps_dtype: bool = False,
) -> Any:
    """Return the base model in evaluation mode; under torchrun each process takes its own GPU.

    Args:
        pruned_too: Whether a full pruned checkpoint may stand for it, which is then routed.
        parallel: Whether processes that torchrun started share the weights.
        stages: What will be trained, for 'auto'.
        keeps_dtype: Whether 'auto' is the type of the file on every device.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = options.device
    if device == "auto" and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    where, dtype = choose_device(device), options.dtype if keeps_dtype else chosen_dtype(options)
    if dtype != options.dtype:
        say(f"in {dtype}, faster on this CPU; --dtype bfloat16 or float16 takes half of the memory", sys.stderr)
    if pruned_too and is_pruned_checkpoint(options.model):
        with loading():
            if is_quantised_checkpoint(options.model):
                return load_checkpoint(options.model, dtype=dtype, device_map={"": str(where)})
            return load_checkpoint(options.model, dtype=dtype).to(where)
    sharded = num_processes() > 1 and _is_to_be_sharded(options, parallel, stages, distils, where)
    with loading():
        return load_pretrained(options.model, dtype=dtype, device=device, sharded=sharded)


def chosen_dtype(options: ModelOptions) -> str:
    """Return the type of a base's weights: 'auto' is float32 on a CPU that is slow in the half precision of the file.

    A CPU is measured once, so that runs that go on find the same type. Several processes keep the file's.
    """
    if options.dtype != "auto" or choose_device(options.device).type != "cpu" or num_processes() > 1:
        return options.dtype
    stored = stored_facts(options.model)
    half = stored.get("dtype") or stored.get("torch_dtype")
    if half not in ("bfloat16", "float16") or stored.get("quantization_config") is not None:
        return options.dtype
    return "float32" if _cpu_speed(half) > _WORTH_FLOAT32 else options.dtype


def _cpu_speed(half: str) -> float:
    """Return how many times as fast as in half precision this CPU multiplies in float32; measured once a machine."""
    place = cache_folder() / f"cpu-{half}.json"
    with suppress(OSError, ValueError):
        return float(json.loads(place.read_text(encoding="utf-8")))
    first, second = (min(_product_seconds(dtype) for _ in range(3)) for dtype in (getattr(torch, half), torch.float32))
    with suppress(OSError):
        write_whole(place, json.dumps(first / second))
    return first / second


def _product_seconds(dtype: torch.dtype) -> float:
    rows, weight = (torch.full((count, 1024), 0.5, dtype=dtype) for count in (256, 1024))
    start = time.perf_counter()
    torch.nn.functional.linear(rows, weight)
    return time.perf_counter() - start


def _is_to_be_sharded(
    options: ModelOptions, parallel: Parallel, stages: Sequence[StageConfig], distils: bool, device: torch.device
) -> bool:
    """Return whether processes share the base: by 'auto' where it and training do not fit the smallest GPU."""
    processes = DataParallel.from_environment(device)
    reason = "as asked for"
    if parallel == "auto" and device.type != "cuda":
        parallel, reason = "replicate", "on CPUs the base is shared only where --parallel fsdp says so"
    elif parallel == "auto" and is_quantised_checkpoint(options.model):
        parallel, reason = "replicate", "quantised weights are shared only where --parallel fsdp says so"
    elif parallel == "auto":
        smallest = min(processes.gather(torch.cuda.get_device_properties(device).total_memory))
        skeleton = load_skeleton(options.model)
        # Where nothing is trained, the weights and a few tokens.
        wanted = stages or [StageConfig(batch_size=processes.world, sequence_length=2)]
        told: dict[str, Any] = {"distils": distils, "dtype": options.dtype, "world": processes.world}
        needs = [needed(skeleton, stage, **told) for stage in wanted]
        parallel = "replicate" if all(need.fits(smallest) for need in needs) else "fsdp"
        largest = max(needs, key=lambda need: need.total)
        reason = f"each with the whole base needs {largest}, and the smallest GPU has {smallest / 2**30:.1f} GiB"
    say(f"parallel {parallel} over {processes.world} processes: {reason}")
    return parallel == "fsdp"


def load_routed(options: AdapterOptions, *, keeps_dtype: bool = False) -> Any:
    """Return the base model with its adapter, if one is named, and the threshold set, if asked for."""
    model = load_base(options, pruned_too=options.adapter is None, keeps_dtype=keeps_dtype)
    attach_adapter(model, options)
    return model


def attach_adapter(model: Any, options: AdapterOptions) -> None:
    """Attach the adapter, if one is named, and set the threshold, if asked for.

    Raises AdapterError if the adapter is incomplete or damaged, or does not fit the model; NotAttachedError if the
    model is attached already.
    """
    if options.adapter is not None:
        load(model, options.adapter)
    if options.sparsity is not None:
        set_sparsity(model, options.sparsity)


def check_window(options: EvalOptions, tasks: ScoredTasks, model: Any) -> None:
    """Refuse windows of held-out text or of tasks that a model has no positions for (ConfigError)."""
    if options.tokens != 0 or tasks.names:
        check_positions("window", options.window, model)


def require_lora() -> None:
    """Refuse stage 2 without PEFT (MissingExtraError), before stage 1 has been trained in vain."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("stage 2 needs PEFT: pip install 'wide[lora]', or leave it out with --recover.steps 0")


def held_out_documents(
    source: str, options: EvalOptions, *, text_field: str, tokenizer: Any, provenance: Mapping[str, Any] | None = None
) -> tuple[list[Document], str]:
    """Return as many held-out documents as the evaluation needs, and what to call them.

    Raises DataError if there is no held-out text; the message says how to name some.

    Args:
        source: The training source, for an evaluation that names no source of its own.
        provenance: What the model was trained on, or will be, as adapters keep it.
    """
    name, split = options.data or source, options.split
    reading: dict[str, Any] = {"text_field": text_field, "tokenizer": tokenizer}
    if split is None:
        split = scored_split(name, provenance or {}, **reading)
        split = "heldout" if options.data is None else split
    try:
        found = load_documents(name, split=split, **reading)
        documents = list(found) if options.tokens is None else first_documents(found, options.tokens + options.window)
    except DataError as error:
        if options.data is not None:
            raise
        raise DataError(f"no held-out text: {error}. {_WITHOUT_HELD_OUT}") from error
    return documents, name if split is None else f"{name} ({split})"
