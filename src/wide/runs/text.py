"""Generate text and measure what is skipped meanwhile."""

from typing import Any

from wide.data.tokenizer import check_vocabulary
from wide.errors import ConfigError
from wide.runs.settings import GenerationOptions


def continue_prompt(
    model: Any, tokenizer: Any, prompt: str, options: GenerationOptions, *, streams: bool = False
) -> tuple[str, Any, int]:
    """Return the generated text, what was skipped on prompt and text (None for a dense model), and the token count.

    Args:
        model: A causal LM, attached or not, in evaluation mode.
        tokenizer: Of the model.
        prompt: What to continue.
        options: How.
        streams: Print prompt and text while it is generated.

    Raises:
        ConfigError: If prompt and text do not fit into the model.
        DataError: If the tokenizer is not the model's.
    """
    import torch
    from transformers import TextStreamer

    encoded = tokenizer(prompt, return_tensors="pt").to(model.device)
    prompt_tokens = int(encoded["input_ids"].shape[1])
    _check_length(model, prompt_tokens, options)
    check_vocabulary(int(encoded["input_ids"].max()), model)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    if streams:
        # Only now: nothing can be refused any more.
        print(prompt, end="", flush=True)
        settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    torch.manual_seed(options.seed)
    with torch.no_grad():
        output, skipped = _generate(model, {**encoded, "pad_token_id": pad, **settings})
    new = output[0, prompt_tokens:]
    return tokenizer.decode(new, skip_special_tokens=True), skipped, len(new)


def _generate(model: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    from wide.models.attach import is_attached
    from wide.models.cost import SkipCounter
    from wide.models.observe import observe

    if not is_attached(model):
        return model.generate(**arguments), None
    counter = SkipCounter(model)
    with observe(model, history=True) as routing:
        output = model.generate(**arguments)
    counter.add(routing)
    return output, counter.result()


def _check_length(model: Any, prompt_tokens: int, options: GenerationOptions) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not prompt_tokens:
        raise ConfigError("the prompt has no tokens; give some text")
    if longest and prompt_tokens + options.max_new_tokens > longest:
        raise ConfigError(
            f"{prompt_tokens} tokens of prompt and {options.max_new_tokens} new ones exceed the {longest} positions of "
            "the model; shorten the prompt or lower --max_new_tokens"
        )
