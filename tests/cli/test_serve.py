"""The server: what an OpenAI client gets from it, and that no client stops it; `-rP` shows what hostile ones get."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import wide
from wide.cli.main import main
from wide.data.batches import TokenBatch
from wide.data.tokenizer import load_tokenizer
from wide.models.attach import attachment
from wide.models.thresholds import calibrate_thresholds
from wide.runs.text import own_settings

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
HELLO = [{"role": "user", "content": "Hello"}]
SECONDS = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model_folder):
    """Return a model's folder whose tokenizer has a chat template, and that of a calibrated adapter."""
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = load_tokenizer(tiny_model_folder)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    wide.attach(model, wide.WideConfig(ffn_group_size=16, router_rank=4))
    ids = torch.randint(2, 258, (4, 64))
    calibrate_thresholds(model, [TokenBatch(input_ids=ids, labels=ids, valid=torch.ones_like(ids, dtype=torch.bool))])
    wide.save(model, adapter)
    return base, adapter


def start(folders, *flags, device="cpu"):
    """Return a server's process, once it answers, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base, adapter = folders
    named = ["--model", str(base), "--adapter", str(adapter), f"--device={device}", "--name=tiny", f"--port={port}"]
    # A shell that runs the tests behind it has them, and what they start, ignore Ctrl-C.
    code = (
        "import signal, sys, torch; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "torch.set_num_threads(1); from wide.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "serve", *named, "--host=127.0.0.1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return process, f"http://127.0.0.1:{port}/v1"
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise AssertionError(process.communicate()[0])


def stop(process):
    """Interrupt a server, and return its exit code and all that it said."""
    process.send_signal(signal.SIGINT)
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, said


def client_of(address):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=address, api_key="none", timeout=SECONDS, max_retries=0)


@pytest.fixture(scope="module")
def running(folders):
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    process, address = start(folders, "--backend=torch")
    yield process, address
    code, said = stop(process)
    assert code == 130
    assert "tiny is optimised" in said
    assert "skips nothing" not in said
    assert "Traceback" not in said
    assert "interrupted" in said.splitlines()[-1]


@pytest.fixture
def server(running):
    return running[1]


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client
        # Whatever a test did, the server goes on.
        after = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, temperature=0)
        assert after.usage.completion_tokens in (1, 2)


def wanted(folders, text, count):
    """Return what `generate` of the masked model says."""
    base, adapter = folders
    model = wide.load(str(base), adapter)
    tokenizer = load_tokenizer(base)
    encoded = tokenizer(text, return_tensors="pt")
    found = model.generate(**encoded, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(found[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def test_chat_says_what_generate_says_streamed_or_not(client, folders):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted(folders, "<user>Hello<assistant>", 8)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 3


def test_responses_and_older_turns_say_what_generate_says(client, folders):
    asked = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
    expected = wanted(folders, "<user>Hello<assistant>", 8)
    assert client.responses.create(input="Hello", **asked).output_text == expected
    parts = client.responses.create(input=[{"type": "input_text", "text": "Hello"}], stream=True, **asked)
    assert "".join(part.delta for part in parts if part.type == "response.output_text.delta") == expected
    turns = [{"role": "system", "content": "Be kind"}, *HELLO, {"role": "assistant", "content": "Hi", "refusal": None}]
    turns[0]["content"] = [{"type": "text", "text": "Be kind"}]
    # As `transformers chat` asks.
    how = {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=8).to_json_string()}
    found = client.chat.completions.create(model="tiny", messages=turns + HELLO, extra_body=how)
    text = "<system>Be kind<user>Hello<assistant>Hi<user>Hello<assistant>"
    assert found.choices[0].message.content == wanted(folders, text, 8)


def test_completions_continue_a_text(client, folders):
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == wanted(folders, "The quick", 6)
    assert "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True)) == (
        whole.choices[0].text
    )


def refusal(call, **asked):
    """Return what a client is told of a request that is refused."""
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        call(**asked)
    return refused.value.response.json()["error"]["message"]


def test_one_model_is_listed_and_no_other_is_known(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    said = refusal(client.chat.completions.create, model="other", messages=HELLO)
    assert said == "this server has only 'tiny', not 'other'; leave model out"


@pytest.mark.parametrize("streams", [False, True])
def test_prompts_without_room_are_refused(client, streams):
    long = [{"role": "user", "content": "a" * 128}]
    said = refusal(client.chat.completions.create, model="tiny", messages=long, stream=streams)
    assert "128 positions" in said
    said = refusal(client.completions.create, model="tiny", prompt="a" * 128, stream=streams)
    assert said == "the prompt has 129 tokens, and the model has 128 positions; shorten it"


def test_text_ends_where_the_positions_end(client):
    found = client.completions.create(model="tiny", prompt="a" * 99, temperature=0)
    assert found.usage.total_tokens <= 128
    assert found.choices[0].finish_reason == ("length" if found.usage.total_tokens == 128 else "stop")


def kill_a_client(address, body=b'{"model": "tiny", "prompt": "The quick", "max_tokens": 100, "stream": true}'):
    """Ask for a text, and cut the connection after the first bytes of a stream, or half a second."""
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as rude:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        rude.sendall(f"{head}Content-Length: {len(body)}".encode() + b"\r\n\r\n" + body)
        assert rude.recv(64) if b"true" in body else time.sleep(0.5) is None
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def test_a_client_that_goes_away_stops_nothing(client, server):
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100, stream=True)
    next(iter(stream))
    stream.close()
    kill_a_client(server)


def test_requests_at_once_are_all_answered(client):
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.completions.create(**asked).choices[0].text, range(8)))
    assert set(answers) == {client.completions.create(**asked).choices[0].text}


NAN, INF = float("nan"), float("inf")
# Field -> values that no request may have; of chats and responses those alone that they read otherwise.
BAD = {
    "prompt": [None, 3, True, ["a"], [1, 2], {"a": 1}, "a" * 128, "a" * 60_000],
    "max_tokens": [0, -1, -(10**30), 1.5, "8", True, NAN, [], 10**30],
    "temperature": [-1, 2.1, NAN, INF, -INF, "1", True, []],
    "top_p": [0, 1.1, -0.5, NAN, "x", {}],
    "top_k": [-1, 1.5, 2**40],
    "min_p": [-1, 2, NAN],
    "repetition_penalty": [0, -1, 1e-30, 1e30, NAN],
    "seed": [1.5, "a", 2**70, NAN, True],
    "stop": ["", 3, [""], ["a"] * 5, "a" * 65, {}, [3]],
    "n": [2, 0, -1, "1", 10**9],
    "best_of": [2, 10**6],
    "num_beams": [2, 100_000],
    "num_return_sequences": [100_000],
    "logprobs": [5, True],
    "echo": [True],
    "suffix": ["b"],
    "presence_penalty": [0.5, NAN],
    "frequency_penalty": [1],
    "logit_bias": [{"1": 5}],
    "tools": [[]],
    "model": ["other", "../../etc/passwd", 3],
    "stream": ["yes", 1],
    "max_new_token": [5],
    "generation_config": [
        *("{", "[]", "3", 3, {"max_new_tokens": 3}, "{" * 50_000, '{"eos_token_id": "x"}', '{"typical_p": 0}'),
        *('{"max_length": 100000}', '{"num_beams": 100000}', '{"num_return_sequences": 9}', '{"max_new_tokens": 0}'),
        *('{"temperature": NaN}', '{"stop_strings": [""]}', '{"return_dict_in_generate": true}', '{"max_time": 0}'),
        *('{"cache_implementation": "static"}', '{"guidance_scale": 2}', '{"penalty_alpha": 0.6}'),
        *('{"prompt_lookup_num_tokens": 3}', '{"watermarking_config": {}}', '{"use_cache": false}'),
    ],
}
BAD_CHATS = {
    "messages": [
        *(None, "hi", [], {}, [3], [{}], [{"role": 3, "content": "a"}], [{"role": "user", "content": 3}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
        [{"role": "user", "content": "a" * 128}],
    ],
    "tools": ["x", [3], [{}], [{"type": "function", "function": {"name": "f"}}]],
    "chat_template_kwargs": [
        *("x", {"chat_template": "a"}, {"tokenize": False}, {"return_tensors": "np"}, {"a": {}}, {"messages": 3}),
        *({"load_audio_from_video": True}, {"self": 1}, {"role": "x", "unknown": 1}),
    ],
    "logit_bias": [{"5": 1}],
    "response_format": [{"type": "json_object"}],
    "max_completion_tokens": [0],
    "tool_choice": ["required"],
    "modalities": [["audio"]],
}
BAD_RESPONSES = {
    "input": [
        *(None, 3, [], [3], [{"type": "x"}], [{"type": "function_call_output", "call_id": "a", "output": "b"}]),
        [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
    ],
    "instructions": [3, {"a": 1}],
    "previous_response_id": ["a"],
    "background": [True],
    "max_output_tokens": [0, -1],
    "max_tokens": [5],
    "truncation": ["auto"],
    "store": [True],
}
BODIES = [
    *(b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "a"', b"[" * 60_000, b'{"a":' * 9_000),
    *(
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "n": [[[[]]]]}',
    ),
    *(
        b'{"prompt": ' + b"9" * 5_000 + b"}",
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b"prompt=a",
        b" " * 200_000,
        b"a" * 20_000_000,
    ),
]
PATHS = ["/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/v1/embeddings", "/docs", "/redoc"]
PATHS += ["/openapi.json", "/", "//v1/models", "/v1/completions/", "/v1/models/../reset", "/%00", "/" + "a" * 5_000]
# What looks hostile and can be done; the first one to the last position, the others for a few tokens.
DONE = [{"prompt": "a" * 100, "max_tokens": 2**31 - 1}, {"prompt": ""}, {"prompt": "\0\n\u202e", "temperature": 1e-40}]
DONE += [{"temperature": 2, "top_k": 2**31 - 1, "top_p": 1e-40, "repetition_penalty": 10.0}]
DONE += [{"n": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0, "user": "x"}]
DONE += [{"stop": ["b"] * 4, "seed": -(2**63), "generation_config": '{"min_p": 1, "eos_token_id": 10}'}]
DONE = [{"prompt": "a", "max_tokens": 4} | asked for asked in DONE]


def hostile():
    """Yield area, method, path, headers and body of requests that nobody should send."""
    json_ = {"Content-Type": "application/json"}
    kinds = ("completions", {"prompt": "a"}, BAD), ("chat/completions", {"messages": HELLO}, BAD_CHATS)
    for path, good, bad in (*kinds, ("responses", {"input": "a"}, BAD_RESPONSES)):
        for field, values in bad.items():
            for number, value in enumerate(values):
                asked = {"stream": number % 2 == 1} | good | {field: value}
                yield "values", "POST", f"/v1/{path}", json_, json.dumps(asked).encode()
    twice = {"input": [{"role": "system", "content": "a"}], "instructions": "b"}
    yield "values", "POST", "/v1/responses", json_, json.dumps(twice).encode()
    for body in BODIES:
        yield "bodies", "POST", "/v1/completions", json_, body
    for path in PATHS:
        yield "routes", "POST", path, json_, b"{}"
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "NONE"):
        yield "routes", method, "/v1/completions", json_, b"{}"
    odd = {"Host": "evil.example"}, {"Content-Type": "text/plain"}, {"X": "a" * 100_000}, {"Host": ""}
    for headers in (*odd, {"Content-Length": "-1"}, {"Content-Length": "x"}, {"Transfer-Encoding": "gzip"}):
        yield "headers", "POST", "/v1/completions", json_ | headers, b"{}"
    for number, asked in enumerate(2 * DONE):
        body = json.dumps({"stream": number < len(DONE)} | asked).encode()
        yield "done", "POST", "/v1/completions", json_, body


def ask(address, method, path, headers, body):
    """Return status and text of an answer."""
    connection = http.client.HTTPConnection(address.removeprefix("http://").removesuffix("/v1"), timeout=SECONDS)
    with contextlib.closing(connection):
        # What is too long is refused before all of it was sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, headers)
        answer, text = connection.getresponse(), b""
        # What was not read of the request may reset the connection behind the answer.
        with contextlib.suppress(ConnectionResetError):
            while part := answer.read1():
                text += part
        return answer.status, text.decode()


def is_in_words(area, status, text):
    """Return whether an answer says what is wrong or, of what can be done, has it done."""
    if area == "done":
        return status == 200 and '"error"' not in text and '"choices"' in text
    if area == "headers" and text.startswith("Invalid"):
        # uvicorn's and Starlette's own, of what is not HTTP and of hosts.
        return status == 400
    return 400 <= status < 500 and len(json.loads(text)["error"]["message"].split()) > 3


def resident(process):
    """Return the bytes of memory that a process holds."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_hostile_requests_are_answered_in_words_and_leave_no_memory(running):
    process, address = running
    requests, tried, found = list(hostile()), Counter(), Counter()
    for _, *request in requests[::5]:
        ask(address, *request)
    before = resident(process)
    for area, *request in requests:
        status, text = ask(address, *request)
        tried[area] += 1
        found[area] += is_in_words(area, status, text)
        if not is_in_words(area, status, text):
            print(area, request[0], request[1][:40], str(request[2:])[-200:], "->", status, text[:300])
    grown = (resident(process) - before) / 2**20
    print(f"in words: {found.total()} of {tried.total()}, by area {dict(tried)}; memory grew by {grown:.0f} MiB")
    assert found == tried
    assert tried.total() >= 150
    assert grown < 50


def in_process(model, tokenizer, **options):
    """Return a client of the server's application in this process, and the limits of it."""
    testclient = pytest.importorskip("starlette.testclient")
    from wide.runs.requests import Limits
    from wide.runs.serving import _OneModel, application
    from wide.runs.settings import ServerOptions

    how = ServerOptions(**options)
    limits = Limits(seconds=how.request_timeout, body_bytes=10**6, api_key=how.api_key)
    app = application(_OneModel("tiny", model, tokenizer), how, limits)
    return testclient.TestClient(app, base_url="http://localhost", raise_server_exceptions=False), limits


@pytest.fixture
def base(folders):
    return AutoModelForCausalLM.from_pretrained(folders[0]), load_tokenizer(folders[0])


def completed(client, **asked):
    """Return the text of a completion, or what is said instead."""
    found = client.post("/v1/completions", json={"prompt": "The quick", "max_tokens": 12} | asked).json()
    return found["error"]["message"] if "error" in found else found["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: Input should be greater than or equal to 1, got 0"),
        ('{"prompt": "a", "n": 3, "beam": 1}', "n: Input should be 1, got 3; beam: is not known here; leave it out"),
        ('{"prompt": "a", "generation_config": "{"}', "generation_config: Invalid JSON"),
        ('{"prompt": "a", "generation_config": "{\\"max_length\\": 9}"}', "generation_config.max_length: is not known"),
        ('{"prompt": ', "the body is not JSON: Expecting value at character 11; mend it"),
        ("[]", "the body: Input should be a valid dictionary"),
        ('{"prompt": "a", "temperature": 1e9}', "less than or equal to 2, got 1000000000.0"),
        ('{"prompt": "a", "eos_token_id": 9999999999}', "less than 2147483648, got 9999999999"),
    ],
)
def test_a_refusal_names_option_value_and_wish(body, words, base):
    client, _ = in_process(*base)
    said = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert said.status_code == 400
    assert words in said.json()["error"]["message"]


def test_what_a_tokenizer_cannot_do_is_said(base):
    base[1].chat_template = None
    base[1]._tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    client, _ = in_process(*base)
    chat = client.post("/v1/chat/completions", json={"messages": HELLO})
    assert (chat.status_code, "has no chat template; use /v1/completions" in chat.text) == (400, True)
    assert "the prompt has no tokens; give some text" in completed(client, prompt="")


def events(said):
    """Return the events of a stream, or the one answer."""
    return [
        json.loads(part) for part in said.text.removeprefix("data: ").split("\n\ndata: ") if part.strip() != "[DONE]"
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_that_ends_with_its_last_token_has_stopped(base, streams):
    client, _ = in_process(*base)
    asked = {"prompt": "The quick", "max_tokens": 1, "temperature": 0, "stream": streams}

    def reason(**more):
        return events(client.post("/v1/completions", json=asked | more))[-1]["choices"][0]["finish_reason"]

    encoded = base[1]("The quick", return_tensors="pt")
    final = int(base[0].generate(**encoded, max_new_tokens=1, do_sample=False)[0, -1])
    assert reason() == reason(eos_token_id=final + 1, stop="zz") == "length"
    for end in ({"eos_token_id": final}, {"eos_token_id": [1, final]}, {"stop": base[1].decode([final])}):
        assert reason(**end) == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_says_whether_its_text_was_cut(base, streams):
    client, _ = in_process(*base)
    asked = {"input": "The quick", "temperature": 0, "stream": streams}

    def said(**more):
        found = events(client.post("/v1/responses", json=asked | more))
        done = [event["item"]["status"] for event in found if event.get("type") == "response.output_item.done"]
        response = found[-1]["response"] if streams else found[-1]
        kind = found[-1]["type"].removeprefix("response.") if streams else response["status"]
        statuses = {kind, response["status"], *done, *(item["status"] for item in response["output"])}
        assert len(statuses) == 1, statuses
        return statuses.pop(), response.get("incomplete_details")

    encoded = base[1].apply_chat_template([{"role": "user", "content": "The quick"}], return_tensors="pt")
    final = int(base[0].generate(**encoded, max_new_tokens=1, do_sample=False)[0, -1])
    cut = ("incomplete", {"reason": "max_output_tokens"})
    assert said(max_output_tokens=1, eos_token_id=final + 1) == said(max_output_tokens=5, eos_token_id=-1) == cut
    # To the last of the positions, too.
    assert said(max_output_tokens=2**31 - 1, eos_token_id=-1) == cut
    for most in (1, 2):
        assert said(max_output_tokens=most, eos_token_id=final) == ("completed", None)


def test_streams_end_as_clients_expect(base):
    client, _ = in_process(*base)
    for path, asked in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        said = client.post(f"/v1/{path}", json=asked | {"max_tokens": 2, "stream": True}).text
        assert said.endswith("}\n\ndata: [DONE]\n\n")
        assert said.count("[DONE]") == 1
    said = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "stream": True})
    assert "[DONE]" not in said.text


def test_no_part_of_a_chat_is_left_out(base):
    call = {"function": {"name": "f", "arguments": "{}"}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    items = [*HELLO, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
    client, _ = in_process(*base)
    for path, asked, words in (
        ("chat/completions", {"messages": turns}, "chat template knows no tool_calls; leave tool_calls out"),
        ("responses", {"input": items}, "chat template knows no tool_calls; leave tool_calls out"),
        ("chat/completions", {"messages": [{"role": "user", "contents": "Hi"}]}, "wanted content"),
        ("chat/completions", {"messages": [*HELLO, {"role": "tool"}]}, "wanted content"),
    ):
        said = client.post(f"/v1/{path}", json=asked)
        assert (said.status_code, words in said.text) == (400, True), said.text
    base[1].chat_template = TEMPLATE + "{{ messages[1].tool_calls[0].function.name }}"
    assert client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1}).status_code == 200
    # What is said beside a call is in the prompt, too.
    says = {"role": "assistant", "content": "Let me look."}
    shown = [*HELLO, says | {"tool_calls": [call]}]
    count = len(base[1].apply_chat_template(shown)["input_ids"])
    for path, asked in (("chat/completions", {"messages": shown}), ("responses", {"input": [*HELLO, says, items[1]]})):
        usage = client.post(f"/v1/{path}", json=asked).json()["usage"]
        assert count in usage.values(), usage


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (torch.OutOfMemoryError("CUDA"), 503, "the memory is full; send a shorter prompt"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 503, "the memory is full; send a shorter"),
        (RuntimeError("broken"), 500, "the server has failed: RuntimeError: broken"),
    ],
)
def test_what_fails_is_said_and_the_next_request_is_served(base, error, status, words, streams):
    def fail(*_):
        raise error

    client, _ = in_process(*base)
    failing = base[0].register_forward_pre_hook(fail)
    said = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": streams})
    assert (said.status_code, words in said.text) == (200 if streams else status, True), said.text
    failing.remove()
    assert completed(client, max_tokens=1, temperature=0)


def test_who_may_ask_under_which_names_and_how_many(base):
    client, limits = in_process(*base, api_key="key", allowed_hosts="localhost, other")
    assert client.get("/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer ke"}, {"Authorization": "key"}, {"Authorization": "Bearer keyé"}):
        refused = client.get("/v1/models", headers={name: value.encode() for name, value in headers.items()})
        assert refused.status_code == 401
        assert "Authorization: Bearer KEY" in refused.json()["error"]["message"]
    known = {"Authorization": "Bearer key"}
    assert client.get("/v1/models", headers=known | {"Host": "other"}).status_code == 200
    assert client.get("/v1/models", headers=known | {"Host": "evil.example"}).status_code == 400
    limits.calls.update(range(64))
    assert client.post("/v1/completions", headers=known, json={"prompt": "a"}).status_code == 503
    assert client.get("/v1/models", headers=known).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_ends_at_its_deadline_and_lets_the_next_one_in(base, streams):
    client, limits = in_process(*base, request_timeout=0.7)
    steps = Counter()

    def slow(*_):
        steps["all"] += 1
        time.sleep(0.1)

    base[0].register_forward_pre_hook(slow)
    with client:
        said = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100, "stream": streams})
        assert said.status_code == (200 if streams else 504)
        assert "the request took more than 0.7 seconds" in said.text
        # However long a busy machine takes.
        limits.seconds = SECONDS
        assert completed(client, max_tokens=1, temperature=0)
    assert steps["all"] < 20
    assert not limits.calls


def test_a_request_ends_when_its_client_leaves():
    pytest.importorskip("fastapi")
    from wide.runs.requests import CALL, Bounded, EndedError, Limits

    seen, messages = [], iter([{"type": "http.request", "body": b"a"}, {"type": "http.disconnect"}])

    async def works(*_):
        seen.append(CALL.get())
        await asyncio.sleep(SECONDS)

    async def receive():
        return next(messages)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    bounded = Bounded(works, Limits(seconds=SECONDS, body_bytes=1))
    asyncio.run(asyncio.wait_for(bounded(scope, receive, None), 10))
    with pytest.raises(EndedError, match="the request has ended"):
        seen[0]()


def test_sampling_is_what_is_asked_whatever_the_base_says(base):
    model, tokenizer = base
    client, _ = in_process(*base)
    greedy = completed(client)
    texts = {seed: completed(client, temperature=1.5, seed=seed) for seed in range(4)}
    assert len({greedy, *texts.values()}) == 5
    assert completed(client, temperature=1.5, seed=2) == texts[2]
    assert completed(client, generation_config='{"temperature": 1.5}', seed=2) == texts[2]
    assert completed(client, generation_config='{"do_sample": true}', temperature=0) == greedy
    # As with a temperature of 1, and without the 50 likeliest tokens that transformers takes otherwise.
    whole = wide.generate(model, "The quick", tokenizer=tokenizer, max_new_tokens=12, temperature=1.0, seed=3)
    assert completed(client, top_p=1.0, seed=3) == whole
    # The prompt's end is no beginning of a stop.
    assert completed(client, stop=["quick" + greedy[:2]]) == greedy
    letter = next(letter for letter in whole if letter.isalpha())
    assert completed(client, top_p=1.0, seed=3, stop=[letter]) == whole[: whole.index(letter) + 1]

    model.generation_config.update(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, max_time=0.0)
    model.generation_config.update(do_sample=True, repetition_penalty=5.0, stop_strings=[letter])
    client, _ = in_process(*base)
    with own_settings(model):
        assert (
            completed(client, generation_config='{"repetition_penalty": 1.0}', seed=3)
            == whole[: whole.index(letter) + 1]
        )
        assert completed(client, temperature=0) != greedy
        assert (
            completed(client, temperature=0, generation_config='{"repetition_penalty": 1.0, "stop_strings": "zz"}')
            == greedy
        )


@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
def test_a_completion_keeps_the_space_before_its_first_word(decoder):
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *(f"▁w{index}" for index in range(40))])}
    rust = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if decoder == "strip":
        parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        rust.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "w1"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=128, **sizes)).eval()
    model.generation_config.eos_token_id = 1
    client, _ = in_process(model, tokenizer)
    text = completed(client, prompt="w1 w2", max_tokens=4)
    assert text == wide.generate(model, "w1 w2", tokenizer=tokenizer, max_new_tokens=4)
    assert text.startswith(" w")
    said = client.post("/v1/completions", json={"prompt": "w1 w2", "max_tokens": 4, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events(said)) == text
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}).json()
    assert answer["choices"][0]["message"]["content"].startswith("w")


def test_continuous_batching_refuses_or_tells_what_it_would_ignore(base):
    client, _ = in_process(*base, continuous_batching=True)
    for asked in ({"temperature": 1.0}, {"stop": "a"}, {"top_p": 0.5}, {"generation_config": '{"top_k": 3}'}):
        assert "continuous batching samples all requests alike" in completed(client, **asked)
    base[0].generation_config.do_sample = True
    client, _ = in_process(*base, continuous_batching=True)
    for seed in (0, 1):
        assert "continuous batching samples all requests alike" in completed(client, seed=seed)
    for own in ({"repetition_penalty": 1.05}, {"stop_strings": ["\n"]}):
        base[0].generation_config = GenerationConfig(**own)
        with pytest.warns(UserWarning, match=f"ignores .*{next(iter(own))}.*, which the model's own configuration"):
            in_process(*base, continuous_batching=True)


def test_a_tokenizer_in_python_is_served_but_for_streams(base):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=384, max_position_embeddings=64, **sizes)
    model, tokenizer = LlamaForCausalLM(config).eval(), ByT5Tokenizer()
    client, _ = in_process(model, tokenizer)
    expected = wide.generate(model, "The quick", tokenizer=tokenizer, max_new_tokens=12)
    assert completed(client) == expected
    assert "runs in Python and cannot stream" in completed(client, stream=True)
    assert "64 positions" in completed(client, prompt="a" * 64)


def test_an_address_in_use_is_one_sentence_before_a_model_is_loaded(tiny_model_folder, monkeypatch, capsys):
    monkeypatch.setattr("wide.data.tokenizer.load_tokenizer", lambda *_: pytest.fail("a model is being loaded"))
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(tiny_model_folder), "--host=127.0.0.1", f"--port={port}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"wide: error: 127.0.0.1 cannot be listened at, port {port}: ")
    assert "in use" in said


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_signals_end_a_busy_server_within_ten_seconds(numbers, folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[0], max_position_embeddings=16_000)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    load_tokenizer(folders[0]).save_pretrained(tmp_path)
    process, address = start((tmp_path, folders[1]), "--backend=none")
    long = ("POST", "/v1/completions", {"Content-Type": "application/json"}, b'{"prompt": "a", "max_tokens": 15000}')
    try:
        # Each would take a minute.
        for streams in (b"true", b"false"):
            kill_a_client(address, b'{"prompt": "a", "max_tokens": 15000, "stream": %s}' % streams)
        began = time.monotonic()
        assert ask(address, *long[:3], b'{"prompt": "a", "max_tokens": 1}')[0] == 200
        assert time.monotonic() - began < 10
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(ask, address, *long) for _ in range(3)]
            time.sleep(2)
            began = time.monotonic()
            for number in numbers:
                process.send_signal(number)
                time.sleep(0.3)
            said, _ = process.communicate(timeout=SECONDS)
            print(f"{[number.name for number in numbers]}: ended after {time.monotonic() - began:.1f} seconds")
            assert time.monotonic() - began < 10
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("wide: interrupted")
    assert "Traceback" not in said
    assert {(status, "is being stopped" in text) for status, text in (one.result() for one in waiting)} == {(503, True)}


@pytest.mark.slow
def test_continuous_batching_is_passed_on_and_ends_with_the_server(folders):
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    flags = ["--continuous_batching=true", "--cb_num_blocks=32", "--cb_block_size=32", "--cb_max_batch_tokens=64"]
    process, address = start(folders, "--backend=none", *flags)
    try:
        with client_of(address) as client:
            found = client.completions.create(model="tiny", prompt="The quick", max_tokens=6, temperature=0)
    finally:
        code, said = stop(process)
    assert found.choices[0].text == wanted(folders, "The quick", 6)
    assert "CB: True" in said
    assert code == 130


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags", [(), ("--continuous_batching=true", "--cb_num_blocks=64", "--cb_max_batch_tokens=256")]
)
def test_streams_at_once_and_killed_clients_on_a_gpu(tmp_path, tiny_tokenizer, flags):
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    wide.save(wide.attach(model, wide.WideConfig(ffn_group_size=64, router_rank=16)), tmp_path / "adapter")
    folders = tmp_path / "base", tmp_path / "adapter"
    process, address = start(folders, "--backend=triton", "--dtype=bfloat16", *flags, device="cuda")
    try:
        with client_of(address) as client:

            def streamed(prompt):
                asked = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
                return "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))

            # Nothing is captured before the first of them.
            with ThreadPoolExecutor(2) as pool:
                first = list(pool.map(streamed, ["The quick", "A list holds values"]))
            assert all(first)
            for _ in range(3):
                kill_a_client(address)
            with ThreadPoolExecutor(2) as pool:
                again = list(pool.map(streamed, ["The quick", "A list holds values"]))
            assert all(again)
            # Shared forwards may run other tiles.
            assert flags or again == first
    finally:
        code, said = stop(process)
    assert code == 130, said
    assert "tiny is optimised" in said


def test_the_sparsity_is_set_at_the_start(folders, monkeypatch):
    monkeypatch.setattr("wide.cli.serve.find_spec", lambda name: name)
    served = []
    monkeypatch.setattr("wide.runs.serving.serve", lambda model, *_: served.append(model))
    given = ["serve", "--model", str(folders[0]), "--adapter", str(folders[1]), "--device=cpu"]
    for sparsity in ("0.2", "0.7"):
        assert main([*given, "--sparsity", sparsity]) == 0
    few, many = (attachment(model).routers()[0].threshold for model in served)
    assert few < many


def test_what_is_missing_is_named(folders, monkeypatch, capsys):
    monkeypatch.setattr("wide.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve", "--model", str(folders[0])]) == 1
    assert "wide serve needs uvicorn: pip install 'wide[serve]'" in capsys.readouterr().err
