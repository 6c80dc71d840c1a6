"""Base models as they are loaded: whole, by one thread at a time, or refused by the name of what is wrong."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import make, stirred, tokens
from safetensors.torch import load_file, save_file

from wide.cli.main import main
from wide.config import WideConfig
from wide.data.tokenizer import load_tokenizer
from wide.errors import AdapterError, ConfigError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.adapter import load, save
from wide.models.attach import attach
from wide.models.pretrained import load_pretrained

CONFIG = WideConfig(ffn_group_size=16, router_rank=4)
DOWN, HEAD = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(DOWN), f"missing {DOWN}"),
        (lambda tensors: tensors.pop(HEAD), f"missing {HEAD}"),
        (lambda tensors: tensors.update({DOWN + "x": tensors[DOWN]}), f"unexpected {DOWN}x"),
        (
            lambda tensors: tensors.update({DOWN: tensors[DOWN][:, :48]}),
            rf"{DOWN} of shape \(32, 48\), wanted \(32, 64\)",
        ),
        (lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name], "and 6 more"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(tmp_path, change, words):
    make("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_pretrained(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("meta", "do not run on 'meta'"),
        ("mps", "do not run on 'mps'"),
        ("xla:1", "do not run on 'xla:1'"),
        ("gpu", "'gpu' is unknown"),
        ("cuda:99", r"sees \d+ GPUs; use (cpu|cuda:0)$"),
    ],
)
def test_devices_on_which_nothing_runs_are_refused_before_anything_is_read(device, words):
    with pytest.raises(ConfigError, match=words):
        load_pretrained("no/such/model", device=device)


def test_a_tied_head_is_not_missing(tmp_path):
    model = make("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_pretrained(str(tmp_path), device="cpu")(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "wanted an object"),
        (b'{"metadata": {}}', "weight_map is None"),
        (b'{"metadata": {}, "weight_map": {"lm_head.weight": 3}}', "is 3, wanted text"),
    ],
)
def test_a_broken_index_of_shards_is_named(tmp_path, content, words, capsys):
    make("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(AdapterError, match=rf"model\.safetensors\.index\.json.*{words}"):
        load_pretrained(str(tmp_path), device="cpu")
    assert main(["inspect", "--model", str(tmp_path)]) == 1
    assert "model.safetensors.index.json" in capsys.readouterr().err


def test_threads_may_load_at_once(tmp_path):
    # transformers switches the tying of embeddings off, for all threads, while it builds a model.
    model = attach(make("llama", tie_word_embeddings=True), CONFIG)
    save(model, tmp_path / "adapter")
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    expected, interval = model(tokens()).logits, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: load(tmp_path / "base", tmp_path / "adapter", device="cpu"), range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(each(tokens()).logits, expected) for each in found)


def write_gguf(file, model, tokenizer):
    """Write a tiny Llama as llama.cpp has it: down projections in blocks of 8 bits, queries and keys permuted."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (config.vocab_size - 2))
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for part, count in heads.items():
            if part in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if "down_proj" in name else None
        values = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, (".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


@pytest.fixture
def base():
    return stirred(make("llama", vocab_size=258, bos_token_id=0, eos_token_id=1))


def test_a_gguf_file_is_a_base_on_its_dequantised_weights(base, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    file, ids = write_gguf(tmp_path / "a.gguf", base, tiny_tokenizer), tokens()
    # A file of the same name where the program runs is another one.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = load_pretrained(file, device="cpu")
    assert (read(ids).logits - base(ids).logits).abs().max() < 0.02 * base(ids).logits.abs().max()
    assert {type(module) for module in read.modules()} == {type(module) for module in base.modules()}
    read.save_pretrained(tmp_path / "folder")
    model = attach(read, CONFIG)
    expected = model(ids).logits
    save(model, tmp_path / "adapter")
    assert torch.equal(load(file, tmp_path / "adapter", device="cpu")(ids).logits, expected)
    assert torch.equal(load(tmp_path / "adapter", device="cpu")(ids).logits, expected)
    assert torch.equal(load(tmp_path / "folder", tmp_path / "adapter", device="cpu")(ids).logits, expected)
    other = write_gguf(tmp_path / "b.gguf", make("llama", vocab_size=258), tiny_tokenizer)
    with pytest.raises(AdapterError, match="weights differ"):
        load(other, tmp_path / "adapter", device="cpu")
    tokenizer = load_tokenizer(read)
    assert tokenizer("A list")["input_ids"][-6:] == tiny_tokenizer("A list")["input_ids"][-6:]
    assert main(["inspect", "--model", file]) == 0
    assert "GGUF                21 tensors, 19 of F32, 2 of Q8_0; weights are dequantised" in capsys.readouterr().out
    save_checkpoint(model, tmp_path / "full")
    assert torch.equal(load_checkpoint(tmp_path / "full", dtype=torch.float32)(ids).logits, expected)
    given = ["--adapter", str(tmp_path / "adapter"), "--device", "cpu"]
    assert main(["generate", "--model", file, *given, "--prompt", "A list", "--max_new_tokens", "3"]) == 0
    text = tmp_path / "text.txt"
    text.write_text("A list holds values in order. " * 20)
    assert main(["eval", "--model", file, *given, "--data", str(text), "--window", "64"]) == 0
    with pytest.raises(ConfigError, match="GGUF file, which is read whole"):
        load_pretrained(file, device="cpu", sharded=True)


@pytest.mark.parametrize("content", [b"", b"hello", b"GGUF" + bytes(400), None])
def test_what_is_no_gguf_file_is_one_sentence(base, tiny_tokenizer, tmp_path, content, capsys):
    pytest.importorskip("gguf")
    file = tmp_path / "a.gguf"
    if content is None:
        write_gguf(file, base, tiny_tokenizer)
        content = file.read_bytes()[:-9000]
    file.write_bytes(content)
    for command in (["inspect"], ["eval", "--data", "python-docs"], ["generate", "--prompt", "a"]):
        assert main([*command, "--model", str(file)]) == 1
        assert f"{str(file)!r}" in (said := capsys.readouterr().err)
        assert "Traceback" not in said


@pytest.mark.parametrize(("is_there", "words"), [(True, r"pip install 'wide\[gguf\]'"), (False, "there is no file")])
def test_a_gguf_file_that_is_not_there_or_cannot_be_read_here(tmp_path, monkeypatch, capsys, is_there, words):
    monkeypatch.setattr("wide.data.local_names.find_spec", lambda name: None)
    file = tmp_path / "a.gguf"
    if is_there:
        file.write_bytes(b"GGUF")
    assert main(["inspect", "--model", str(file)]) == 1
    assert re.search(words, capsys.readouterr().err)
