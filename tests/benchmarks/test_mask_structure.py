"""From an adapter to records: the masks are the model's, the times are the measured ones where they were measured."""

import json

import numpy as np
import pytest
import torch

from benchmarks.mask_structure import main, means, recorded_masks, structure
from benchmarks.mask_tiles import Execution
from benchmarks.mask_times import TIME_MODELS
from wide.config import WideConfig
from wide.data.batches import load_blocks
from wide.models.adapter import save
from wide.models.attach import attach
from wide.models.observe import capture_routing
from wide.models.pretrained import load_pretrained


def test_independent_masks_take_what_was_measured():
    mask = np.random.default_rng(0).random((16384, 112)) < 0.5
    found = {(r["way"], r["groups_per_block"], r["tile"]): r for r in structure(mask, "ffn")}
    for tile, executed in TIME_MODELS["ffn"].products_share.items():
        record = found["neighbours", 8, tile]
        assert record["executed"] == pytest.approx(executed, abs=2e-3)
        assert record["estimated_us"] == pytest.approx(1596 + 1278 + 74 + 158, rel=0.01)
        assert found["natural", 112, tile]["estimated_us"] == pytest.approx(2390 + 74)
        assert 0.9 < found["clustered", 112, tile]["executed"] < found["rare first", 112, tile]["executed"]


@pytest.mark.parametrize(("half", "products", "dense", "order"), [("ffn", 1596, 2390, 74), ("attention", 482, 722, 9)])
def test_times_follow_the_executed_share_up_to_the_dense_product(half, products, dense, order):
    times = TIME_MODELS[half]

    def estimated(executed):
        return times.estimate(Execution(executed=executed, super_blocks=1, sweeps=1.0), groups=24, tile=64)

    assert estimated(0.28) == pytest.approx(products / 2 + order, abs=1)
    assert estimated(0.56) == pytest.approx(products + order, abs=1)
    assert estimated(0.78) == pytest.approx((products + dense) / 2 + order, abs=1)
    assert estimated(1.0) == pytest.approx(dense + order)


def test_sweeps_are_scaled_to_the_measured_number_of_groups():
    found = Execution(executed=0.56, super_blocks=3, sweeps=3.0)
    small, large = (TIME_MODELS["ffn"].estimate(found, groups=groups, tile=64) for groups in (24, 112))
    assert small - large == pytest.approx(1278 / 14 * 3 * (112 / 24 - 1))


def test_means_are_over_layers_and_ratios_of_mean_times():
    masks = [np.random.default_rng(seed).random((256, 8)) < share for seed, share in enumerate((0.2, 0.6))]
    records = [
        {"masks": "trained", "layer": layer, "mostly_on": layer, "mostly_off": 0, **found}
        for layer, mask in enumerate(masks)
        for found in structure(mask, "attention", tiles=(64,))
    ]
    found = means(records)
    assert len(found) == len(records) / 2
    for mean in found:
        same = ("way", "groups_per_block")
        members = [record for record in records if all(record[name] == mean[name] for name in same)]
        assert mean["executed"] == pytest.approx(sum(record["executed"] for record in members) / 2)
        assert mean["mostly_on"] == 0.5
        assert mean["estimated_ratio"] == pytest.approx(722 / mean["estimated_us"])


def routed(folder):
    return attach(load_pretrained(str(folder), device="cpu"), WideConfig(ffn_group_size=16, router_rank=4))


def test_masks_are_those_of_the_model_in_the_order_of_the_text(tiny_model_folder, tiny_tokenizer, prose_folder):
    model = routed(tiny_model_folder)
    blocks = load_blocks(prose_folder, tiny_tokenizer, sequence_length=32)
    found = recorded_masks(model, blocks, 150)
    with torch.no_grad(), capture_routing(model) as routing:
        model(input_ids=blocks.batch(range(5)).input_ids, use_cache=False)
    assert {half for _, half in found} == {"ffn", "attention"}
    for (layer, half), mask in found.items():
        assert mask.shape[0] == 150
        assert (torch.from_numpy(mask) == getattr(routing[layer], half).flatten(0, 1)[:150]).all()


def test_the_command_writes_records(tiny_model_folder, prose_folder, tmp_path, capsys):
    save(routed(tiny_model_folder), tmp_path / "adapter")
    given = ["--model", str(tiny_model_folder), "--adapter", str(tmp_path / "adapter"), "--text", str(prose_folder)]
    given += ["--device", "cpu", "--rows", "256", "--out", str(tmp_path)]
    assert main(given) == 0
    content = json.loads((tmp_path / "mask-structure.json").read_text())
    assert {(record["layer"], record["half"]) for record in content["records"]} == {
        (layer, half) for layer in (0, 1) for half in ("ffn", "attention")
    }
    for record in content["records"]:
        assert record["rows"] == 256
        assert record["ideal"] <= record["executed"] + 1e-9
    assert len(content["means"]) * 2 == len(content["records"])
    assert "shuffled" in capsys.readouterr().out


def test_what_is_no_adapter_is_refused(tiny_model_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--model", str(tiny_model_folder), "--adapter", str(tmp_path), "--out", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err
