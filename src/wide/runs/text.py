"""Generate text, on wide's operators where they run, and measure how fast it comes and what is skipped."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria, TextStreamer

from wide.data.tokenizer import chat_text, check_vocabulary, load_tokenizer, longest_input, require_characters
from wide.errors import ConfigError, WideError
from wide.inference.optimize import optimize
from wide.models.attach import attachment, is_attached
from wide.models.cost import SkipCounter
from wide.models.having import having
from wide.models.lora import merge_lora
from wide.models.observe import forward_without_head, judging, observe, own_randomness
from wide.runs.settings import GenerationOptions, InferenceOptions
from wide.schema import require

# The engine captures a step when it comes first, and a short prompt when its length comes again.
_WARM_UP_CALLS = 2
LEAST_TEMPERATURE = 1e-3
"""Below it the likeliest token is as good as certain, and logits divided by it overflow."""
# Random states and the generation configuration are shared by all threads.
_ONE_CALL = threading.Lock()


class _Timed(TextStreamer):
    """Prints text while it comes behind tokens, and notes when: `times` begins with the prompt, in seconds."""

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.token_cache, self.print_len = before, len(tokenizer.decode(before, skip_special_tokens=True))
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


def kept_settings(config: GenerationConfig, names: Sequence[str] = ()) -> GenerationConfig:
    """Return a generation configuration that holds the special tokens of another, and what is named, alone."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", *names)
    return GenerationConfig(**{name: getattr(config, name, None) for name in names})


def own_settings(model: Any) -> AbstractContextManager[None]:
    """Leave of a model's generation configuration its special tokens alone, for a while.

    Whatever a call leaves open `generate` takes from there: beams, penalties, kinds of output.
    """
    return having(model, generation_config=kept_settings(model.generation_config))


def stops(tokenizer: Any, strings: str | Sequence[str] | None, start: int) -> StoppingCriteriaList:
    """Return what ends a text at strings behind `start` tokens; `generate(tokenizer=)` hands it on to the forward."""
    if not strings:
        return StoppingCriteriaList()
    ends = StopStringCriteria(tokenizer, strings)
    return StoppingCriteriaList([lambda ids, scores, **given: ends(ids[:, start:], scores, **given)])


def install_operators(model: Any, options: InferenceOptions) -> str:
    """Merge LoRA and let an attached model run operators that skip, where it can; return in words how it runs.

    Raises WideError if a backend or a format of weights is insisted on and the model cannot run it.
    """
    backend, weights = options.backend, options.weights
    masked = ""
    if not is_attached(model):
        masked = "without routers, so nothing is skipped"
    elif backend == "none" or (backend == "auto" and model.device.type != "cuda"):
        why = "--backend none" if backend == "none" else f"the kernels need a GPU, not {model.device}"
        masked = f"masked, so no faster than dense: {why}"
    if masked and weights != "model":
        raise ConfigError(f"--weights {weights} is for models that run optimised, and this one is {masked}")
    if masked:
        return masked
    try:
        optimize(merge_lora(model), backend=backend, weights=weights)
    except WideError as error:
        if backend != "auto" or weights != "model":
            raise
        return f"masked, so no faster than dense: {error}"
    spared = attachment(model).engine.decoder.saved_bytes / 2**30
    words = f"; weights in {weights} take {spared:.2f} GiB less" if spared else ""
    return f"optimised: kernels avoid the skipped computation{words}"


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
    a stream. Raises what `encode` does.

    Args:
        model: A causal LM, attached or not, in evaluation mode.
        prompt: A text to continue, or the messages of a chat to answer.
        streams: Print prompt and text, or the answer alone, while it is generated.
        warms_up: Let an optimised model capture its graphs before it is timed.
    """
    output, prompt_tokens, times = _generated(model, tokenizer, prompt, options, streams, warms_up)
    new = output[0, prompt_tokens:]
    read, made = f"prompt {prompt_tokens} tokens", f"text {len(new)} tokens"
    if len(times) > 1:
        read += f", {prompt_tokens / (times[1] - times[0]):.1f}/s"
    if len(times) > 2:
        made += f", {1 / median(after - before for before, after in pairwise(times[1:])):.1f}/s"
    text = _following(tokenizer, prompt, output[0], prompt_tokens)
    return text, f"[{read}; {made}; {_skipped(model, output[:, :-1])}]"


def generate(
    model: Any,
    prompt: str | Sequence[Mapping[str, str]],
    *,
    tokenizer: Any = None,
    system: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 17,
) -> str:
    """Return the text that follows a prompt, or the answer to a chat; calls from several threads run one by one.

    Of the model's own generation configuration only special tokens and stop strings count.

    Args:
        model: A causal LM, attached, optimised or neither.
        prompt: A text to continue; or the messages of a chat so far, each with `role` and `content`, which the
            tokenizer's template turns into tokens. For the next turn, append the answer and the next message.
        tokenizer: None loads the model's own.
        system: The system message of a chat; with it a text becomes the first message.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: Sample from the smallest set of tokens with this probability, in (0, 1].
        seed: Of sampling; the caller's random state is left alone.

    Raises:
        ConfigError: If an option is out of range, prompt and text do not fit into the model, or there is no template
            for a chat.
        DataError: If there is no tokenizer, it is not the model's, or its template refuses the chat.
    """
    require(nn.Module, model, "model", "a model that is loaded (wide.load takes names)")
    require(str | Sequence, prompt, "prompt", "a text or a list of messages")
    for message in () if isinstance(prompt, str) else prompt:
        require(Mapping, message, "prompt", "a text, or messages with role and content")
    options = GenerationOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    tokenizer = load_tokenizer(model, tokenizer)
    if system is not None:
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [{"role": "system", "content": system}, *said]
    with _ONE_CALL, judging(model), own_randomness(model.device):
        output, prompt_tokens, _ = _generated(model, tokenizer, prompt, options, streams=False, warms_up=False)
    return _following(tokenizer, prompt, output[0], prompt_tokens)


def _following(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], tokens: Tensor, start: int) -> str:
    """Return the text of tokens [T] from `start` on.

    Llama 2's decoder, for one, takes the space off the first word, so behind a text it is shown the token before.
    """
    first = start - 1 if isinstance(prompt, str) else start
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[first:start], tokens[first:]))
    return str(whole[len(before) :])


def _generated(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    options: GenerationOptions,
    streams: bool,
    warms_up: bool,
) -> tuple[Tensor, int, list[float]]:
    """Return the tokens [1, T] of prompt and text, how many are the prompt's, and when each came, if streamed."""
    encoded = encode(model, tokenizer, prompt, options).to(model.device)
    prompt_tokens = int(encoded["input_ids"].shape[1])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    settings: dict[str, Any] = {**encoded, "pad_token_id": pad, "max_new_tokens": options.max_new_tokens}
    settings["do_sample"] = options.temperature >= LEAST_TEMPERATURE
    if settings["do_sample"]:
        settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    before = encoded["input_ids"][0, -1:].tolist() if isinstance(prompt, str) else []
    streamer = _Timed(tokenizer, before) if streams else None
    ends = stops(tokenizer, model.generation_config.stop_strings, prompt_tokens)
    with own_settings(model):
        if warms_up and is_attached(model) and attachment(model).engine is not None:
            # Room for the whole text, so that its memory and graphs are found again.
            brief = StoppingCriteriaList([MaxLengthCriteria(prompt_tokens + 2)])
            for _ in range(_WARM_UP_CALLS):
                model.generate(**settings, stopping_criteria=brief)
        if streams and isinstance(prompt, str):
            # Only now: nothing can be refused any more.
            print(prompt, end="", flush=True)
        torch.manual_seed(options.seed)
        output = model.generate(**settings, streamer=streamer, stopping_criteria=ends)
    return output, prompt_tokens, [] if streamer is None else streamer.times


def require_template(tokenizer: Any) -> None:
    """Raise ConfigError if a tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the model's tokenizer has no chat template; give text instead of messages (without --chat), or take a "
            "model made for chat"
        )


def encode(model: Any, tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], options: GenerationOptions) -> Any:
    """Return the tokens of a prompt, or of the messages of a chat, as the tokenizer gives them.

    Raises ConfigError if there are none, they and the new ones do not fit into the model, or there is no template for a
    chat; DataError if the tokenizer is not the model's, or its template refuses the chat.
    """
    how: dict[str, Any] = {"return_tensors": "pt"}
    if isinstance(prompt, str):
        require_characters(prompt, "the prompt")
        encoded = tokenizer(prompt, **how)
    else:
        require_template(tokenizer)
        require_characters(chat_text(prompt, tokenizer, "the prompt"), "the prompt")
        encoded = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True, **how)
    longest, count = longest_input(model), int(encoded["input_ids"].shape[1])
    if not count:
        raise ConfigError("the prompt has no tokens; give some text")
    if longest and count + options.max_new_tokens > longest:
        raise ConfigError(
            f"{count} tokens of prompt and {options.max_new_tokens} new ones exceed the {longest} positions of the "
            "model; shorten the prompt, or ask for fewer new ones"
        )
    check_vocabulary(int(encoded["input_ids"].max()), model)
    return encoded


def _skipped(model: Any, ids: Tensor) -> str:
    """Return what is skipped on tokens [1, T], by one forward beside the generation, which stays undisturbed."""
    if not is_attached(model):
        return "no routers, nothing skipped"
    counter = SkipCounter(model)
    with judging(model), observe(model) as routing:
        forward_without_head(model, ids)
    counter.add(routing)
    found = counter.result()
    return (
        f"skipped groups on prompt and text: attention {found.attention:.1%}, FFN {found.ffn:.1%}, mean "
        f"{found.mean:.1%}; {found.linear_flops:.1%} of the prunable work"
    )
