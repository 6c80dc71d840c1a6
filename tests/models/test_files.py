"""Weights that were changed on the disk, and what is forced to it before it gets its name."""

import json
import os
from pathlib import Path

import pytest
import torch
from families import make
from plans import skipped_plan

from wide.cli.main import main
from wide.config import WideConfig
from wide.errors import AdapterError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.materialisation.materialise import materialise
from wide.models import files
from wide.models.adapter import save
from wide.models.attach import attach, attachment
from wide.models.files import SUMS
from wide.models.pretrained import load_pretrained
from wide.models.thresholds import set_sparsity


@pytest.fixture
def checkpoint(tmp_path):
    model = attach(make("llama"), WideConfig(ffn_group_size=16, router_rank=4))
    return save_checkpoint(model, tmp_path / "full", max_shard_size="20KB")


def flip(file):
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def test_one_flipped_bit_in_the_weights_of_a_checkpoint_is_noticed(checkpoint, capsys):
    shards = sorted(checkpoint.glob("*.safetensors"))
    assert sorted(json.loads((checkpoint / SUMS).read_text())) == [file.name for file in shards]
    assert len(shards) > 1
    load_checkpoint(checkpoint)
    assert main(["inspect", "--model", str(checkpoint)]) == 0
    assert f"{len(shards)} compared with their sha256" in capsys.readouterr().out
    flip(shards[-1])
    with pytest.raises(AdapterError, match=rf"{shards[-1].name} is damaged: its sha256 is"):
        load_checkpoint(checkpoint)
    assert main(["inspect", "--model", str(checkpoint)]) == 1
    assert "is damaged: its sha256" in capsys.readouterr().err
    (checkpoint / SUMS).unlink()
    load_checkpoint(checkpoint)


def test_large_weights_are_compared_when_they_are_inspected(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(files, "_MOST_WHEN_LOADED", 100)
    flip(next(checkpoint.glob("*.safetensors")))
    load_checkpoint(checkpoint)
    assert main(["inspect", "--model", str(checkpoint)]) == 1
    assert "is damaged: its sha256" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{", '{"model.safetensors": 3}', '{"gone.safetensors": "0"}'])
def test_damaged_sums_are_refused_in_words(checkpoint, content):
    (checkpoint / SUMS).write_text(content)
    with pytest.raises(AdapterError, match=r"damaged|missing"):
        load_checkpoint(checkpoint)


def test_an_adapter_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, renamed, sync, rename = [], [], os.fsync, Path.rename

    def note_sync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def note_rename(path, target):
        renamed.append((Path(target).name, set(synced)))
        return rename(path, target)

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    torch.manual_seed(0)
    folder = save(attach(make("llama"), WideConfig(ffn_group_size=16, router_rank=4)), tmp_path / "adapter")
    name, before = renamed[-1]
    assert name == "adapter"
    assert {path.name for path in folder.iterdir()} <= before
    assert synced[-1] == tmp_path.name


@pytest.mark.parametrize("kind", ["base", "full"])
def test_the_weights_that_a_model_was_made_from_are_not_replaced(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("llama").save_pretrained("base")
    model = load_pretrained("base", device="cpu")
    attach(model, WideConfig(ffn_group_size=16, router_rank=4) if kind == "base" else skipped_plan(model, {(1, "ffn")}))
    if kind == "full":
        save_checkpoint(model, "full")
        model = materialise(load_checkpoint("full"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in (kind, tmp_path / "base" / ".." / kind):
        with pytest.raises(AdapterError, match=f"{kind} holds the weights that this model was loaded from; name ano"):
            model.save_pretrained(name)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    model.save_pretrained("new")
    assert load_checkpoint("new") is not None


def test_a_full_checkpoint_may_be_saved_again_in_its_place(checkpoint, tmp_path):
    model = load_checkpoint(tmp_path / "full")
    set_sparsity(model, threshold=0.25)
    save_checkpoint(model, tmp_path / "full")
    again = load_checkpoint(tmp_path / "full")
    assert {router.threshold for router in attachment(again).routers()} == {0.25}
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
