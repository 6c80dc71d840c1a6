"""`wide export`: what a method decided as a checkpoint of its own, and what is refused."""

import errno
import json
import resource
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from wide.cli.main import main
from wide.config import WideConfig
from wide.grouping import Grouping
from wide.materialisation.checkpoint import load_checkpoint
from wide.models.adapter import load, save
from wide.models.attach import attach, attachment
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped
from wide.records import read_records
from wide.writing import whole_folder

SHORT = LayerPlan(attention=Skipped(), ffn=Skipped())
WHOLE = LayerPlan(attention=Dense(), ffn=Dense())


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapter_of(folder, path, kind):
    model = base(folder)
    layers, spec = model.config.num_hidden_layers, model.config
    plan, tensors = Plan((SHORT, *[WHOLE] * (layers - 1))), {}
    if kind == "width":
        half = Kept(grouping=Grouping(spec.intermediate_size, 1), kept=spec.intermediate_size // 2)
        plan = Plan((*[WHOLE] * (layers - 1), LayerPlan(attention=Dense(), ffn=half)))
        scales = torch.ones(spec.intermediate_size)
        scales[::2] = 0.0
        tensors = {f"layers.{layers - 1}.ffn.scale": scales}
    elif kind == "routed":
        plan = WideConfig(ffn_group_size=16, router_rank=4)
    save(attach(model, plan, tensors=tensors), path)
    with torch.no_grad():
        return model(torch.arange(8).unsqueeze(0)).logits


@pytest.mark.parametrize(
    ("kind", "how", "ordinary"),
    [
        ("depth", None, True),
        ("width", None, False),
        ("width", "masked", True),
        ("width", "whole", False),
        ("routed", None, False),
    ],
)
def test_a_checkpoint_of_the_same_function(kind, how, ordinary, tiny_model_folder, tmp_path, capsys):
    wanted = adapter_of(tiny_model_folder, tmp_path / "adapter", kind)
    output = tmp_path / "exported" / "model"
    given = ["export", "--model", str(tiny_model_folder), "--adapter", str(tmp_path / "adapter"), "--device=cpu"]
    given += ["--output", str(output), "--dtype=float32", *([] if how is None else [f"--how={how}"])]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert ("after import wide" in said) is not ordinary
    card = (output / "README.md").read_text()
    assert ("import wide" in card, "library_name: wide" in card) == (not ordinary, not ordinary)
    assert {oct(path.stat().st_mode & 0o777) for path in output.iterdir()} == {"0o644"}
    model = base(output) if ordinary else load_checkpoint(output, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(8).unsqueeze(0)).logits, wanted, atol=1e-4, rtol=1e-3)
    assert len(AutoTokenizer.from_pretrained(output)) > 0
    assert main(["generate", f"--model={output}", "--prompt=The", "--max_new_tokens=2", "--device=cpu"]) == 0
    # What was cut has no routers any more, and is not the dense model.
    assert "dense" not in capsys.readouterr().err.replace("no faster than dense", "")
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    assert main(given) == 1
    assert "exists already" in capsys.readouterr().err
    (output / "of before").touch()
    assert main([*given, "--overwrite"]) == 0
    assert not (output / "of before").exists()
    assert [path.name for path in output.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("kind", "stages", "subject"),
    [
        ("width", {}, "pruned"),
        ("depth", {}, "pruned"),
        ("depth", {"recover": {"text": "elsewhere.txt"}}, "pruned + LoRA"),
        ("routed", {}, "pruned"),
        (None, {}, "dense"),
    ],
)
def test_records_of_a_checkpoint_say_what_it_is(kind, stages, subject, tiny_model_folder, prose_folder, tmp_path):
    checkpoint = tmp_path / "model"
    if kind is None:
        shutil.copytree(tiny_model_folder, checkpoint)
    else:
        adapter_of(tiny_model_folder, tmp_path / "adapter", kind)
        made = ["--adapter", str(tmp_path / "adapter"), "--output", str(checkpoint), "--device=cpu"]
        assert main(["export", "--model", str(tiny_model_folder), *made]) == 0
    if stages:
        facts = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(facts | {"wide_trained_on": stages}))
    scored = ["--data", str(prose_folder), "--tokens=64", "--window=32", "--output", str(tmp_path / "scores")]
    assert main(["eval", "--model", str(checkpoint), "--device=cpu", *scored]) == 0
    assert {record.subject for record in read_records(tmp_path / "scores" / "records.jsonl")[0]} == {subject}


def test_a_checkpoint_with_routers_runs_at_another_sparsity(tiny_model_folder, tmp_path, capsys):
    adapter, output = tmp_path / "adapter", tmp_path / "model"
    model = attach(base(tiny_model_folder), WideConfig(ffn_group_size=16, router_rank=4))
    attachment(model).thresholds_by_sparsity = [(0.1, -50.0), (0.9, 50.0)]
    save(model, adapter)
    given = ["--device=cpu", "--dtype=float32"]
    assert main(["export", f"--model={tiny_model_folder}", f"--adapter={adapter}", f"--output={output}", *given]) == 0
    asked = ["generate", "--prompt=The", "--max_new_tokens=2", *given]
    skipped = {}
    for sparsity in (0, 0.9):
        capsys.readouterr()
        assert main([*asked, f"--model={output}", f"--sparsity={sparsity}"]) == 0
        skipped[sparsity] = capsys.readouterr().err
    assert "mean 0.0%" in skipped[0]
    assert "mean 100.0%" in skipped[0.9]
    score = ["eval", f"--model={output}", "--data=python-docs", "--tokens=64", "--window=32", "--sparsity=0.9", *given]
    assert main(score) == 0
    assert "mean 100.00%" in capsys.readouterr().out
    # The base has no thresholds.
    assert main([*asked, f"--model={tiny_model_folder}", "--sparsity=0.5"]) == 1
    assert "give --adapter" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["adapter", "base", "thesis"])
def test_only_checkpoints_that_are_not_exported_are_replaced(where, tiny_model_folder, tmp_path, capsys):
    shutil.copytree(tiny_model_folder, tmp_path / "base")
    adapter_of(tmp_path / "base", tmp_path / "adapter", "depth")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    given = ["export", "--model", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter"), "--device=cpu"]
    assert main([*given, "--output", str(tmp_path / where), "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert ("base; choose another folder" if where == "base" else "exists already; name a new folder") in said
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tiny_model_folder, tmp_path, capsys):
    adapter_of(tiny_model_folder, tmp_path / "adapter", "routed")
    given = ["export", "--model", str(tiny_model_folder), "--output", str(tmp_path / "new"), "--device=cpu"]
    assert main(given) == 2
    assert "--adapter" in capsys.readouterr().err
    assert main([*given, "--adapter", str(tmp_path / "adapter"), "--how=sliced"]) == 1
    found = capsys.readouterr().err
    assert "decided anew" in found
    assert "wide export without --how" in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    assert load(base(tiny_model_folder), tmp_path / "adapter") is not None


@pytest.mark.parametrize("name", ["", ".", "../here"])
def test_the_folder_that_a_process_runs_in_is_not_replaced(name, tiny_model_folder, tmp_path, capsys, monkeypatch):
    adapter_of(tiny_model_folder, tmp_path / "adapter", "depth")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert (
        main(["export", f"--model={tiny_model_folder}", f"--adapter={tmp_path / 'adapter'}", f"--output={name}"]) == 1
    )
    assert "cannot be replaced; name another" in capsys.readouterr().err
    assert not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize(("what", "limit"), [("adapter", 2048), ("checkpoint", 8192)])
def test_a_disk_that_is_full_is_said_in_words(what, limit, tiny_model_folder, tmp_path, capsys):
    # A file that may not grow, as on a full disk, which safetensors reports in an error of its own.
    adapter_of(tiny_model_folder, tmp_path / "adapter", "routed")
    output, (soft, hard) = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    model = attach(base(tiny_model_folder), WideConfig(ffn_group_size=16, router_rank=4))
    given = ["export", "--model", str(tiny_model_folder), "--adapter", str(tmp_path / "adapter"), "--device=cpu"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        if what == "adapter":
            with pytest.raises(OSError, match="weights cannot be written"):
                save(model, output)
        else:
            assert main([*given, "--output", str(output), "--dtype=float32"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert what == "adapter" or f"{output}: the weights cannot be written" in said
    with pytest.raises(OSError, match=f"File too large: '{output}'"), whole_folder(output):
        raise OSError(errno.EFBIG, "File too large")
    assert "SafetensorError" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}
