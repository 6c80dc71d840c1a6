"""Generate text, on wide's operators where they run, and measure how fast it comes and what is skipped."""

import time
from collections.abc import Mapping, Sequence
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
from wide.models.cost import SkipCounter
from wide.models.lora import merge_lora
from wide.models.observe import forward_without_head, judging, observe
from wide.runs.settings import GenerationOptions

# The engine captures a step when it comes first, and a short prompt when its length comes again.
_WARM_UP_CALLS = 2


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
) -> tuple[str, str]:
    """Return the text that follows a prompt, and a line with sizes, tokens per second and what was skipped.

    Of the prompt's tokens per second count the seconds until the first token, of the text's the median step; both need
    a stream.

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
    new = output[0, prompt_tokens:]
    speed = _speed(prompt_tokens, len(new), [] if streamer is None else streamer.times)
    text = tokenizer.decode(new, skip_special_tokens=True)
    return text, f"[{speed}; {_skipped(model, output[:, :-1])}]"


def _encode(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]]) -> Any:
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise ConfigError("the model's tokenizer has no chat template; leave --chat out, or take a model made for chat")
    return tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _speed(prompt_tokens: int, tokens: int, times: Sequence[float]) -> str:
    """Return sizes and tokens per second in words, as far as moments are known: of the prompt, then of each token."""
    prompt, text = f"prompt {prompt_tokens} tokens", f"text {tokens} tokens"
    if len(times) > 1:
        prompt += f", {prompt_tokens / (times[1] - times[0]):.1f}/s"
    if len(times) > 2:
        text += f", {1 / median(after - before for before, after in pairwise(times[1:])):.1f}/s"
    return f"{prompt}; {text}"


def _skipped(model: Any, ids: Tensor) -> str:
    """Return what is skipped on tokens [1, T], by one forward beside the generation, which stays undisturbed."""
    if not is_attached(model):
        return "dense, nothing skipped"
    counter = SkipCounter(model)
    with judging(model), observe(model) as routing:
        forward_without_head(model, ids)
    counter.add(routing)
    found = counter.result()
    return (
        f"skipped groups on prompt and text: attention {found.attention:.1%}, FFN {found.ffn:.1%}, mean "
        f"{found.mean:.1%}; linear FLOPs {found.linear_flops:.1%}"
    )


def _check_length(model: Any, prompt_tokens: int, options: GenerationOptions) -> None:
    longest = longest_input(model)
    if not prompt_tokens:
        raise ConfigError("the prompt has no tokens; give some text")
    if longest and prompt_tokens + options.max_new_tokens > longest:
        raise ConfigError(
            f"{prompt_tokens} tokens of prompt and {options.max_new_tokens} new ones exceed the {longest} positions of "
            "the model; shorten the prompt or lower --max_new_tokens"
        )
