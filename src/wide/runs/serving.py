"""transformers' OpenAI-compatible server, with one model that is loaded already."""

import functools
import time
from dataclasses import asdict
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from wide.data.tokenizer import longest_input
from wide.runs.process import stoppable
from wide.runs.settings import ServerOptions


class _OneModel(model_manager.ModelManager):
    """Gives the server its one model, and nothing else.

    Nothing is registered with the base class, so neither idleness nor a client's reset takes the model away.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self._served = model, tokenizer
        super().__init__(**options)

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **given: Any) -> tuple[Any, Any]:
        if model_id_and_revision != self.process_model_name(self.force_model):
            raise ValueError(f"this server has {self.force_model} alone, not {model_id_and_revision}")
        if given.get("progress_callback") is not None:
            given["progress_callback"]({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self._served

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "wide", "created": int(time.time())}]

    # Its name since transformers 5.24.
    list_models = get_gen_models


def serve(model: Any, tokenizer: Any, name: str, options: ServerOptions) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    A prompt that the model has no positions for is refused (400), and no text of `generate` grows beyond them.

    Args:
        model: A causal LM in evaluation mode, attached, optimised or neither.
        tokenizer: Of the model.
        name: What clients call it; they may leave it out.
        options: Of the server.

    Raises:
        KeyboardInterrupt: When it was stopped.
    """
    longest = longest_input(model)
    tokenizer = _refusing(tokenizer, longest)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.eos_token_id
    batching: list[Any] = []
    begin = model.init_continuous_batching

    def begin_batching(**given: Any) -> Any:
        batching.append(begin(**given))
        return batching[-1]

    # The optimised model's own stand there already, and come back.
    before = {name: vars(model).get(name) for name in ("init_continuous_batching", "generate")}
    model.init_continuous_batching = begin_batching
    if longest is not None:
        model.generate = functools.partial(_generate, model.generate, longest)
    values = asdict(options)
    del values["name"]
    theirs = model_manager.ModelManager
    # The server makes its manager itself, in the constructor, which ends with the server.
    model_manager.ModelManager = functools.partial(_OneModel, model, tokenizer)
    try:
        with stoppable(lambda: f"{name} is no longer served"):
            Serve(name, **values)
    finally:
        model_manager.ModelManager = theirs
        for each in batching:
            # The server leaves its thread running, and Python waits for it.
            each.stop(hard_stop=True)
        for attribute, found in before.items():
            vars(model).pop(attribute, None)
            if found is not None:
                vars(model)[attribute] = found


def _generate(generate: Any, longest: int, **given: Any) -> Any:
    """Generate no more tokens than the model has positions for; the server tells from `max_new_tokens` why it ended."""
    config, room = given["generation_config"], longest - given["input_ids"].shape[1]
    if config.max_new_tokens is not None:
        if config.max_new_tokens < 1:
            from fastapi import HTTPException

            detail = f"wanted at least 1 new token, got {config.max_new_tokens}; ask for more"
            raise HTTPException(status_code=400, detail=detail)
        config.max_new_tokens = min(config.max_new_tokens, room)
    return generate(**given)


def _refusing(tokenizer: Any, longest: int | None) -> Any:
    """Return the tokenizer with an answer for clients whose prompt the model cannot take."""
    from fastapi import HTTPException

    class Refusing(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = super().__call__(*args, **kwargs)
            count = max(len(each) for each in found.encodings)
            if longest is not None and count >= longest:
                detail = f"the prompt has {count} tokens, and the model has {longest} positions; shorten it"
                raise HTTPException(status_code=400, detail=detail)
            if count == 0:
                raise HTTPException(status_code=400, detail="the prompt has no tokens; give some text")
            return found

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            if self.chat_template is None:
                detail = "the model's tokenizer has no chat template; ask /v1/completions"
                raise HTTPException(status_code=400, detail=detail)
            return super().apply_chat_template(*args, **kwargs)

    tokenizer.__class__ = Refusing
    return tokenizer
