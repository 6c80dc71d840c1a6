"""Adapters and checkpoints go to a Hub and come back, with cards that it accepts."""

import json
from hashlib import sha256

import pytest
import torch
import yaml
from families import make, tokens
from hub_stand_in import Hub

import wide
from wide.errors import AdapterError, ConfigError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.attach import attachment
from wide.models.card import PLACE

TRAINED = {
    "prune": {"objective": {"sparsity": 0.5}, "inference": {"sparsity": 0.497}, "text": "owner/texts"},
    "held_out": {
        "data": "owner/other",
        "token_perplexity": {"perplexity": 7.714, "window": 512},
        "sparsity": {"mean": 0.481},
        "of_dense": {"dense": 6.5, "dense + LoRA": 6.25},
    },
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = Hub()
    # What HF_ENDPOINT sets, which is read once a process.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.close()


@pytest.fixture
def pruned():
    model = wide.attach(make("llama"), wide.WideConfig(ffn_group_size=16, router_rank=4))
    attachment(model).provenance = TRAINED
    return model


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_an_adapter_goes_to_the_hub_and_comes_back_by_its_name(hub, pruned, tmp_path):
    address = wide.push_to_hub(pruned, "user/adapter", token=hub.TOKEN, message="First")
    assert address.startswith(f"{hub.address}/user/adapter/commit/")
    assert hub.commits == ["First"]
    again = wide.load(make("llama"), "user/adapter", cache_dir=tmp_path / "cache")
    assert torch.equal(again(tokens()).logits, pruned(tokens()).logits)
    make("llama").save_pretrained(tmp_path / "base")
    wide.save(wide.load(str(tmp_path / "base"), "user/adapter", cache_dir=tmp_path / "cache"), tmp_path / "named")
    alone = wide.load(tmp_path / "named")
    assert torch.equal(alone(tokens()).logits, pruned(tokens()).logits)


def test_what_is_saved_can_be_uploaded_at_once_and_whole(hub, pruned, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    wide.save(pruned, tmp_path / "adapter", push_to_hub="user/adapter")
    assert {"wide_config.json", "README.md"} < set(hub.files["user/adapter"])
    pruned.save_pretrained(tmp_path / "full", push_to_hub=True, repo_id="user/full")
    files = hub.files["user/full"]
    assert json.loads(files["wide_sha256.json"])["model.safetensors"] == sha256(files["model.safetensors"]).hexdigest()
    assert 'AutoModelForCausalLM.from_pretrained("user/full")' in files["README.md"].decode()
    assert PLACE in (tmp_path / "full/README.md").read_text()
    monkeypatch.setattr("wide.models.adapter.is_first_process", lambda: False)
    assert wide.push_to_hub(pruned, "user/other") == ""
    assert "user/other" not in hub.files


def test_a_checkpoint_goes_to_the_hub_without_what_is_pickled(hub, pruned, tmp_path):
    folder = save_checkpoint(pruned, tmp_path / "full")
    (folder / "training_args.bin").write_bytes(b"pickled")
    wide.push_to_hub(folder, "user/full", token=hub.TOKEN)
    written = {"README.md", "config.json", "generation_config.json", "model.safetensors", "wide_sha256.json"}
    assert set(hub.files["user/full"]) == written
    again = load_checkpoint("user/full", cache_dir=tmp_path / "cache")
    assert torch.equal(again(tokens()).logits, pruned(tokens()).logits)


def test_cards_say_what_was_asked_measured_and_how_to_load(hub, pruned):
    attachment(pruned).base["name_or_path"] = "owner/model"
    wide.push_to_hub(pruned, "user/adapter", token=hub.TOKEN)
    card = hub.files["user/adapter"]["README.md"].decode()
    found = metadata(card)
    assert (found["base_model"], found["library_name"], found["datasets"]) == ("owner/model", "wide", ["owner/texts"])
    assert found["metrics"] == ["perplexity"]
    assert found["model-index"][0]["results"][0]["metrics"] == [{"type": "perplexity", "value": 7.714}]
    assert 'wide.load("owner/model", "user/adapter")' in card
    rows = ("| this model | 7.71 | 48.1% |", "| dense | 6.50 | |", "| dense, with the same LoRA | 6.25 | |")
    for words in (*rows, "On owner/other (window 512)", "asked 50.0%", "training text 49.7%", "pip install", "licence"):
        assert words in card
    assert len(card.splitlines()) <= 55


def test_a_card_names_nothing_of_this_machine_as_if_the_hub_had_it(pruned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/model").mkdir(parents=True)
    attachment(pruned).base["name_or_path"] = "owner/model"
    attachment(pruned).provenance = {}
    folder = save_checkpoint(pruned, tmp_path / "full")
    found = metadata((folder / "README.md").read_text())
    assert not {"base_model", "datasets", "metrics"} & set(found)
    assert "import wide" in (folder / "README.md").read_text()
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}


def test_what_a_hub_does_not_have_or_take_is_said_in_words(hub, pruned, tmp_path):
    with pytest.raises(AdapterError, match="no adapter 'user/nothing' can be had from the Hub"):
        wide.load(make("llama"), "user/nothing", cache_dir=tmp_path)
    with pytest.raises(AdapterError, match=r"the Hub did not take .* as 'user/adapter': .*401"):
        wide.push_to_hub(pruned, "user/adapter", token="hf_wrong")
    with pytest.raises(AdapterError, match=r"holds neither wide_config.json nor config.json"):
        wide.push_to_hub(tmp_path, "user/adapter")
    with pytest.raises(AdapterError, match="name the adapter"):
        wide.load(make("llama"))
    with pytest.raises(AdapterError, match="does not name its base"):
        wide.load(wide.save(pruned, tmp_path / "adapter"))
    attachment(pruned).base["name_or_path"] = "./gone"
    with pytest.raises(ConfigError, match=r"no folder '\./gone'"):
        wide.load(wide.save(pruned, tmp_path / "adapter"))
