"""`wide generate`: continue a prompt or chat with a model, dense or pruned."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wide.cli.arguments import Arguments
from wide.errors import ConfigError, UsageError
from wide.runs.settings import GenerationOptions, InferenceOptions, build


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What is continued.

    Args:
        prompt: The beginning of the text, or with --chat a message; null with --chat reads messages until input ends.
        system: With --chat, what the model is told before the first message.
    """

    prompt: str | None = None
    system: str | None = None


def arguments() -> Arguments:
    flags = Arguments(
        "generate",
        "Continue a prompt, or chat; the text is printed while it is generated, then tokens per second (of prompt and "
        "text) and what was skipped.",
        usage="--model M --adapter RUN --prompt TEXT [FLAGS]",
        first=("model", "adapter", "prompt", "chat", "max_new_tokens", "dtype"),
    )
    flags.add_fields(InferenceOptions)
    flags.add_fields(PromptOptions)
    flags.add_switch("chat", "Treat the prompt as a chat message, by the tokenizer's template, and answer it.")
    flags.add_fields(GenerationOptions)
    return flags


def run(given: Sequence[str]) -> None:
    values = arguments().parse(given)
    options, how = build(InferenceOptions, values), build(GenerationOptions, values)
    asked, chats = build(PromptOptions, values), bool(values["chat"])
    if asked.prompt == "" or (not chats and asked.prompt is None):
        raise UsageError("give --prompt with the beginning of the text, or --chat for a conversation")
    if not chats and asked.system is not None:
        raise UsageError("--system is for a conversation: give --chat, too")
    options.require_found()
    from wide.data.tokenizer import load_tokenizer
    from wide.runs.sources import load_routed
    from wide.runs.text import continue_prompt, install_operators, require_template

    tokenizer = load_tokenizer(options.model)
    if chats:
        require_template(tokenizer)
    model = load_routed(options)
    print(f"[{install_operators(model, options)}]", file=sys.stderr)
    if not chats:
        _, summary = continue_prompt(model, tokenizer, str(asked.prompt), how, streams=True, warms_up=True)
        print(summary, file=sys.stderr)
        return
    messages = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    for index, said in enumerate(_turns(asked.prompt)):
        messages.append({"role": "user", "content": said})
        try:
            answer, summary = continue_prompt(model, tokenizer, messages, how, streams=True, warms_up=index == 0)
        except ConfigError as error:
            if index == 0:
                raise
            # Too long, for example; what was said before stands.
            print(error, file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        print(summary, file=sys.stderr)


def _turns(prompt: str | None) -> Iterator[str]:
    """Yield the one message that was given, or what is typed, line by line, until the input ends."""
    if prompt is not None:
        yield prompt
        return
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if said.strip():
            yield said
