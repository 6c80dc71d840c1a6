"""Text in, text out through the runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wide.errors import ConfigError, ShapeError
from wide.inference.decoder import Decoder
from wide.inference.graphs import CapturedStep
from wide.inference.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Args:
        max_new_tokens: At most so many for each prompt.
        temperature: 0 takes the most likely token.
        top_p: Smallest set of tokens with at least this probability is drawn from; 1 draws from all.
        seed: Of the draws.

    Raises:
        ConfigError: If a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 17

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"max_new_tokens must be at least 1, temperature at least 0 and top_p in (0, 1]; got {self}"
            )


def generate_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    run: Run,
    sampling: Sampling,
    *,
    end_tokens: Sequence[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt, its end token included; steps replay a CUDA graph where there is CUDA.

    Args:
        decoder: The model.
        prompts: Token ids, each at least one; they need not be equally long.
        run: How the model runs.
        sampling: How tokens are chosen.
        end_tokens: Any of them ends a sequence.

    Raises:
        ShapeError: If a prompt is empty or too long for the decoder.
    """
    longest = max(len(prompt) for prompt in prompts)
    room = longest + sampling.max_new_tokens
    if min(len(prompt) for prompt in prompts) < 1 or room > decoder.max_length:
        raise ShapeError(
            f"prompts of 1 to {decoder.max_length - sampling.max_new_tokens} tokens leave room for "
            f"{sampling.max_new_tokens} new ones; got {sorted(len(prompt) for prompt in prompts)}"
        )
    device = decoder.device
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
    cache = decoder.new_cache(len(prompts), room)
    step = CapturedStep(decoder, cache, run) if device.type == "cuda" else None
    draws = torch.Generator(device=device).manual_seed(sampling.seed)
    logits = decoder.prefill(ids.to(device), lengths, cache, run)
    found: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * len(prompts)
    for count in range(sampling.max_new_tokens):
        tokens = choose(logits, sampling, draws)
        for row, token in enumerate(tokens.tolist()):
            if is_open[row]:
                found[row].append(token)
                is_open[row] = token not in end_tokens
        if not any(is_open) or count + 1 == sampling.max_new_tokens:
            break
        logits = decoder.step(tokens, cache, run) if step is None else step(tokens)
    return found


def generate_text(decoder: Decoder, tokenizer: Any, prompts: Sequence[str], run: Run, sampling: Sampling) -> list[str]:
    """Return the continuation of each prompt.

    Args:
        decoder: The model.
        tokenizer: A Hugging Face tokenizer; its end token ends a text.
        prompts: Texts.
        run: How the model runs.
        sampling: How tokens are chosen.
    """
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    end = tokenizer.eos_token_id
    found = generate_tokens(decoder, ids, run, sampling, end_tokens=() if end is None else (end,))
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]


def choose(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> Tensor:
    """Return one token for each row of logits `[B, V]`."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(-1, descending=True)
        # The token that crosses the bound still belongs to the set.
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        chances = torch.zeros_like(chances).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(chances, 1, generator=draws).squeeze(-1)
