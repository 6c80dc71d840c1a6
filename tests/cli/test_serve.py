"""The server: what an OpenAI client gets from it, and that no client stops it."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import wide
from wide.cli.main import main
from wide.data.batches import TokenBatch
from wide.data.tokenizer import load_tokenizer
from wide.models.attach import attachment
from wide.models.dial import calibrate_dial

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
HELLO = [{"role": "user", "content": "Hello"}]
SECONDS = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model_folder):
    """Return a model's folder whose tokenizer has a chat template, and that of an adapter with a dial."""
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = load_tokenizer(tiny_model_folder)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    wide.attach(model, wide.WideConfig(ffn_group_size=16, router_rank=4))
    ids = torch.randint(2, 258, (4, 64))
    calibrate_dial(model, [TokenBatch(input_ids=ids, labels=ids, valid=torch.ones_like(ids, dtype=torch.bool))])
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
def server(folders):
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    process, address = start(folders, "--backend=torch")
    yield address
    code, said = stop(process)
    assert code == 130
    assert "tiny is optimised" in said
    assert "interrupted" in said.splitlines()[-1]


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
    return refused.value.response.json()["detail"]


def test_one_model_is_listed_and_no_other_is_known(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert "pinned to 'tiny'" in refusal(client.chat.completions.create, model="other", messages=HELLO)
    assert "this server has tiny alone" in post(server, "/load_model", b'{"model": "other"}')
    assert '"ready"' in post(server, "/load_model", b'{"model": "tiny"}')


def post(server, path, body=b""):
    request = urllib.request.Request(server.removesuffix("/v1") + path, data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read().decode()


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


def kill_a_client(address):
    """Ask for a stream, and cut the connection after its first bytes."""
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    body = b'{"model": "tiny", "prompt": "The quick", "max_tokens": 100, "stream": true}'
    with socket.create_connection((host, int(port))) as rude:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        rude.sendall(head.encode() + b"\r\n\r\n" + body)
        assert rude.recv(64)
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


def test_a_chat_without_a_template_is_refused_in_words(tiny_model_folder):
    fastapi = pytest.importorskip("fastapi")
    from wide.runs.serving import _refusing

    tokenizer = _refusing(load_tokenizer(tiny_model_folder), 128)
    with pytest.raises(fastapi.HTTPException) as refused:
        tokenizer.apply_chat_template(HELLO, return_dict=True)
    assert refused.value.status_code == 400
    assert "no chat template" in refused.value.detail


def test_no_new_tokens_are_the_clients_mistake():
    fastapi = pytest.importorskip("fastapi")
    from wide.runs.serving import _generate

    given = {"generation_config": GenerationConfig(), "input_ids": torch.ones(1, 4, dtype=torch.int64)}
    given["generation_config"].max_new_tokens = -4
    with pytest.raises(fastapi.HTTPException, match="wanted at least 1 new token, got -4"):
        _generate(None, 128, **given)


def test_a_reset_by_a_client_keeps_the_model(client, server):
    assert "ok" in post(server, "/reset")


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


def test_what_a_server_wraps_comes_back(tiny_model_folder, monkeypatch):
    pytest.importorskip("fastapi")
    from wide.runs import serving
    from wide.runs.settings import ServerOptions

    model = wide.attach(AutoModelForCausalLM.from_pretrained(tiny_model_folder), wide.WideConfig(ffn_group_size=16))
    wide.optimize(model, backend="torch")
    before = {name: vars(model)[name] for name in ("generate", "init_continuous_batching")}
    seen = []
    monkeypatch.setattr(serving, "Serve", lambda *_, **__: seen.append(dict(vars(model))))
    serving.serve(model, load_tokenizer(tiny_model_folder), "tiny", ServerOptions())
    for name, found in before.items():
        assert seen[0][name] is not found
        assert vars(model)[name] is found


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
