"""Static plans under evaluation: dense beside pruned, constant sparsity, no routers to watch."""

import copy
import json

import pytest
import torch
from plans import kept_plan, skipped_plan
from transformers import AutoModelForCausalLM

from wide.data.documents import Document
from wide.errors import NotAttachedError
from wide.evaluation.evaluate import evaluate
from wide.evaluation.perplexity import token_perplexity
from wide.evaluation.routing_stats import routing_stats
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.materialisation.materialise import materialise
from wide.methods.method import dense_plan
from wide.models.attach import attach, attachment, detach
from wide.models.cost import static_sparsity
from wide.plan import Dense, LayerPlan, Plan

DOCUMENTS = [Document(name=str(i), text=f"The {i}th text says that rivers run to the sea. " * 4) for i in range(3)]


@pytest.fixture
def model(plain_model):
    yield plain_model
    detach(plain_model)


def test_a_static_plan_is_evaluated_beside_the_dense_model(model, tokenizer):
    untouched = token_perplexity(model, DOCUMENTS, tokenizer=tokenizer, window=32, batch_size=2)
    plan, tensors = kept_plan(model)
    attach(model, plan, tensors=tensors)
    report = evaluate(model, DOCUMENTS, window=32, batch_size=2)
    assert report.dense.perplexity == untouched
    assert report.model.perplexity.perplexity > untouched.perplexity
    assert report.sparsity == static_sparsity(model)
    assert json.loads(json.dumps(report.to_json()))["sparsity"]["kv_cache_kept"] == report.sparsity.kv_cache_kept
    assert "pruned for every token: attention" in report.table()
    fused = evaluate(model, DOCUMENTS, window=32, batch_size=2, compare_dense=False, fused=True)
    for same in (fused.masked, fused.model):
        assert same.perplexity.perplexity == pytest.approx(report.model.perplexity.perplexity, rel=1e-4)
    assert (fused.sparsity, fused.flip_rate) == (report.sparsity, 0.0)


def test_tasks_and_routing_statistics_do_without_routers(model, tmp_path):
    (tmp_path / "piqa.validation.jsonl").write_text(
        json.dumps({"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Throw it", "label": 0}) + "\n"
    )
    attach(model, skipped_plan(model, {(1, "ffn"), (2, "attention")}))
    report = evaluate(model, tasks=["piqa"], local_data=tmp_path, window=64)
    assert report.model.tasks.tasks[0].sparsity.mean == static_sparsity(model).mean == pytest.approx(1 / 6)
    stats = routing_stats(model, [document.text for document in DOCUMENTS], sequence_length=16)
    assert stats.halves == ()
    assert stats.sparsity == static_sparsity(model)


def test_a_checkpoint_of_replaced_weights_cannot_be_compared_with_what_it_was(plain_model, tokenizer, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    weights = {name: torch.zeros_like(plain_model.get_parameter(name))}
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    attach(plain_model, Plan((dense,) * plain_model.config.num_hidden_layers), weights=weights)
    save_checkpoint(plain_model, tmp_path)
    detach(plain_model)
    pruned = load_checkpoint(tmp_path, dtype=torch.float32)
    options = {"tokenizer": tokenizer, "window": 32, "max_windows": 1}
    with pytest.raises(NotAttachedError, match="compare_dense=False"):
        evaluate(pruned, DOCUMENTS, **options)
    assert evaluate(pruned, DOCUMENTS, compare_dense=False, **options).sparsity.parameters_removed == 0


@pytest.mark.parametrize("how", ["sliced", "masked"])
def test_a_cut_checkpoint_knows_what_it_was_trained_on(how, plain_model, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(document.text for document in DOCUMENTS))
    model = copy.deepcopy(plain_model)
    plan, tensors = kept_plan(model)
    attach(model, plan, tensors=tensors)
    attachment(model).provenance["method"] = {"method": "ddp", "text": str(text), "split": "train"}
    materialise(model, how).save_pretrained(tmp_path / "cut")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    for each in (model, loaded):
        assert evaluate(each, text, tokenizer=tokenizer, window=32).data == f"{text} (heldout)"
    assert evaluate(plain_model, text, tokenizer=tokenizer, window=32).data == str(text)
    if how == "sliced":
        return
    # A later stage of the same name does not hide the earlier one.
    attach(loaded, dense_plan(len(loaded.model.layers)))
    attachment(loaded).provenance["method"] = {"method": "ddp", "text": "other.txt", "split": "train"}
    report = evaluate(loaded, text, tokenizer=tokenizer, window=32, compare_dense=False)
    assert report.data == f"{text} (heldout)"
