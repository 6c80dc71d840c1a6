"""Requests to the server: what they may ask, which is checked before anything is computed, and when they end."""

import asyncio
import copy
import json
import reprlib
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, model_validator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import GenerationConfig

from wide.runs.text import LEAST_TEMPERATURE

SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""What the model's own generation configuration decides where a request says nothing."""
_FOR_SAMPLES = {"temperature", "top_p", "top_k", "min_p", "typical_p"}
_DEFAULT_TOKENS = 1024
_MOST_REQUESTS = 64

_Tokens = Annotated[int, Field(ge=1, lt=2**31)]
_Token = Annotated[int, Field(ge=-1, lt=2**31)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]
_Stop = Annotated[str, Field(min_length=1, max_length=64)]
_Stops = _Stop | Annotated[list[_Stop], Field(max_length=4)]


class Sampling(BaseModel):
    """How to generate, by transformers' names; of what is not done, the values that ask for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: _Share | None = None
    # Far from 1 logits become infinite.
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    eos_token_id: _Token | Annotated[list[_Token], Field(min_length=1, max_length=64)] | None = None
    stop_strings: _Stops | None = None
    max_new_tokens: _Tokens | None = None
    num_beams: Literal[1] | None = None
    num_return_sequences: Literal[1] | None = None
    use_cache: Literal[True] | None = None


class _GenerationConfig(Sampling):
    """What files of Hugging Face say besides."""

    bos_token_id: int | None = None
    pad_token_id: int | None = None
    transformers_version: str | None = None
    is_of_model: bool | None = Field(None, alias="_from_model_config")


class Asked(Sampling):
    """What the three kinds of requests share."""

    tokens_key: ClassVar[str] = "max_tokens"
    # Fields for transformers' server; the others become a generation configuration.
    passed_on: ClassVar[set[str]] = set()

    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    generation_config: Json[_GenerationConfig] | None = None
    n: Literal[1] | None = None
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        """Refuse halves of surrogate pairs, which JSON can hold, but no tokenizer."""
        json.dumps(given, ensure_ascii=False, default=str).encode()
        return given

    def body(self, name: str) -> dict[str, Any]:
        """Return the request for transformers' server, without what `sampled` returns."""
        counts = [getattr(self, key, None) for key in ("max_completion_tokens", self.tokens_key, "max_new_tokens")]
        counts += [self.generation_config and self.generation_config.max_new_tokens, _DEFAULT_TOKENS]
        body = self.model_dump(include=self.passed_on, exclude_none=True)
        body[self.tokens_key] = next(count for count in counts if count is not None)
        return body | {"model": name, "stream": bool(self.stream)}

    def sampled(self, base: GenerationConfig) -> GenerationConfig:
        """Return how to generate: as the model's own configuration says, but for what is asked.

        A rule for samples, such as a temperature, asks for samples, whatever the model's own configuration says.
        """
        config, names = copy.deepcopy(base), {*SAMPLING, "eos_token_id", "stop_strings"}
        given = self.generation_config.model_dump(include=names, exclude_none=True) if self.generation_config else {}
        given |= self.model_dump(include=names, exclude_none=True)
        if (stop := getattr(self, "stop", None)) is not None:
            given["stop_strings"] = stop
        if given.get("temperature", 1.0) < LEAST_TEMPERATURE:
            given["do_sample"] = False
        elif given.keys() & _FOR_SAMPLES:
            given.setdefault("do_sample", True)
        for name, value in given.items():
            setattr(config, name, value)
        config.do_sample = bool(config.do_sample)
        # Left open, the number of likeliest tokens would be 50.
        config.top_k = config.top_k or 0
        for name in () if config.do_sample else _FOR_SAMPLES:
            setattr(config, name, None)
        return config


def _is_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("wanted an object in JSON")
    return text


def _begins_with_message(items: list[Any]) -> list[Any]:
    if not isinstance(items[0], _Message):
        raise ValueError("wanted a message first")
    return items


class _Item(BaseModel):
    """Part of a conversation; what answers hold beyond this, and clients send back, says nothing to a model."""

    model_config = ConfigDict(strict=True)


class _Part(_Item):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(_Item):
    name: str
    arguments: Annotated[str, AfterValidator(_is_object)]


class _ToolCall(_Item):
    id: str | None = None
    function: _Function


class _Message(_Item):
    type: Literal["message"] | None = None
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "_Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("wanted content")
        return self


class _Call(_Function):
    type: Literal["function_call"]
    call_id: str


class _Output(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]


class _Counted(Asked):
    max_tokens: _Tokens | None = None
    stop: _Stops | None = None
    # Usage comes with the last chunk anyway.
    stream_options: dict[Literal["include_usage"], bool] | None = None


class Completion(_Counted):
    """A request to `/v1/completions`."""

    passed_on: ClassVar[set[str]] = {"prompt"}

    prompt: str
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None


class Chat(_Counted):
    """A request to `/v1/chat/completions`."""

    passed_on: ClassVar[set[str]] = {"messages", "tools", "chat_template_kwargs"}

    messages: Annotated[list[_Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto"] | None = None


class Responses(Asked):
    """A request to `/v1/responses`."""

    tokens_key: ClassVar[str] = "max_output_tokens"
    passed_on: ClassVar[set[str]] = {"input", "instructions", "tools"}

    input: (
        str
        | Annotated[list[_Part], Field(min_length=1)]
        | Annotated[list[_Message | _Call | _Output], Field(min_length=1), AfterValidator(_begins_with_message)]
    )
    instructions: str | None = None
    max_output_tokens: _Tokens | None = None
    truncation: Literal["disabled"] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto"] | None = None

    @model_validator(mode="after")
    def _is_instructed_once(self) -> "Responses":
        if self.instructions and any(getattr(item, "role", "") == "system" for item in self.input):
            raise ValueError("wanted instructions or a system message, not both")
        return self


def in_words(errors: Any) -> str:
    """Return what is wrong with a request, by pydantic's errors: the first three."""
    said = []
    for error in errors[:3]:
        place = error["loc"][1:]
        if place and isinstance(place[0], int):
            return f"the body is not JSON: {error['ctx']['error']} at character {place[0]}; mend it"
        what = f"{error['msg']}, got {reprlib.repr(error['input'])}"
        if error["type"] == "extra_forbidden":
            what = "is not known here; leave it out"
        said.append(f"{'.'.join(map(str, place)) or 'the body'}: {what}")
    return "; ".join(said)


def refusal(status: int, words: str) -> JSONResponse:
    """Return an answer in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": {"message": words, "type": kind, "param": None, "code": status}}, status, headers)


class EndedError(RuntimeError):
    """A request has ended before its text has."""


class Call:
    """One running request, as a stopping criterion the end of its text; `has_stopped`: of full length, but not cut."""

    def __init__(self) -> None:
        self.asked: Any = None
        self.body: dict[str, Any] = {}
        self.on_end: Callable[[], object] = lambda: None
        self.has_stopped = False
        self._why = ""

    def end(self, why: str) -> None:
        """Have the text end with its next token."""
        self._why = self._why or why
        self.on_end()

    def __call__(self, *_: Any, **__: Any) -> bool:
        """Return that the text goes on, or raise EndedError."""
        if self._why:
            raise EndedError(self._why)
        return False


CALL: ContextVar[Call] = ContextVar("call")
"""The request that a task is of."""


@dataclass(kw_only=True, slots=True)
class Limits:
    """What one server takes on, and what it is at.

    Args:
        seconds: That a request may take, waiting included.
        body_bytes: Of a request's body at most.
        api_key: What clients must know; None lets everybody in.
        calls: Requests that are running or waiting.
        work: What computes answers; it may outlast its request by a token.
    """

    seconds: float
    body_bytes: int
    api_key: str | None = None
    calls: set[Call] = field(default_factory=set)
    work: set[asyncio.Task[Any]] = field(default_factory=set)

    def end_all(self) -> None:
        """Have all texts end."""
        for call in self.calls:
            call.end("the server is being stopped")


class Bounded:
    """ASGI middleware: reads a request whole, and ends it with its client, at its deadline and with the server."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, has_begun = Call(), False
        CALL.set(call)

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await self._admitted(scope, receive)
                self._limits.calls.add(call)
                await self._run(scope, body, receive, answer)
        except HTTPException as error:
            await refusal(error.status_code, error.detail)(scope, receive, send)
        except TimeoutError:
            words = f"the request took more than {self._limits.seconds:g} seconds; ask for fewer tokens, or later"
            refused = refusal(504, words)
            if has_begun:
                await send({"type": "http.response.body", "body": b"data: " + bytes(refused.body) + b"\n\n"})
            else:
                await refused(scope, receive, send)
        finally:
            self._limits.calls.discard(call)
            call.end("the request has ended")

    async def _admitted(self, scope: Scope, receive: Receive) -> bytes:
        limits, headers, body, more = self._limits, Headers(scope=scope), bytearray(), True
        key = f"Bearer {limits.api_key}" if limits.api_key is not None and scope["path"] != "/health" else ""
        if key and not secrets.compare_digest(headers.get("authorization", "").encode(), key.encode()):
            raise HTTPException(401, "wanted the header 'Authorization: Bearer KEY' with this server's key")
        said = headers.get("content-length", "")
        size = int(said) if said.isdigit() else 0
        while more and size <= limits.body_bytes:
            message = await receive()
            body += message.get("body", b"")
            size, more = max(size, len(body)), message.get("more_body", False)
        if size > limits.body_bytes:
            raise HTTPException(413, f"wanted at most {limits.body_bytes} bytes, got {size}; shorten the prompt")
        if len(limits.calls) >= _MOST_REQUESTS and scope["method"] == "POST":
            raise HTTPException(503, f"{_MOST_REQUESTS} requests are waiting; ask again later")
        return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, answer: Send) -> None:
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await left

        async def leaves() -> Message:
            while (message := await receive())["type"] != "http.disconnect":
                pass
            return message

        left = asyncio.ensure_future(leaves())
        answered = asyncio.ensure_future(self._app(scope, again, answer))
        try:
            await asyncio.wait((left, answered), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered.cancel()
            await asyncio.wait((answered,))
            left.cancel()
        if not answered.cancelled():
            answered.result()
