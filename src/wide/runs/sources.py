"""The models and texts of a run, as its settings name them."""

import glob
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wide.config import StageConfig
from wide.data.batches import TokenBlocks, load_blocks
from wide.data.corpus import PYTHON_DOCS, load_documents
from wide.data.documents import Document
from wide.data.tokenizer import longest_input
from wide.errors import ConfigError, DataError, EmptySplitError, MissingExtraError
from wide.materialisation.checkpoint import load_checkpoint
from wide.models.adapter import load
from wide.models.dial import set_sparsity
from wide.models.pretrained import choose_device, is_pruned_checkpoint, load_pretrained
from wide.runs.folder import ADAPTER
from wide.runs.settings import AdapterOptions, EvalOptions, ModelOptions, RunOptions

_WITHOUT_HELD_OUT = "Name some with --eval.data (and --eval.split), or switch the evaluation off with --eval.tokens 0"
# Characters of text that hold a token at the very most, in prose of any language and any tokenizer in use.
_CHARACTERS_PER_TOKEN = 16


def load_base(options: ModelOptions, *, pruned_too: bool = False) -> Any:
    """Return the base model in evaluation mode; under torchrun each process takes its own GPU.

    Args:
        options: Of the model.
        pruned_too: Whether a full pruned checkpoint may stand for it, which is then routed.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = options.device
    if device == "auto" and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if pruned_too and is_pruned_checkpoint(options.model):
        where = choose_device(device)
        return load_checkpoint(options.model, dtype=options.dtype).to(where)
    return load_pretrained(options.model, dtype=options.dtype, device=device)


def load_routed(options: AdapterOptions) -> Any:
    """Return the base model with its adapter, if one is named, and the threshold set, if asked for."""
    model = load_base(options, pruned_too=options.adapter is None)
    if options.adapter is not None:
        attach_adapter(model, options)
    return model


def attach_adapter(model: Any, options: AdapterOptions) -> None:
    """Attach the adapter that is named, and set the threshold, if asked for.

    Raises:
        AdapterError: If the adapter is incomplete or damaged, or does not fit the model.
        NotAttachedError: If the model is attached already.
    """
    assert options.adapter is not None
    load(model, find_adapter(options.adapter))
    if options.sparsity is not None:
        set_sparsity(model, options.sparsity)


def find_adapter(name: str) -> Path:
    """Return the adapter's folder: the one named, or the one inside a run's folder."""
    inside = Path(name) / ADAPTER
    return inside if inside.is_dir() else Path(name)


def check_window(options: EvalOptions, model: Any) -> None:
    """Refuse windows of held-out text that a model has no positions for.

    Raises:
        ConfigError: If they are longer.
    """
    longest = longest_input(model)
    if options.tokens != 0 and longest is not None and options.window > longest:
        raise ConfigError(
            f"window {options.window} exceeds the {longest} positions of the model, so its scores would mean nothing; "
            f"set it to {longest} or less"
        )


def require_lora() -> None:
    """Refuse stage 2 before stage 1 has been trained in vain.

    Raises:
        MissingExtraError: If PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("stage 2 needs PEFT: pip install 'wide[lora]', or leave it out with --recover.steps 0")


def training_blocks(options: RunOptions, held_out: EvalOptions, tokenizer: Any, stage: StageConfig) -> TokenBlocks:
    """Return the packed training text, without the documents that are held out of it for the evaluation.

    Raises:
        DataError: If there is too little text, or none that is not held out.
    """
    holds_out = held_out.tokens != 0 and held_out.data is None and not _is_hub_name(options.data)
    try:
        return load_blocks(
            options.data,
            tokenizer,
            sequence_length=stage.sequence_length,
            split="train" if holds_out else None,
            text_field=options.text_field,
            max_documents=options.max_documents,
            cache=None if options.cache is None else Path(options.cache).expanduser(),
            seed=stage.seed,
        )
    except EmptySplitError as error:
        raise DataError(f"no text to train on beside the held-out text: {error}. {_WITHOUT_HELD_OUT}") from error


def held_out_documents(source: str, options: EvalOptions, *, text_field: str) -> tuple[list[Document], str]:
    """Return as many held-out documents as the evaluation needs, and what to call them.

    Args:
        source: The training source, for an evaluation that names no source of its own.
        options: Of the evaluation.
        text_field: Field that holds the text, where rows have fields.

    Raises:
        DataError: If there is no held-out text; the message says how to name some.
    """
    name, split = options.data or source, options.split
    if split is None:
        split = _default_split(name, is_training_source=options.data is None)
    try:
        documents = _enough(load_documents(name, split=split, text_field=text_field), options)
    except DataError as error:
        if options.data is not None:
            raise
        raise DataError(f"no held-out text: {error}. {_WITHOUT_HELD_OUT}") from error
    return documents, name if split is None else f"{name} ({split})"


def _enough(documents: Iterable[Document], options: EvalOptions) -> list[Document]:
    wanted = None if options.tokens is None else (options.tokens + options.window) * _CHARACTERS_PER_TOKEN
    kept, characters = [], 0
    for document in documents:
        kept.append(document)
        characters += len(document.text)
        if wanted is not None and characters >= wanted:
            break
    return kept


def _default_split(name: str, *, is_training_source: bool) -> str | None:
    if _is_hub_name(name):
        return "test"
    return "heldout" if is_training_source or name == PYTHON_DOCS else None


def _is_hub_name(name: str) -> bool:
    return name != PYTHON_DOCS and not Path(name).expanduser().exists() and not glob.has_magic(name)
