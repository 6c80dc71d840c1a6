"""`wide serve`: an OpenAI-compatible server of one model, dense or pruned."""

from collections.abc import Sequence
from importlib.util import find_spec

from wide.cli.arguments import Arguments
from wide.errors import MissingExtraError
from wide.runs.settings import InferenceOptions, ServerOptions, build


def arguments() -> Arguments:
    flags = Arguments(
        "serve",
        "Serve one model by transformers' OpenAI-compatible server: chat completions, completions and responses, "
        "streamed or not. Ctrl-C ends it.",
        usage="--model M --adapter RUN [FLAGS]",
        first=("model", "adapter", "host", "port", "continuous_batching"),
    )
    flags.add_fields(InferenceOptions)
    flags.add_fields(ServerOptions)
    return flags


def run(given: Sequence[str]) -> None:
    values = arguments().parse(given)
    options, how = build(InferenceOptions, values), build(ServerOptions, values)
    missing = [name for name in ("fastapi", "openai", "pydantic", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"wide serve needs {', '.join(missing)}: pip install 'wide[serve]'")
    options.require_found()
    from wide.data.tokenizer import load_tokenizer
    from wide.runs.serving import listening, serve
    from wide.runs.sources import load_routed
    from wide.runs.text import install_operators

    sockets = listening(how.host, how.port)
    tokenizer = load_tokenizer(options.model)
    model = load_routed(options)
    name = how.name or options.model
    print(f"{name} is {install_operators(model, options)}", flush=True)
    serve(model, tokenizer, name, how, sockets)
