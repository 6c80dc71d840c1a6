"""An OpenAI-compatible server of one model: transformers' handlers of requests, behind checks and bounds."""

import asyncio
import copy
import inspect
import json
import os
import re
import socket
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as AnyResponse
from transformers import ContinuousBatchingConfig, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBWorkerDeadError, GenerationState, Modality
from transformers.utils import logging

from wide.data.tokenizer import check_vocabulary, longest_input
from wide.errors import ConfigError, DataError, is_out_of_memory
from wide.models.observe import own_randomness
from wide.runs.process import stoppable
from wide.runs.requests import (
    CALL,
    SAMPLING,
    Asked,
    Bounded,
    Call,
    Chat,
    Completion,
    EndedError,
    Limits,
    Responses,
    in_words,
    refusal,
)
from wide.runs.settings import ServerOptions
from wide.runs.text import kept_settings, own_settings, stops
from wide.version import __version__

# A token of text takes about four bytes; escapes and the JSON around messages take more.
_BYTES_A_POSITION, _LEAST_BYTES, _BYTES_WITHOUT_POSITIONS = 16, 2**16, 2**20
_CLI = "transformers.cli."
_GRACE_S, _LAST_S, _MOST_CONNECTIONS = 2, 2.0, 512
_ROUTES = "POST /v1/chat/completions, /v1/completions and /v1/responses, GET /v1/models and /health"


class _Model:
    """The model as one request sees it: `generate` does what is asked, and ends with the request."""

    def __init__(self, one: "_OneModel", call: Call) -> None:
        self._one, self._model, self._call = one, one.model, call
        self.generation_config = call.asked.sampled(one.base)

    def init_continuous_batching(self, **given: Any) -> Any:
        self._one.managers.append(self._model.init_continuous_batching(**given))
        return self._one.managers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, generation_config: Any, tokenizer: Any = None, **given: Any) -> Any:
        """Generate in the server's one thread; a tokenizer would be handed on to the model's forward."""
        self._call()
        start, most, eos = given["input_ids"].shape[1], generation_config.max_new_tokens, generation_config.eos_token_id
        stopped = stops(self._one.tokenizer, generation_config.stop_strings, start)
        finals = torch.tensor([] if eos is None else eos, device=self._model.device)

        def last(ids: Any, scores: Any, **_: Any) -> bool:
            # Else a text that ends with the last token that it may have would be told to end at its length.
            if ids.shape[1] == start + most and (stopped(ids, scores) | (finals == ids[0, -1]).any()).any():
                generation_config.max_new_tokens, self._call.has_stopped = None, True
            return False

        ends = StoppingCriteriaList([*stopped, self._call, last])
        generation_config.stop_strings = None
        given |= {"generation_config": generation_config, "stopping_criteria": ends}
        seed = self._call.asked.seed
        try:
            with nullcontext() if seed is None else own_randomness(self._model.device, seed):
                return self._model.generate(**given)
        except Exception as error:
            if "streamer" not in given or isinstance(error, EndedError) or type(error).__module__.startswith(_CLI):
                raise
            # The words of a stream's error are put into JSON as they are.
            raise RuntimeError(json.dumps(_failure(error)[1])[1:-1]) from error


class _Tokenizer:
    """The tokenizer as one request sees it: refuses what the model cannot take, and bounds the number of new tokens."""

    def __init__(self, model: Any, tokenizer: Any, call: Call) -> None:
        self._model, self._own, self._call = model, tokenizer, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._checked(self._own(*args, **given))

    def apply_chat_template(self, messages: Any, /, **given: Any) -> Any:
        template = self._own.chat_template
        if template is None:
            raise HTTPException(400, "the model's tokenizer has no chat template; use /v1/completions")
        calls = any(message.get("tool_calls") for message in messages)
        for name, is_given in (("tools", given.get("tools")), ("tool_calls", calls)):
            if is_given and name not in str(template):
                raise HTTPException(400, f"the model's chat template knows no {name}; leave {name} out")
        try:
            found = self._own.apply_chat_template(messages, **given)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise HTTPException(400, f"the model's chat template refuses these messages: {error}") from error
        return self._checked(found)

    def _checked(self, found: Any) -> Any:
        ids = torch.as_tensor(found["input_ids"])
        count, longest = ids.shape[-1], longest_input(self._model)
        if count == 0:
            raise HTTPException(400, "the prompt has no tokens; give some text")
        if longest is not None:
            if count >= longest:
                words = f"the prompt has {count} tokens, and the model has {longest} positions; shorten it"
                raise HTTPException(400, words)
            body, key = self._call.body, self._call.asked.tokens_key
            body[key] = min(body[key], longest - count)
        check_vocabulary(int(ids.max()), self._model)
        return found


class _OneModel:
    """What transformers' handlers take a model from."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.force_model, self.model, self.tokenizer = name, model, tokenizer
        self.continuing, self.managers = _continuing(tokenizer), list[Any]()
        self.base = kept_settings(model.generation_config, (*SAMPLING, "stop_strings"))
        if self.base.pad_token_id is None:
            self.base.pad_token_id = tokenizer.eos_token_id

    def process_model_name(self, name: str) -> str:
        return name

    def get_model_modality(self, *_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the model and its tokenizer for the request that is running."""
        call = CALL.get()
        tokenizer = self.continuing if isinstance(call.asked, Completion) else self.tokenizer
        return _Model(self, call), _Tokenizer(self.model, tokenizer, call)


def _continuing(tokenizer: Any) -> Any:
    """Return a tokenizer for texts that go on: that of Llama 2, for one, takes the space off the first word."""
    twin = copy.deepcopy(tokenizer)
    if twin.is_fast and (decoder := twin.backend_tokenizer.decoder) is not None:
        state = re.sub(rb'"prepend_scheme":"\w+"', b'"prepend_scheme":"never"', decoder.__getstate__())
        decoder.__setstate__(state.replace(b'"start":1', b'"start":0'))
        twin.backend_tokenizer.decoder = decoder
    return twin


def application(one: _OneModel, options: ServerOptions, limits: Limits) -> FastAPI:
    """Return what answers requests, for any ASGI server; it warns of settings that continuous batching ignores."""
    own = {name: getattr(one.base, name) for name in ("repetition_penalty", "stop_strings")}
    ignored = {name: value for name, value in own.items() if value not in (None, 1.0, "", [])}
    if options.continuous_batching and ignored:
        warnings.warn(
            f"continuous batching ignores {ignored}, which the model's own configuration asks for; leave "
            "--continuous_batching out if that shall count",
            stacklevel=2,
        )
    keys = ("max_batch_tokens", "num_blocks", "block_size", "max_memory_percent", "use_cuda_graph")
    paged = {key: getattr(options, f"cb_{key}") for key in keys if getattr(options, f"cb_{key}") is not None}
    batching = ContinuousBatchingConfig(**paged) if paged else None
    state = GenerationState(continuous_batching=options.continuous_batching, cb_config=batching)
    kinds = CompletionHandler, ChatCompletionHandler, ResponseHandler
    completions, chats, responses = (kind(one, state) for kind in kinds)
    for handler in (chats, responses):
        vars(handler)["get_processor_inputs_from_messages"] = _in_full
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, version=__version__)
    app.add_middleware(Bounded, limits=limits)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=options.hosts(), www_redirect=False)

    async def answer(handler: Any, asked: Asked) -> AnyResponse:
        call = CALL.get()
        _refuse(asked, one, options)
        call.asked, call.body = asked, asked.body(one.force_model)
        request_id = uuid.uuid4().hex
        work = asyncio.ensure_future(handler.handle_request(call.body, request_id))
        limits.work.add(work)
        work.add_done_callback(limits.work.discard)
        # Nobody is to be told of an error after the request has ended.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        if options.continuous_batching:
            call.on_end = lambda: (work.cancel(), *(each.cancel_request(request_id) for each in one.managers))
        # Transformers' thread reports to it, even of what nobody waits for.
        found: AnyResponse = await asyncio.shield(work)
        if isinstance(found, StreamingResponse):
            found.body_iterator = _ended(found.body_iterator, call)
        elif isinstance(asked, Responses) and _is_cut(json.loads(bytes(found.body)), call):
            found = JSONResponse(json.loads(bytes(found.body), object_hook=_as_cut))
        found.headers["x-request-id"] = request_id
        return found

    @app.post("/v1/completions")
    async def _completions(asked: Completion) -> AnyResponse:
        return await answer(completions, asked)

    @app.post("/v1/chat/completions")
    async def _chats(asked: Chat) -> AnyResponse:
        return await answer(chats, asked)

    @app.post("/v1/responses")
    async def _responses(asked: Responses) -> AnyResponse:
        return await answer(responses, asked)

    @app.get("/v1/models")
    async def _models() -> AnyResponse:
        only = {"id": one.force_model, "object": "model", "owned_by": "wide", "created": 0}
        return JSONResponse({"object": "list", "data": [only]})

    @app.get("/health")
    async def _health() -> AnyResponse:
        if state.is_cb_alive():
            return JSONResponse({"status": "ok"})
        return refusal(503, "continuous batching has failed; start the server again")

    for kind in (RequestValidationError, StarletteHTTPException, DataError, EndedError, CBWorkerDeadError, Exception):
        app.add_exception_handler(kind, _in_words)
    return app


async def _ended(parts: Any, call: Call) -> AsyncIterator[str]:
    """Yield a stream with the end that OpenAI's clients expect; transformers' calls a text that was cut completed."""
    held = ""
    async for part in parts:
        held += part
        if '"type":"response.output_item.done"' in part:
            continue  # The next event tells whether it was cut.
        if '"type":"response.completed"' in part and _is_cut(json.loads(part[6:])["response"], call):
            events = [json.loads(event[6:], object_hook=_as_cut) for event in held.split("\n\n") if event]
            held = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        yield held
        held = ""
    if not isinstance(call.asked, Responses):
        yield "data: [DONE]\n\n"


def _is_cut(response: dict[str, Any], call: Call) -> bool:
    return not call.has_stopped and bool(response["usage"]["output_tokens"] >= call.body[Responses.tokens_key])


def _as_cut(part: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a response, or of its events, with what it says of a text that was cut."""
    if part.get("object") == "response":
        part |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    if part.get("type") == "message":
        part["status"] = "incomplete"
    if part.get("type") == "response.completed":
        part["type"] = "response.incomplete"
    return part


def _in_full(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
    """Return messages for a template; transformers' own leaves out what an assistant says beside its tool calls."""
    both = messages, [message | {"tool_calls": None} for message in messages]
    found, said = (ChatCompletionHandler.get_processor_inputs_from_messages(each, modality) for each in both)
    return [message | {"content": words["content"]} for message, words in zip(found, said, strict=True)]


def _refuse(asked: Asked, one: _OneModel, options: ServerOptions) -> None:
    """Refuse what this model, its tokenizer and continuous batching cannot do."""
    if asked.model not in (None, one.force_model):
        raise HTTPException(400, f"this server has only {one.force_model!r}, not {asked.model!r}; leave model out")
    if asked.stream and not one.tokenizer.is_fast:
        raise HTTPException(400, "stream: this model's tokenizer runs in Python and cannot stream; ask without stream")
    own, template = inspect.signature(one.tokenizer.apply_chat_template).parameters, str(one.tokenizer.chat_template)
    values = getattr(asked, "chat_template_kwargs", None) or ()
    if taken := [name for name in values if name in own or name not in template]:
        words = f"chat_template_kwargs: the chat template takes no {', '.join(taken)} from clients; leave it out"
        raise HTTPException(400, words)
    if not options.continuous_batching:
        return
    config = asked.sampled(one.base)
    if config != Asked().sampled(one.base) or (config.do_sample and asked.seed is not None):
        words = "continuous batching samples all requests alike; leave out what is not as the model's own configuration"
        raise HTTPException(400, words)


async def _in_words(request: Request, error: Exception) -> AnyResponse:
    if isinstance(error, RequestValidationError):
        return refusal(400, in_words(error.errors()))
    if isinstance(error, StarletteHTTPException) and error.status_code in (404, 405):
        return refusal(error.status_code, f"there is no {request.method} {request.url.path}; there are {_ROUTES}")
    if isinstance(error, StarletteHTTPException):
        return refusal(error.status_code, str(error.detail))
    if isinstance(error, (DataError, EndedError, CBWorkerDeadError)):
        return refusal(400 if isinstance(error, DataError) else 503, str(error))
    return refusal(*_failure(error))


def _failure(error: Exception) -> tuple[int, str]:
    """Return the status of what nobody foresaw, and what a client is told, in a stream and elsewhere."""
    if is_out_of_memory(error):
        return 503, "the memory is full; send a shorter prompt or ask for fewer tokens"
    return 500, f"the server has failed: {type(error).__name__}: {error}"


class _Server(uvicorn.Server):
    """uvicorn, which ends texts when it is stopped."""

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self._limits = limits

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests go on for seconds, then end them; a second signal ends them at once."""
        asyncio.get_running_loop().call_later(_GRACE_S, self._limits.end_all)
        await super().shutdown(sockets)
        self._limits.end_all()
        unfinished = {*self._limits.work, *self.server_state.tasks}
        if unfinished:
            await asyncio.wait(unfinished, timeout=_LAST_S)
        if self._limits.work:
            # A long forward: Python would abort where it takes the thread away from it.
            print("wide: interrupted; a text was being computed", file=sys.stderr, flush=True)
            os._exit(130)


def listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at an address, so that nobody else takes it; raises ConfigError if it is taken."""
    bound: list[socket.socket] = []
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            # 'localhost' may have an address of IPv6 where there is no IPv6.
            with suppress(OSError) if bound else nullcontext():
                bound.append(socket.create_server(address, family=family))
    except OSError as error:
        raise ConfigError(
            f"{host} cannot be listened at, port {port}: {error}; give another --port or --host"
        ) from error
    return bound


def serve(
    model: Any, tokenizer: Any, name: str, options: ServerOptions, sockets: Sequence[socket.socket] | None = None
) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which ends within ten seconds, at bound sockets or new ones.

    Raises ConfigError if the address cannot be had; KeyboardInterrupt when it was stopped.
    """
    sockets = list(sockets or listening(options.host, options.port))
    longest = longest_input(model)
    body_bytes = _BYTES_WITHOUT_POSITIONS if longest is None else max(_LEAST_BYTES, _BYTES_A_POSITION * longest)
    limits = Limits(seconds=options.request_timeout, body_bytes=body_bytes, api_key=options.api_key)
    logging.get_logger("transformers").setLevel(logging.WARNING)
    one = _OneModel(name, model, tokenizer)
    bounds: Any = {"timeout_graceful_shutdown": _GRACE_S + 1, "limit_concurrency": _MOST_CONNECTIONS}
    config = uvicorn.Config(application(one, options, limits), lifespan="off", **bounds)
    try:
        with stoppable(lambda: f"{name} is no longer served"), own_settings(model):
            _Server(config, limits).run(sockets)
    finally:
        for each in one.managers:
            # Its thread would go on, and Python waits for it.
            each.stop(hard_stop=True, timeout=_LAST_S)
