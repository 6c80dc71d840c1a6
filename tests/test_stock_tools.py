"""Hugging Face's own tools open wide's checkpoints in a process that has imported wide, and nothing else of it."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from families import make, tokens
from materialise_plans import width_plan
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import wide
from wide.errors import AdapterError
from wide.materialisation.checkpoint import WideMixin, generated_classes
from wide.materialisation.materialise import materialise
from wide.models.attach import attachment
from wide.models.files import SUMS
from wide.models.pretrained import load_pretrained
from wide.vllm.limits import FAMILIES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_model_folder):
    """Return the folder of a full checkpoint, and the logits of its model for a few tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    wide.attach(model, wide.WideConfig(ffn_group_size=16, router_rank=4))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.arange(8)[None]).logits


def test_one_import_makes_the_auto_classes_know_a_checkpoint(checkpoint):
    folder, logits = checkpoint
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(torch.arange(8)[None]).logits, logits)


def test_another_process_loads_and_unpickles_and_the_stock_server_loads_where_wide_was_imported_first(
    checkpoint, tmp_path
):
    for name in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(name)
    folder, logits = checkpoint
    model = make("llama", tie_word_embeddings=True)
    plan, scales = width_plan(model, [[0, 1, 2], [1, 2, 3]], [40, 30])
    sliced = materialise(wide.attach(model, plan, tensors=scales)).to(torch.bfloat16)
    sliced.save_pretrained(tmp_path)
    kinds = [generated_classes(family, WideMixin)[0] for family in FAMILIES if family != "llama"]
    (tmp_path / "pickled").write_bytes(pickle.dumps([kind(hidden_size=48, wide={"a": 1}) for kind in kinds]))
    code = (
        "import wide, json, os, pickle, torch\n"
        "torch.set_num_threads(1)\n"
        f"sliced = wide.load_checkpoint({str(tmp_path)!r})\n"
        f"last = sliced(torch.tensor({tokens().tolist()})).logits[:, -1].tolist()\n"
        "print(json.dumps([type(sliced).__name__, str(sliced.dtype), last]))\n"
        # In these families no class has been made here.
        f"found = pickle.loads(open({str(tmp_path / 'pickled')!r}, 'rb').read())\n"
        "print(json.dumps([[type(one).__name__, one.hidden_size, one.wide] for one in found]))\n"
        "from transformers.cli.serving.model_manager import ModelManager\n"
        f"model, tokenizer = ModelManager(device='cpu').load_model_and_processor({f'{folder}@main'!r})\n"
        "logits = model(torch.arange(8)[None]).logits[0, -1]\n"
        "print(json.dumps([tokenizer.chat_template, logits.tolist()]), flush=True)\n"
        # Its timer, which lets idle models go, would keep the process for five minutes.
        "os._exit(0)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    of_sliced, unpickled, of_server = map(json.loads, said.splitlines())
    assert of_sliced[:2] == ["SlicedLlamaForCausalLM", "torch.bfloat16"]
    with torch.no_grad():
        # Products round to bfloat16 in an order that depends on where memory lies.
        torch.testing.assert_close(
            torch.tensor(of_sliced[2]), sliced(tokens()).logits[:, -1].float(), atol=4e-3, rtol=0.01
        )
    template, last = of_server
    assert template
    assert torch.equal(torch.tensor(last), logits[0, -1])
    assert unpickled == [[kind.__name__, 48, {"a": 1}] for kind in kinds]


def test_a_configuration_alone_gives_a_model_of_new_weights(checkpoint):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint[0]))
    assert type(model).__name__ == "WideLlamaForCausalLM"
    routers = attachment(model).routers()
    assert all(parameter.std() > 0 for router in routers for parameter in router.parameters())
    assert 0 < model.model.embed_tokens.weight.std() < 0.1


@pytest.mark.parametrize(
    ("damage", "words"), [("config.json", "is no checkpoint"), ("model.safetensors", "copy it again")]
)
def test_a_damaged_checkpoint_is_refused_in_words(checkpoint, damage, words, tmp_path):
    folder = shutil.copytree(checkpoint[0], tmp_path / "cut")
    (folder / SUMS).unlink()
    (folder / damage).write_bytes((folder / damage).read_bytes()[:99])
    with pytest.raises(AdapterError, match=words):
        wide.load_checkpoint(folder)


def test_a_full_memory_is_no_damage(checkpoint, tiny_model_folder, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    for load, name in ((wide.load_checkpoint, checkpoint[0]), (load_pretrained, str(tiny_model_folder))):
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            load(name)
        assert type(caught.value) is RuntimeError


def test_a_pipeline_continues_text(checkpoint):
    folder, _ = checkpoint
    model, tokenizer = wide.load_checkpoint(folder), AutoTokenizer.from_pretrained(folder)
    found = pipeline("text-generation", str(folder))("Every", max_new_tokens=5, do_sample=False)
    ids = tokenizer("Every", return_tensors="pt")
    wanted = tokenizer.decode(model.generate(**ids, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)
    assert found == [{"generated_text": wanted}]


def test_the_harness_scores_a_checkpoint_by_name(checkpoint):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    folder, _ = checkpoint
    asked = [Instance("loglikelihood", {}, ("Every", " token"), 0)]
    found, wanted = (
        huggingface.HFLM(pretrained=model, tokenizer=str(folder), device="cpu").loglikelihood(asked, disable_tqdm=True)
        for model in (str(folder), wide.load_checkpoint(folder))
    )
    assert found == wanted


def test_other_model_types_are_as_before():
    from transformers import CONFIG_MAPPING

    assert "wide_nonsense" not in CONFIG_MAPPING
    assert "nonsense" not in CONFIG_MAPPING
    with pytest.raises(KeyError):
        CONFIG_MAPPING["wide_nonsense"]
