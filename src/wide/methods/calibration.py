"""Calibration text of all methods: windows of the one corpus, and losses on them."""

import math

import numpy as np
import torch
from torch import Tensor

from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.methods.catalogue import Calibrated


def calibration_windows(blocks: TokenBlocks, settings: Calibrated) -> Tensor:
    """Return the windows that a method's settings ask for, int64 `[N, T]`; see `windows`."""
    return windows(blocks, count=settings.num_windows, length=settings.window_length, seed=settings.seed)


def windows(
    blocks: TokenBlocks,
    *,
    count: int,
    length: int,
    seed: int,
    settings: tuple[str, str] = ("num_windows", "window_length"),
) -> Tensor:
    """Return windows that do not overlap, int64 `[N, T]`, drawn at random; blocks are used again only after all were.

    `settings` says which settings ask for the number and for the length, for the messages. Raises ConfigError if a
    window is longer than a block, shorter than two tokens, or the text holds fewer windows.
    """
    of_count, of_length = settings
    # The first token of a window is not predicted.
    if count < 1 or length < 2:
        raise ConfigError(f"{of_count}={count}, {of_length}={length}: wanted at least 1 window, of at least 2 tokens")
    require_length(blocks, length, of_length)
    per_block = blocks.sequence_length // length
    if count > len(blocks) * per_block:
        raise ConfigError(
            f"the calibration text holds {len(blocks) * per_block} windows of {length} tokens, {of_count} asks for "
            f"{count}; give more text, or a smaller {of_count} or {of_length}"
        )
    generator = np.random.default_rng(seed)
    visited = generator.permutation(len(blocks))[:count]
    shifts = generator.integers(blocks.sequence_length - per_block * length + 1, size=len(visited))
    places = generator.permuted(np.tile(np.arange(per_block), (len(visited), 1)), axis=1)
    tour, block = np.divmod(np.arange(count), len(visited))
    begins = torch.from_numpy(shifts[block] + length * places[block, tour])
    ids = blocks.batch(visited[block].tolist()).input_ids.gather(1, begins.unsqueeze(1) + torch.arange(length))
    if blocks.first is not None:
        ids[:, 0] = blocks.first
    return ids


def require_length(blocks: TokenBlocks, length: int, setting: str) -> None:
    """Raise ConfigError if the tokens that a setting asks for are more than a block of calibration text has."""
    if length > blocks.sequence_length:
        raise ConfigError(
            f"{setting} {length} is longer than the {blocks.sequence_length} tokens of a block of calibration text; "
            f"pack the text with --train.sequence_length {length} or more, or set {setting} to {blocks.sequence_length}"
        )


def num_predicted(ids: Tensor) -> int:
    """Return how many tokens of windows `[N, T]` are predicted: all but the first of each."""
    return ids.shape[0] * (ids.shape[1] - 1)


def json_number(value: float) -> float | None:
    """Return a number for a report: None for infinities and NaN, which JSON does not know."""
    return float(value) if math.isfinite(value) else None
