"""Adapters and full checkpoints: round trips, and an error for everything that does not fit."""

import copy
import itertools
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from families import FAMILIES, distinct, make, make_borrowing, tokens
from plans import kept_plan, stream_plan
from safetensors.torch import load_file, save_file
from tiny import RandomSource
from transformers import AutoModelForCausalLM

from wide.config import StageConfig, WideConfig
from wide.errors import AdapterError, ConfigError, NotAttachedError, UnsupportedModelError
from wide.grouping import Grouping
from wide.inference.optimize import optimize
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.materialisation.materialise import materialise
from wide.models.adapter import CONFIG_FILE, ROUTER_FILE, load, save
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.files import SUMS
from wide.models.lora import add_lora, merge_lora, without_lora
from wide.models.pretrained import is_pruned_checkpoint, load_pretrained, load_skeleton
from wide.models.thresholds import set_sparsity
from wide.plan import Dense, LayerPlan, Plan, Routed, Skipped
from wide.training.callback import RouterCallback
from wide.training.stages import prune

CONFIG = WideConfig(ffn_group_size=16, router_rank=4)


def pruned(*, lora=False):
    model = attach(make("llama"), CONFIG)
    state = attachment(model)
    state.provenance = {"stage1": {"target": 0.5}}
    state.thresholds_by_sparsity = [(0.0, float("-inf")), (0.5, 0.01)]
    if lora:
        for parameter in add_lora(model, rank=2).parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.eval()
    return model


@pytest.fixture
def adapter(tmp_path):
    return save(pruned(), tmp_path / "adapter")


@pytest.mark.parametrize("lora", [False, True])
def test_save_and_load_give_the_same_logits(tmp_path, lora):
    model, ids = pruned(lora=lora), tokens()
    folder = save(model, tmp_path / "adapter")
    again = load(make("llama"), folder)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert attachment(again).thresholds_by_sparsity == attachment(model).thresholds_by_sparsity
    assert attachment(again).provenance == {"stage1": {"target": 0.5}}
    assert (folder / "lora").exists() == lora
    assert "library_name: wide" in (folder / "README.md").read_text()


def test_everyone_may_read_what_was_saved(tmp_path):
    folder = save(pruned(lora=True), tmp_path / "adapter")
    assert all(path.stat().st_mode & 0o044 for path in folder.rglob("*"))


def test_saving_again_replaces_the_adapter_and_leaves_nothing_else(tmp_path):
    model = pruned()
    for _ in range(2):
        save(model, tmp_path / "adapter")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_saving_over_something_else_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("data")
    with pytest.raises(AdapterError, match="not an adapter"):
        save(pruned(), tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "data"


def test_a_failed_save_leaves_the_earlier_adapter_whole(tmp_path, monkeypatch):
    folder = save(pruned(), tmp_path / "adapter")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wide.models.adapter.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(pruned(), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_another_base_model_is_refused_by_architecture_and_by_weights(adapter):
    with pytest.raises(AdapterError, match="num_layers is 3, expected 2"):
        load(make("llama", num_hidden_layers=3), adapter)
    sister = make("llama")
    for parameter in sister.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(AdapterError, match="weights differ"):
        load(sister, adapter)
    assert not is_attached(sister)
    assert is_attached(load(sister, adapter, check_weights=False))


@pytest.mark.parametrize("layers", [12, 32, 36])
def test_a_change_of_one_kind_of_matrix_is_noticed_however_many_layers(tmp_path, layers):
    def base(changed=""):
        model = make("llama", num_hidden_layers=layers)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.1 if changed and changed in name else 1.0)
        return model

    model = attach(base(), CONFIG)
    folder = save(model, tmp_path / "adapter")
    for kind in ("q_proj", "v_proj", "up_proj", "down_proj"):
        with pytest.raises(AdapterError, match="weights differ"):
            load(base(kind), folder)
    assert is_attached(load(base(), folder))
    # As earlier versions wrote it.
    if layers > 12:
        sample = attachment(model).base["weight_sample"]
        rewritten(folder, base__weight_sample=sample[: len(sample) // 2])
        assert is_attached(load(base(), folder))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1.1)
    with pytest.raises(NotAttachedError, match="base weights changed"):
        save(model, folder)


def test_lora_of_experts_is_loaded_as_it_was_saved(tmp_path):
    model, ids = make("mixtral", num_local_experts=2, num_experts_per_tok=1), tokens()
    routed = Routed(grouping=Grouping(32, 16), rank=4)
    attach(model, Plan((LayerPlan(attention=routed),) * 2))
    # Its ranks and factors are others for some matrices.
    for parameter in add_lora(model, rank=2, dropout=0.0).parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save(model.eval(), tmp_path / "adapter")
    again = load(make("mixtral", num_local_experts=2, num_experts_per_tok=1), tmp_path / "adapter")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_lora_on_a_matrix_outside_of_the_layers_changes_no_base(tmp_path):
    # The projection of the layers' own inputs has LoRA, and the sample of 26 layers leaves it out.
    base = make_borrowing(num_hidden_layers=26, layer_types=["sliding_attention", "full_attention"] * 13)
    model = attach(base, CONFIG)
    add_lora(model, rank=2)
    save(model, tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_trained_layer_of_many_is_noticed_in_a_full_checkpoint_too(tmp_path, dtype):
    model = make("llama", num_hidden_layers=36)
    for parameter in model.parameters():
        # Among them values that float16 rounds to few digits.
        parameter.data *= torch.rand(parameter.shape) ** 8
    save_checkpoint(attach(model, CONFIG).to(dtype), tmp_path / "full")
    again = load_checkpoint(tmp_path / "full")
    save(again, tmp_path / "adapter")
    with torch.no_grad():
        again.model.layers[35].mlp.down_proj.weight.add_(0.01)
    save_checkpoint(again, tmp_path / "trained")
    for trained in (again, load_checkpoint(tmp_path / "trained")):
        with pytest.raises(NotAttachedError, match="base weights changed"):
            save(trained, tmp_path / "adapter")


@pytest.mark.parametrize("layers", [30, 32, 36])
def test_lora_on_some_of_the_layers_changes_no_base(tmp_path, layers):
    whole, out = LayerPlan(attention=Dense(), ffn=Dense()), LayerPlan(attention=Skipped(), ffn=Skipped())
    for plan in itertools.product((whole, out), repeat=4):
        model = attach(make("llama", num_hidden_layers=layers), Plan((plan * 9)[:layers]))
        if whole in plan:
            add_lora(model, rank=2)
        save(model, tmp_path / "adapter")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_base_in_another_dtype_is_recognised_and_another_is_not(tmp_path, family, saved, loaded):
    folder = save(attach(make(family).to(saved), CONFIG), tmp_path / "adapter")
    assert is_attached(load(make(family).to(loaded), folder))
    # What was upcast is the same, too.
    assert is_attached(load(make(family).to(loaded).float(), folder))
    changed = make(family)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.001)
    with pytest.raises(AdapterError, match="weights differ"):
        load(changed.to(loaded), folder)


def rewritten(folder, file=CONFIG_FILE, **changes):
    """Change keys of a JSON file, dotted, of an adapter whose files are not proved (as earlier versions wrote it)."""
    for name in {CONFIG_FILE, file}:
        content = json.loads((folder / name).read_text())
        content.pop("files", None)
        for key, value in changes.items() if name == file else ():
            place = content
            *path, last = [int(part) if part.isdigit() else part for part in key.split("__")]
            for part in path:
                place = place[part]
            place[last] = value
        (folder / name).write_text(json.dumps(content))
    return folder


def test_adapters_without_hashes_load(adapter):
    assert is_attached(load(make("llama"), rewritten(adapter)))


@pytest.mark.parametrize(
    "name", [CONFIG_FILE, ROUTER_FILE, "lora/adapter_model.safetensors", "lora/adapter_config.json"]
)
def test_one_flipped_bit_is_noticed(tmp_path, name):
    file = save(pruned(lora=True), tmp_path / "adapter") / name
    content = bytearray(file.read_bytes())
    # In JSON a digit stays a digit.
    place = -9 if file.suffix == ".safetensors" else next(i for i in range(900, 9000) if chr(content[i]) in "02468")
    content[place] ^= 1
    file.write_bytes(content)
    model = make("llama")
    with pytest.raises(AdapterError, match=rf"{name}.*(sha256|wanted)"):
        load(model, tmp_path / "adapter")
    assert not is_attached(model)


def test_the_card_may_be_edited_and_other_files_may_lie_there(adapter):
    (adapter / "README.md").write_text("mine")
    (adapter / ".gitattributes").write_text("")
    assert is_attached(load(make("llama"), adapter))


DEEP = json.loads("[" * 500 + "]" * 500)
FFN = "plan__layers__0__ffn__"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": {}}, r"base: missing keys \['ffn_width', "),
        ({"base": [1]}, r"base is \[1\], wanted an object"),
        ({"base__num_layers": "2"}, r"base\.num_layers is '2', wanted a whole number"),
        ({"base__weight_sample": [1.0, "x"]}, r"weight_sample\[1\] is 'x', wanted a finite number"),
        ({"provenance": 3}, r"provenance is 3, wanted an object"),
        ({"provenance__prune": DEEP}, r"provenance\.prune is \[\[.*wanted an object"),
        (
            {"thresholds": [1e30] * 4},
            r"thresholds\[0\] is 1e\+30, wanted a finite number of at least -1e\+06 and at most",
        ),
        ({"thresholds": [float("nan")] * 4}, r"thresholds\[0\] is nan, wanted"),
        ({"thresholds": [0.0] * 3}, "3 thresholds for 4 routers"),
        ({"dial": [[0.5, float("nan")]]}, r"dial\[0\]\[1\] is nan, wanted"),
        ({"dial": [[0.5, 1e30]]}, r"dial\[0\]\[1\] is 1e\+30, wanted"),
        ({"dial": [[0.5, 0.1, 0.2]]}, r"dial\[0\] is \[0.5, 0.1, 0.2\], wanted a list of"),
        ({"dial": [[0.5, 0.1], [0.4, 0.2]]}, "dial does not ascend"),
        ({"has_lora": "no"}, "has_lora is 'no', wanted true or false"),
        ({FFN + "rank": -64}, r"plan\.layers\[0\]\.ffn\.rank is -64, wanted a whole number of at least 1"),
        ({FFN + "rank": 10**20}, r"plan\.layers\[0\]\.ffn\.rank is 100000000000000000000, wanted .* at most 65536"),
        ({FFN + "grouping__width": 10**20}, r"ffn\.grouping: a width of 100000000000000000000 channels"),
        ({FFN + "rank": True}, r"plan\.layers\[0\]\.ffn\.rank is True, wanted a whole number"),
        ({FFN + "kind": "gone"}, r"plan\.layers\[0\]\.ffn is .*wanted an object \(Dense\) or"),
        ({FFN + "grouping__group_size": 0}, r"ffn\.grouping: group size 0"),
        ({FFN + "sise": 1}, r"ffn: missing keys \[\], unknown keys \['sise'\]"),
        ({"plan__layers": []}, "4 thresholds for 0 routers"),
    ],
)
def test_every_value_is_one_that_it_can_have(adapter, changes, words):
    from wide.cli.inspect import describe_adapter

    rewritten(adapter, **changes)
    for read in (lambda: load(make("llama"), adapter), lambda: describe_adapter(adapter)):
        with pytest.raises(AdapterError, match=rf"{CONFIG_FILE}: .*{words}.*; copy it again"):
            read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": -1}, "r is -1, wanted a whole number of at least 1"),
        ({"r": "x"}, "r is 'x', wanted"),
        ({"r": 10**9}, r"r is 1000000000, wanted that of the matrices beside it, \[2\]"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, wanted a finite number"),
        ({"lora_alpha": 1e30}, "lora_alpha is 1e\\+30, wanted"),
        ({"lora_dropout": -0.5}, "lora_dropout is -0.5, wanted"),
        ({"use_rslora": True}, "use_rslora is True, wanted False, as wide writes it"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', wanted True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}, wanted {}"),
        ({"peft_type": DEEP}, "peft_type is .*, wanted 'LORA'"),
    ],
)
def test_every_value_of_lora_is_one_that_it_can_have(tmp_path, changes, words):
    folder = rewritten(save(pruned(lora=True), tmp_path / "adapter"), "lora/adapter_config.json", **changes)
    model = make("llama")
    with pytest.raises(AdapterError, match=rf"adapter_config.json: {words}.*; copy it again"):
        load(model, folder)
    assert not is_attached(model)


def test_json_that_nothing_reads_is_refused(adapter):
    for text in ("[" * 100_000, "1" * 5000, '{"a": ', "3"):
        (adapter / CONFIG_FILE).write_text(text)
        with pytest.raises(AdapterError, match=r"not valid JSON|wanted an object"):
            load(make("llama"), adapter)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model = pruned()
    attachment(model).routers()[0].threshold = 1e30
    with pytest.raises(AdapterError, match=r"thresholds\[0\] is 1e\+30"):
        save(model, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["missing", "surplus", "shape", "nan"])
def test_router_tensors_must_fit_exactly(adapter, damage):
    rewritten(adapter)
    tensors = load_file(adapter / ROUTER_FILE)
    name = next(iter(tensors))
    if damage == "missing":
        del tensors[name]
    elif damage == "surplus":
        tensors["layers.9.ffn.up"] = torch.zeros(2)
    elif damage == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, adapter / ROUTER_FILE)
    model = make("llama")
    with pytest.raises(AdapterError, match=r"router tensor.*copy it again"):
        load(model, adapter)
    assert not is_attached(model)


def test_damaged_files_are_clear_errors(adapter):
    (adapter / ROUTER_FILE).write_bytes((adapter / ROUTER_FILE).read_bytes()[:100])
    with pytest.raises(AdapterError, match="damaged"):
        load(make("llama"), adapter)
    (adapter / ROUTER_FILE).unlink()
    with pytest.raises(AdapterError, match=r"missing.*copy it again, or use .*RUN/stage1/adapter"):
        load(make("llama"), adapter)
    (adapter / CONFIG_FILE).write_text("{")
    with pytest.raises(AdapterError, match=r"not valid JSON.*copy it again, or use .*RUN/stage1/adapter"):
        load(make("llama"), adapter)


def test_a_folder_that_is_missing_is_told_from_one_that_is_no_adapter(tmp_path):
    with pytest.raises(AdapterError, match=r"there is no folder '.*nodir'; check the path"):
        load(make("llama"), tmp_path / "nodir")
    with pytest.raises(AdapterError, match=r"is not an adapter: wide_config.json is missing; name what"):
        load(make("llama"), tmp_path)


def test_unknown_and_missing_configuration_keys_are_refused(adapter):
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"group_sise": 3}))
    with pytest.raises(AdapterError, match="group_sise"):
        load(make("llama"), adapter)
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(AdapterError, match="format version 99"):
        load(make("llama"), adapter)
    layers = [{**layer, "ffn": {**layer["ffn"], "rank": "x", "sise": 1}} for layer in config["plan"]["layers"]]
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"plan": {"layers": layers, "stream": None}}))
    with pytest.raises(AdapterError, match=r"unknown keys .'sise'"):
        load(make("llama"), adapter)


def test_an_incomplete_lora_folder_is_refused(tmp_path):
    folder = save(pruned(lora=True), tmp_path / "adapter")
    (folder / "lora" / "adapter_model.safetensors").unlink()
    model = make("llama")
    with pytest.raises(AdapterError, match="incomplete"):
        load(model, folder)
    assert not is_attached(model)


def test_a_missing_lora_folder_is_not_taken_for_stage_1(tmp_path):
    folder = save(pruned(lora=True), tmp_path / "adapter")
    shutil.rmtree(folder / "lora")
    with pytest.raises(AdapterError, match=r"lora.* is missing"):
        load(make("llama"), folder)


def test_lora_of_another_adapter_is_refused(tmp_path, adapter):
    shutil.copytree(save(pruned(lora=True), tmp_path / "other") / "lora", adapter / "lora")
    with pytest.raises(AdapterError, match="does not belong"):
        load(make("llama"), adapter)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_damaged_lora_files_are_clear_errors(tmp_path, name):
    file = save(pruned(lora=True), tmp_path / "adapter") / "lora" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    model = make("llama")
    with pytest.raises(AdapterError, match=r"damaged.*copy it again"):
        load(model, tmp_path / "adapter")
    assert not is_attached(model)


def test_merged_lora_cannot_be_saved_as_an_adapter(tmp_path):
    model = pruned(lora=True)
    with pytest.raises(NotAttachedError, match="merge"):
        save_checkpoint(model, tmp_path / "full")
    attachment(model).lora.merge()
    with pytest.raises(NotAttachedError, match="save_checkpoint"):
        save(model, tmp_path / "adapter")


@pytest.mark.parametrize("changes", ["many", "few", "none"])
def test_what_a_full_checkpoint_has_merged_is_not_left_out_of_an_adapter(tmp_path, changes):
    model = pruned(lora=changes == "many")
    if changes == "few":
        # So small that the sample of the base, in bfloat16, does not show it.
        attachment(model).provenance["recover"] = {}
    again = load_checkpoint(save_checkpoint(merge_lora(model), tmp_path / "full"))
    if changes == "none":
        save(again, tmp_path / "adapter")
        ids = tokens()
        assert torch.equal(load(make("llama"), tmp_path / "adapter")(ids).logits, model(ids).logits)
        return
    with pytest.raises(NotAttachedError, match="LoRA was merged" if changes == "few" else "base weights changed"):
        save(again, tmp_path / "adapter")
    if changes == "few":
        # Nor is it known where further LoRA lies on it.
        add_lora(again, rank=2)
        with pytest.raises(NotAttachedError, match="LoRA was merged"):
            save(again, tmp_path / "adapter", ignore_base_changes=True)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_full_checkpoints_reload_bit_equal_through_the_auto_classes(tmp_path, family):
    model, ids = attach(make(family), CONFIG), tokens()
    attachment(model).routers()[0].threshold = 0.02
    save_checkpoint(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=model.config._attn_implementation, dtype=torch.float32
    ).eval()
    assert type(again).__name__ == "Wide" + type(model).__name__
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert again.generate(ids, max_new_tokens=3, cache_implementation="static").shape[0] == 2


def test_checkpoint_routers_stay_float32_and_missing_tensors_are_refused(tmp_path):
    model = attach(make("llama").to(torch.bfloat16), CONFIG)
    save_checkpoint(model, tmp_path)
    again = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert attachment(again).routers()[0].down.dtype == torch.float32
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "wide_router" in name)]
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / SUMS).unlink()
    with pytest.raises(AdapterError, match="missing model"):
        load_checkpoint(tmp_path)


def test_no_hub_is_asked_for_a_model_in_a_folder_that_is_here(tmp_path, monkeypatch):
    import transformers

    def asked(name, **_settings):
        raise OSError(f"the hub was asked for {name}")

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", asked)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for read in (load_skeleton, load_pretrained, load_checkpoint):
        with pytest.raises((ConfigError, AdapterError), match=r"no folder '\./models/nope'"):
            read("./models/nope")
    assert not is_pruned_checkpoint("./models/nope")
    monkeypatch.setattr("wide.data.local_names._ask_hub", lambda name, kind: True)
    with pytest.raises(ConfigError, match="the hub was asked for owner/model"):
        load_skeleton("owner/model")


def test_options_of_from_pretrained_reach_it(tmp_path, adapter):
    make("llama").save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    model = load(base, adapter, device="cpu", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="both say where"):
        load(base, adapter, device="cpu", device_map="auto")
    with pytest.raises(ConfigError, match="cannot be loaded with these options"):
        load(base, adapter, device="cpu", attn_implementation="fastest")
    with pytest.raises(ConfigError, match="remote code is not run"):
        load(base, adapter, **{"trust_remote_code": True})


def test_an_attached_model_saves_itself_routers_included(tmp_path):
    model, ids = pruned(), tokens()
    model.save_pretrained(tmp_path / "full", state_dict=model.state_dict(), max_shard_size="20KB")
    assert len(list((tmp_path / "full").glob("*.safetensors"))) > 1
    again = load_checkpoint(tmp_path / "full")
    assert torch.equal(again(ids).logits, model(ids).logits)
    for router in attachment(again).routers():
        router.threshold = 0.02
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(load_checkpoint(tmp_path / "again")(ids).logits, again(ids).logits)
    copied = copy.deepcopy(model)
    detach(copied).save_pretrained(tmp_path / "base")
    assert is_attached(model)
    assert not is_pruned_checkpoint(str(tmp_path / "base"))


def test_lora_that_is_not_merged_is_not_left_out_of_a_checkpoint(tmp_path):
    with pytest.raises(NotAttachedError, match=r"wide\.merge_lora"):
        pruned(lora=True).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_lora_is_not_merged_under_another_adapter_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    inner, ids = pruned(lora=True), tokens()
    before = inner(ids).logits
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    # As nobody names it.
    model = peft.get_peft_model(inner, settings).eval()
    with pytest.raises(NotAttachedError, match=r"\['default'\] beside this LoRA"):
        merge_lora(inner)
    with pytest.raises(NotAttachedError, match=r"\['default'\] would be left out"):
        save(inner, tmp_path)
    model.delete_adapter("default")
    torch.testing.assert_close(merge_lora(inner)(ids).logits, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [False, True])
def test_a_base_that_was_trained_is_not_left_out_of_an_adapter(tmp_path, lora):
    model = pruned(lora=lora)
    save(model.to(torch.bfloat16), tmp_path / "converted")
    with torch.no_grad():
        attachment(model).specs[0].attention.output.weight.add_(0.01)
    with pytest.raises(NotAttachedError, match=r"changed since wide\.attach.*save_checkpoint"):
        save(model, tmp_path / "adapter")
    save(model, tmp_path / "adapter", ignore_base_changes=True)


def wrapped(model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings).eval()


def test_a_checkpoint_names_the_lora_that_is_in_its_way(tmp_path):
    own = pruned()
    add_lora(own)
    with pytest.raises(NotAttachedError, match=r"merge LoRA first: wide\.merge_lora\(model\)$"):
        save_checkpoint(own, tmp_path / "full")
    with pytest.raises(NotAttachedError, match=r"\['default'\]: model\.merge_and_unload\(\)$"):
        save_checkpoint(wrapped(pruned()), tmp_path / "full")


def test_an_adapter_of_peft_is_kept_or_refused_by_name(tmp_path):
    foreign = wrapped(make("llama"))
    for model in (foreign, foreign.get_base_model()):
        with pytest.raises(UnsupportedModelError, match=r"PEFT has the adapter \['default'\].*merge_and_unload"):
            attach(model, CONFIG)
    inner = pruned()
    model, ids = wrapped(inner), tokens()
    expected = model(ids).logits
    for each in (model, inner):
        for refused in (
            partial(save, path=tmp_path / "a"),
            partial(save_checkpoint, path=tmp_path),
            optimize,
            add_lora,
        ):
            with pytest.raises(NotAttachedError, match="merge"):
                refused(each)
    assert not list(tmp_path.iterdir())
    save(model, tmp_path / "adapter", ignore_base_changes=True)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "full")
    torch.testing.assert_close(load_checkpoint(tmp_path / "full")(ids).logits, expected)
    assert not is_attached(detach(wrapped(merged)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("places", [("model.layers.1",), ("model.embed_tokens", "lm_head", "model.layers.0")])
def test_routers_of_offloaded_layers_lie_where_they_compute(tmp_path, places, tied):
    model, ids = attach(make("llama", tie_word_embeddings=tied), CONFIG), tokens()
    save(model, tmp_path / "adapter")
    make("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    other = make("llama", tie_word_embeddings=tied)
    for matrix in (p for p in other.parameters() if p.dim() == 2):
        matrix.data *= 2
    other.save_pretrained(tmp_path / "other")
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    options = {"device_map": {name: "disk" if name in places else "cpu" for name in names}, "dtype": torch.float32}
    options["offload_folder"] = tmp_path / "disk"
    again = load(tmp_path / "base", tmp_path / "adapter", **options)
    assert any(parameter.is_meta for parameter in again.parameters())
    assert torch.equal(again(ids).logits, model(ids).logits)
    save(again, tmp_path / "again")
    assert torch.equal(load(tmp_path / "base", tmp_path / "again", device="cpu")(ids).logits, model(ids).logits)
    for refused in (partial(save_checkpoint, path=tmp_path / "full"), add_lora):
        with pytest.raises(UnsupportedModelError, match="accelerate offloads some"):
            refused(again)
    detach(again)
    for start in ({"ffn_grouping": "clustered"}, {"router_start": "fitted", "router_bias": True}):
        with pytest.raises(UnsupportedModelError, match="clustering channels needs the weights in memory"):
            prune(again, RandomSource(), config=replace(CONFIG, **start), stage=StageConfig(steps=1, batch_size=2))
    weight = {"model.layers.1.mlp.down_proj.weight": torch.zeros(32, 64)}
    with pytest.raises(UnsupportedModelError, match="accelerate offloads some"):
        attach(again, CONFIG, weights=weight)
    with pytest.raises(AdapterError, match="weights differ"):
        load(tmp_path / "other", tmp_path / "adapter", **options)


@pytest.mark.parametrize("kind", ["routed", "kept", "stream"])
def test_an_offloaded_checkpoint_runs_and_cannot_be_trained_or_saved(tmp_path, kind):
    model, ids = make("llama"), tokens()
    plan, tensors = {"routed": lambda _: (CONFIG, {}), "kept": kept_plan, "stream": partial(stream_plan, kept=24)}[
        kind
    ](model)
    save_checkpoint(attach(model, plan, tensors=tensors), tmp_path / "full")
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    places = {name: "disk" if name == "model.layers.1" else "cpu" for name in names}
    again = load_checkpoint(tmp_path / "full", device_map=places, offload_folder=tmp_path / "disk")
    assert any(parameter.is_meta for parameter in again.parameters())
    assert torch.equal(again(ids).logits, model(ids).logits)
    refused = [partial(save, path=tmp_path / "adapter"), partial(save_checkpoint, path=tmp_path / "again")]
    if kind == "routed":
        refused += [partial(prune, data=RandomSource(), stage=StageConfig(steps=1, batch_size=2))]
        refused += [partial(RouterCallback(0.5).begin, steps=1)]
        attachment(again).thresholds_by_sparsity = [(0.2, -1.0), (0.8, 1.0)]
        set_sparsity(again, 0.8)
    else:
        refused += [materialise]
    for function in refused:
        with pytest.raises(UnsupportedModelError, match="accelerate offloads some"):
            function(again)
    assert not (tmp_path / "adapter").exists()
    if kind == "routed":
        # What is refused changes nothing.
        assert {router.threshold for router in attachment(again).routers()} == {1.0}
        assert attachment(again).thresholds_by_sparsity
        assert attachment(again).loop is None


def test_lora_is_switched_off_without_asking_modules_for_what_they_lack(monkeypatch):
    model = pruned(lora=True)
    asked, ask = [], torch.nn.Module.__getattr__
    monkeypatch.setattr(torch.nn.Module, "__getattr__", lambda module, name: asked.append(name) or ask(module, name))
    with without_lora(model):
        assert not asked
        off = [module for module in model.modules() if vars(module).get("_disable_adapters")]
    assert len(off) == 7 * len(attachment(model).specs)
    assert not any(vars(module).get("_disable_adapters") for module in model.modules())


def test_without_lora_the_base_is_trainable_as_before(tmp_path):
    save(pruned(lora=True), tmp_path)
    base = make("llama")
    base.lm_head.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    model = load(base, tmp_path)
    assert not base.model.norm.weight.requires_grad
    assert {name: parameter.requires_grad for name, parameter in detach(model).named_parameters()} == before
    merge_lora(load(base, tmp_path))
    assert base.model.norm.weight.requires_grad


def test_a_dense_checkpoint_is_not_taken_for_a_pruned_one(tmp_path):
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="not a pruned one"):
        load_checkpoint(tmp_path)
