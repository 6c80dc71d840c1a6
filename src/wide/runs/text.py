"""Generate text, on wide's operators where they run, and measure how fast it comes and what is skipped."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList, TextStreamer

from wide.data.tokenizer import check_vocabulary, longest_input
from wide.errors import ConfigError, WideError
from wide.inference.optimize import optimize
from wide.models.attach import attachment, is_attached
from wide.models.cost import SkipCounter, Sparsity
from wide.models.lora import merge_lora
from wide.models.observe import forward_without_head, judging, observe
from wide.runs.settings import GenerationOptions

# The engine captures a step when it comes first, and a short prompt when its length comes again.
_WARM_UP_CALLS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Generated text, and what was measured.

    Args:
        text: Without the prompt and without special tokens.
        prompt_tokens: Tokens that went in.
        tokens: Tokens that came out.
        skipped: What was skipped on prompt and text; None for a dense model.
        first: Seconds until the first token; None where nothing was streamed.
        step: Seconds from one token to the next, the median; None for less than two tokens, too.
    """

    text: str
    prompt_tokens: int
    tokens: int
    skipped: Sparsity | None
    first: float | None
    step: float | None

    def summary(self) -> str:
        """Return sizes, speed and what was skipped in one line."""
        prompt, text = f"prompt {self.prompt_tokens} tokens", f"text {self.tokens} tokens"
        if self.first:
            prompt += f", {self.prompt_tokens / self.first:.1f}/s"
        if self.step:
            text += f", {1 / self.step:.1f}/s"
        skipped = "dense, nothing skipped"
        if self.skipped is not None:
            skipped = (
                f"skipped groups on prompt and text: attention {self.skipped.attention:.1%}, FFN "
                f"{self.skipped.ffn:.1%}, mean {self.skipped.mean:.1%}; linear FLOPs {self.skipped.linear_flops:.1%}"
            )
        return f"[{prompt}; {text}; {skipped}]"


class _Timed(TextStreamer):
    """Prints text while it comes, and notes when: `times` begins with the prompt, in seconds."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


def install_operators(model: Any, backend: str) -> str:
    """Merge LoRA and let an attached model run operators that skip, where it can; return in words how it runs.

    Args:
        model: A causal LM in evaluation mode, attached or not.
        backend: As in `InferenceOptions`.

    Raises:
        WideError: If a backend is insisted on and the model cannot run it.
    """
    if not is_attached(model):
        return "dense: there are no routers, so nothing is skipped"
    if backend == "none" or (backend == "auto" and model.device.type != "cuda"):
        why = "as asked" if backend == "none" else f"operators that skip need a GPU, not {model.device}"
        return f"masked, so no faster than dense: {why}"
    try:
        optimize(merge_lora(model), backend=backend)
    except WideError as error:
        if backend != "auto":
            raise
        return f"masked, so no faster than dense: {error}"
    return "optimised: operators skip what tokens skip"


def continue_prompt(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    options: GenerationOptions,
    *,
    streams: bool = False,
    warms_up: bool = False,
) -> Continuation:
    """Return the text that follows a prompt.

    Args:
        model: A causal LM, attached or not, in evaluation mode.
        tokenizer: Of the model.
        prompt: A text to continue, or the messages of a chat to answer.
        options: How.
        streams: Print prompt and text, or the answer alone, while it is generated.
        warms_up: Let an optimised model capture its graphs before it is timed.

    Raises:
        ConfigError: If prompt and text do not fit into the model, or there is no template for a chat.
        DataError: If the tokenizer is not the model's.
    """
    encoded = _encode(tokenizer, prompt).to(model.device)
    prompt_tokens = int(encoded["input_ids"].shape[1])
    _check_length(model, prompt_tokens, options)
    check_vocabulary(int(encoded["input_ids"].max()), model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    settings: dict[str, Any] = {**encoded, "pad_token_id": pad, "max_new_tokens": options.max_new_tokens}
    settings["do_sample"] = options.temperature > 0
    if options.temperature > 0:
        settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    if warms_up and is_attached(model) and attachment(model).fused:
        # Room for the whole text, so that its memory and graphs are found again.
        brief = StoppingCriteriaList([MaxLengthCriteria(prompt_tokens + 2)])
        for _ in range(_WARM_UP_CALLS):
            model.generate(**settings, stopping_criteria=brief)
    streamer = _Timed(tokenizer) if streams else None
    if streams and isinstance(prompt, str):
        # Only now: nothing can be refused any more.
        print(prompt, end="", flush=True)
    torch.manual_seed(options.seed)
    output = model.generate(**settings, streamer=streamer)
    times = [] if streamer is None else streamer.times
    new = output[0, prompt_tokens:]
    return Continuation(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        tokens=len(new),
        skipped=_skipped(model, output[:, :-1]),
        first=times[1] - times[0] if len(times) > 1 else None,
        step=median(after - before for before, after in pairwise(times[1:])) if times[2:] else None,
    )


def _encode(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]]) -> Any:
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise ConfigError("the model's tokenizer has no chat template; leave --chat out, or take a model made for chat")
    return tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _skipped(model: Any, ids: Tensor) -> Sparsity | None:
    """Return what is skipped on tokens [1, T], by one forward beside the generation, which stays undisturbed."""
    if not is_attached(model):
        return None
    counter = SkipCounter(model)
    with judging(model), observe(model) as routing:
        forward_without_head(model, ids)
    counter.add(routing)
    return counter.result()


def _check_length(model: Any, prompt_tokens: int, options: GenerationOptions) -> None:
    longest = longest_input(model)
    if not prompt_tokens:
        raise ConfigError("the prompt has no tokens; give some text")
    if longest and prompt_tokens + options.max_new_tokens > longest:
        raise ConfigError(
            f"{prompt_tokens} tokens of prompt and {options.max_new_tokens} new ones exceed the {longest} positions of "
            "the model; shorten the prompt or lower --max_new_tokens"
        )
