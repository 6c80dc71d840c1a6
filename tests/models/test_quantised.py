"""Routers on an int8 or 4-bit base: trained, generated masked, saved and loaded; fused operators refuse it by name."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import wide
from wide.cli.inspect import describe_model
from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBatch
from wide.errors import AdapterError, ConfigError, UnsupportedModelError
from wide.models import pretrained
from wide.models.attach import attachment
from wide.models.pretrained import load_pretrained
from wide.runs import sources
from wide.runs.settings import ModelOptions
from wide.training.modes import training_mode
from wide.training.objective import Objective
from wide.training.parallel import DataParallel

CONFIG = wide.WideConfig(ffn_group_size=16, router_rank=4)
FP8 = torch.float8_e4m3fn
KINDS = ("bitsandbytes 4 bit", "bitsandbytes 8 bit", "torchao 8 bit", "torchao 4 bit")


def quantisation(kind):
    if kind.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        if "8" in kind:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    library = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    if "8" in kind:
        return TorchAoConfig(library.Int8WeightOnlyConfig())
    return TorchAoConfig(library.IntxWeightOnlyConfig(torch.int4, library.PerGroup(32)))


def dense(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=2, initializer_range=0.2, **sizes)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    dense().save_pretrained(folder)
    return str(folder)


def base(folder, kind):
    quantised = {"quantization_config": quantisation(kind), "device_map": {"": "cpu"}}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **quantised).eval()


def batch(seed=0):
    ids = torch.randint(0, 258, (4, 16), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(input_ids=ids, labels=ids, valid=torch.ones_like(ids, dtype=torch.bool))


class Source:
    sequence_length = 16

    def batch_at(self, step, *, batch_size, rank=0, world=1):
        return batch(step % 3)


def logits(model):
    with torch.no_grad():
        return model(batch().input_ids, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_routers_are_trained_saved_and_generate_on_a_quantised_base(folder, kind, tmp_path):
    model = load_pretrained(folder, dtype="float32", device="cpu", quantization_config=quantisation(kind))
    plain = logits(model)
    stage = StageConfig(steps=12, batch_size=4, sequence_length=16, learning_rate=3e-2)
    wide.prune(model, Source(), sparsity=0.4, config=CONFIG, stage=stage)
    assert attachment(model).provenance["prune"]["inference"]["sparsity"] == pytest.approx(0.4, abs=0.1)
    ids = model.generate(batch().input_ids[:1], max_new_tokens=4, do_sample=False)
    assert ids.shape == (1, 20)
    again = wide.load(
        folder, wide.save(model, tmp_path / "adapter"), quantization_config=quantisation(kind), device="cpu"
    )
    wanted = logits(model)
    assert torch.allclose(logits(again), wanted, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"a projection is a Linear\w* with a \w+ weight, not a plain"):
        wide.optimize(again)
    whole = wide.load_checkpoint(wide.save_checkpoint(model, tmp_path / "whole"), device_map={"": "cpu"})
    assert attachment(whole).routers()[0].down.dtype == torch.float32
    assert torch.allclose(logits(whole), wanted, atol=1e-5)
    assert torch.allclose(logits(wide.detach(model)), plain, atol=1e-5)


def stored(folder, place, **quantisation):
    """Write a checkpoint again in int8 or FP8, and return its tensors."""
    shutil.copytree(folder, place)
    bits, tensors = quantisation.pop("bits"), {}
    for name, tensor in load_file(place / "model.safetensors").items():
        tensors[name] = tensor.to(torch.bfloat16)
        if name.endswith("proj.weight"):
            blocks = tensor.unflatten(0, (-1, bits.rows)).unflatten(2, (-1, bits.columns or tensor.shape[1]))
            scale = blocks.abs().amax((1, 3), keepdim=True).to(torch.bfloat16).float() / bits.largest
            values = blocks / scale
            values = values.clamp(-448, 448) if bits.dtype == FP8 else values.round().clamp(-128, 127)
            tensors[name] = values.to(bits.dtype).view_as(tensor)
            tensors[name + bits.suffix] = scale[:, 0, :, 0].to(torch.bfloat16)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((place / "config.json").read_text()) | {"dtype": "bfloat16", "quantization_config": quantisation}
    (place / "config.json").write_text(json.dumps(facts))
    return tensors


def bits(dtype, largest, rows, columns, suffix):
    return SimpleNamespace(dtype=dtype, largest=largest, rows=rows, columns=columns, suffix=suffix)


def compressed(kind):
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    facts = {"format": f"{kind}-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **facts}


STORED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32], "bits": bits(FP8, 448, 32, 32, "_scale_inv")},
    "compressed-tensors fp8": {**compressed("float"), "bits": bits(FP8, 448, 1, None, "_scale")},
    # 127.5 as the library has it, so that the largest of a channel is -128 or 127.
    "compressed-tensors int8": {**compressed("int"), "bits": bits(torch.int8, 127.5, 1, None, "_scale")},
}


@pytest.mark.parametrize("kind", STORED)
def test_eight_bit_checkpoints_are_dequantised_and_int8_keeps_their_bytes(folder, kind, tmp_path):
    if kind != "fp8":
        pytest.importorskip("compressed_tensors")
    tensors = stored(folder, tmp_path / "base", **STORED[kind])
    adapter = wide.save(wide.attach(dense(), CONFIG), tmp_path / "adapter")
    model = wide.load(str(tmp_path / "base"), adapter, dtype="bfloat16", device="cpu")
    wanted, found = logits(dense()), logits(wide.detach(model)).float()
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.2
    stage = StageConfig(steps=2, batch_size=4, sequence_length=16, learning_rate=3e-2)
    wide.prune(model, Source(), sparsity=0.4, config=CONFIG, stage=stage)
    whole = wide.load_checkpoint(wide.save_checkpoint(model, tmp_path / "whole"))
    assert torch.equal(logits(whole), logits(model))
    wide.optimize(model, weights="int8", backend="torch")
    down = attachment(model).engine.decoder.layers[1].ffn.down
    if kind.endswith("int8"):
        assert torch.equal(down.weight, tensors["model.layers.1.mlp.down_proj.weight"])
    assert logits(model).isfinite().all()
    assert f"quantised by {kind.split()[0]}; they are dequantised" in describe_model(str(tmp_path / "base"))


@pytest.mark.parametrize(
    ("method", "match"),
    [("aqlm", "AQLM.* It is quantised by aqlm: install what"), ("x", "by 'x', which transformers does not know")],
)
def test_methods_that_cannot_be_read_are_named(folder, method, match, tmp_path):
    place = Path(shutil.copytree(folder, tmp_path / "base"))
    facts = json.loads((place / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (place / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=match):
        load_pretrained(str(place))
    with pytest.raises(ConfigError, match=match) if method == "x" else nullcontext():
        assert f"quantised by {method}; they stay so: routers can be trained" in describe_model(str(place))


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_recognised_by_what_is_not_quantised(folder, kind, tmp_path):
    adapter = wide.save(wide.attach(base(folder, kind), CONFIG), tmp_path / "adapter")
    wide.load(dense(), adapter)
    with pytest.raises(AdapterError, match="weights differ"):
        wide.load(dense(seed=1), adapter)
    dense(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterError, match="weights differ"):
        wide.load(base(tmp_path / "other", kind), adapter)
    on_dense = wide.save(wide.attach(dense(), CONFIG), tmp_path / "on-dense")
    wide.load(base(folder, kind), on_dense)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_in_evaluation_costs_no_gradient_afterwards(folder, kind):
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = wide.attach(base(folder, kind), CONFIG)
        if evaluates:
            logits(model)
        with training_mode(model, routers=True, gradient_checkpointing=False):
            torch.manual_seed(1)
            Objective(model, ObjectiveConfig(weight=0.0))(batch())[0].backward()
        found.append(torch.cat([p.grad.flatten() for r in attachment(model).routers() for p in r.parameters()]))
    assert found[0].norm() > 0
    assert torch.allclose(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_weights_that_were_packed_for_a_cpu_are_refused(folder):
    model = base(folder, KINDS[0])
    logits(model)
    if not getattr(model.model.layers[0].mlp.up_proj.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has none of the instructions that bitsandbytes packs for")
    with pytest.raises(UnsupportedModelError, match="attach before its first forward"):
        wide.attach(model, CONFIG)


@pytest.mark.parametrize("kind", ["as it is", "quantised", "pruned", "pruned and quantised"])
def test_a_quantised_checkpoint_is_loaded_onto_the_device_and_others_are_moved(folder, kind, tmp_path, monkeypatch):
    place = folder
    if "pruned" in kind:
        place = str(wide.save_checkpoint(wide.attach(dense(), CONFIG), tmp_path / "whole"))
    elif "quantised" in kind:
        place = str(shutil.copytree(folder, tmp_path / "base"))
    if "quantised" in kind:
        path = Path(place, "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))
    seen = []

    def load(name, **options):
        seen.append(options.get("device_map"))
        fits = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        return (dense(), fits) if options.get("output_loading_info") else dense()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    for module in (pretrained, sources):
        monkeypatch.setattr(module, "choose_device", lambda device: torch.device("cuda:1"))
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, where: seen.append(where) or self)
    sources.load_base(ModelOptions(model=place), pruned_too=True)
    gpu = torch.device("cuda:1")
    assert seen == ([{"": "cuda:1"}] if "quantised" in kind else [None, gpu])


def test_quantised_weights_are_not_shared_without_being_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1))
    monkeypatch.setattr(sources.DataParallel, "from_environment", lambda _device: DataParallel())
    quantised = Path(shutil.copytree(folder, tmp_path / "base"))
    facts = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(facts | {"quantization_config": {"quant_method": "x"}}))
    shared = [
        sources._is_to_be_sharded(ModelOptions(model=str(place)), "auto", (), False, torch.device("cuda"))
        for place in (folder, quantised)
    ]
    assert shared == [True, False]
