"""`wide generate`: continue a prompt with a model, dense or pruned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wide.cli.arguments import Arguments, build
from wide.runs.settings import AdapterOptions, GenerationOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What is continued.

    Args:
        prompt: The beginning of the text.
    """

    prompt: str


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments("generate", "Continue a prompt; the text is printed while it is generated.")
    flags.add_fields(AdapterOptions)
    flags.add_fields(PromptOptions)
    flags.add_fields(GenerationOptions)
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command."""
    values = arguments().parse(given)
    options, how = build(AdapterOptions, values), build(GenerationOptions, values)
    from wide.data.tokenizer import load_tokenizer
    from wide.runs.sources import load_routed
    from wide.runs.text import continue_prompt

    tokenizer = load_tokenizer(options.model)
    model = load_routed(options)
    prompt = build(PromptOptions, values).prompt
    _, skipped, count = continue_prompt(model, tokenizer, prompt, how, streams=True)
    print(f"[{count} tokens; {_skipped(skipped)}]")


def _skipped(skipped: Any) -> str:
    if skipped is None:
        return "dense, nothing skipped"
    return (
        f"skipped groups on prompt and text: attention {skipped.attention:.1%}, FFN {skipped.ffn:.1%}, mean "
        f"{skipped.mean:.1%}; linear FLOPs {skipped.linear_flops:.1%}"
    )
