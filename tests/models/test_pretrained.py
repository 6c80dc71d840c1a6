"""Base models as they are loaded: whole, by one thread at a time, or refused by the name of what is wrong."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import make, tokens
from safetensors.torch import load_file, save_file

from wide.cli.main import main
from wide.config import WideConfig
from wide.errors import AdapterError, ConfigError
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
