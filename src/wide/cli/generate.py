"""`wide generate`: continue a prompt with a model, dense or pruned."""

from collections.abc import Sequence
from typing import Any

from wide.cli.arguments import Arguments, build
from wide.cli.options import AdapterOptions
from wide.cli.text_options import GenerationOptions, PromptOptions


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
    from wide.cli.loading import load_routed
    from wide.cli.text import continue_prompt
    from wide.data.tokenizer import load_tokenizer

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
