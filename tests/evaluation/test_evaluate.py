import json

import pytest
import torch

from wide.data import corpus, python_docs
from wide.data.documents import Document
from wide.errors import ConfigError, EvaluationError
from wide.evaluation import evaluate as evaluation
from wide.evaluation.evaluate import evaluate
from wide.evaluation.perplexity import token_perplexity
from wide.models.attach import attachment
from wide.models.lora import add_lora, merge_lora
from wide.models.observe import capture_routing
from wide.routing import LayerRouting

DOCUMENTS = [Document(name=str(i), text=f"The {i}th text says that rivers run to the sea. " * 4) for i in range(3)]


def test_dense_figures_are_those_of_the_untouched_model(attached_model, plain_model, tokenizer):
    report = evaluate(attached_model, DOCUMENTS, window=32, batch_size=2)
    untouched = token_perplexity(plain_model, DOCUMENTS, tokenizer=tokenizer, window=32, batch_size=2)
    assert report.dense.perplexity == untouched
    assert report.model.perplexity.perplexity > untouched.perplexity
    # A notebook shows the table, and of routing a line.
    assert repr(report) == report.table()
    with capture_routing(attached_model) as routing:
        attached_model(torch.tensor([[1, 2]]))
    assert "% executed" in repr(routing[0])
    assert len(repr(routing[0])) < 200
    assert "groups, bottleneck, threshold 0" in repr(attached_model)


def test_masks_of_a_layer_are_named_and_have_no_other_names():
    with pytest.raises(TypeError, match="positional"):
        LayerRouting(torch.ones(1, 1, 2))
    with pytest.raises(AttributeError, match="atention"):
        LayerRouting().atention = torch.ones(1, 1, 2)


def test_sparsity_is_measured_on_each_scored_token_once(attached_model, tokenizer):
    text = "\n\n".join(d.text for d in DOCUMENTS)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    report = evaluate(attached_model, DOCUMENTS, window=512, compare_dense=False)
    with torch.no_grad(), capture_routing(attached_model) as routing:
        attached_model(ids, use_cache=False)
    skipped = [float((~layer.ffn).double().mean()) for layer in routing]
    assert report.sparsity.tokens == ids.shape[1]
    assert report.sparsity.ffn == pytest.approx(sum(skipped) / len(skipped))
    assert [f for _, f in report.sparsity.layers] == pytest.approx(skipped)
    overlapping = evaluate(attached_model, DOCUMENTS, window=24, stride=8, batch_size=4, compare_dense=False)
    assert overlapping.sparsity.tokens == ids.shape[1]


def test_a_plain_model_has_no_sparsity_and_nothing_to_compare_with(plain_model):
    report = evaluate(plain_model, DOCUMENTS, window=32)
    assert report.sparsity is None
    assert report.dense is None
    assert "pruned" not in report.table()


def test_held_out_documentation_is_the_default_text(plain_model, monkeypatch):
    # Without the documentation of modules but one, which takes seconds to read.
    monkeypatch.setattr(python_docs, "_sources", lambda root: [("json", root / "json/__init__.py")])
    monkeypatch.setattr(corpus, "python_docs", python_docs.python_docs.__wrapped__)
    report = evaluate(plain_model, window=32, max_windows=1)
    assert report.data == "python-docs (heldout)"
    assert report.model.perplexity.tokens == 31


def test_the_report_is_json_and_a_table_with_both_columns(attached_model, tmp_path):
    (tmp_path / "piqa.validation.jsonl").write_text(
        json.dumps({"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Throw it", "label": 0}) + "\n"
    )
    report = evaluate(attached_model, DOCUMENTS, window=64, tasks=["piqa"], local_data=tmp_path)
    report.save(tmp_path / "out" / "report.json")
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["dense"]["tasks"]["tasks"][0]["sparsity"] is None
    assert saved["model"]["tasks"]["tasks"][0]["sparsity"]["tokens"] > 0
    assert saved["sparsity"]["layers"][0][0] == report.sparsity.layers[0][0]
    dense, pruned = report.dense.tasks.average, report.model.tasks.average
    assert report.retention == (pruned / dense if dense else None)
    table, text = report.table(), report.model.perplexity
    assert f"{text.perplexity:.3f} ± {text.perplexity * text.stderr:.3f}" in table
    assert all(words in table for words in ("pruned", "dense", "piqa (1-item subset), acc_norm", "window 64", "FFN"))


@pytest.mark.parametrize(
    ("positions", "given", "window"), [(64, None, 64), (9000, None, 4096), (9000, 48, 48), (9000, 5000, 5000)]
)
def test_text_and_tasks_have_the_window_that_the_model_takes(positions, given, window, plain_model, monkeypatch):
    seen = {}
    monkeypatch.setattr(plain_model.config, "max_position_embeddings", positions)
    monkeypatch.setattr(evaluation, "token_perplexity", lambda *_, window, **__: seen.update(text=window))
    monkeypatch.setattr(evaluation, "run_harness", lambda *_, max_length, **__: seen.update(tasks=max_length))
    monkeypatch.setattr(evaluation, "check_tasks", lambda *_: None)
    evaluate(plain_model, ["text"], tasks=["piqa"], window=given)
    assert seen == {"text": window, "tasks": window}


@pytest.mark.parametrize(("text", "tasks"), [(["text"], ()), (None, ["piqa"])])
def test_a_window_beyond_the_positions_is_refused(text, tasks, plain_model, monkeypatch):
    # Rotary positions beyond those of training give scores without an error.
    monkeypatch.setattr(evaluation, "check_tasks", lambda *_: None)
    monkeypatch.setattr(evaluation, "run_harness", lambda *_, **__: pytest.fail("tasks were scored"))
    with pytest.raises(ConfigError, match="window 1000000"):
        evaluate(plain_model, text, tasks=tasks, window=1_000_000)


@pytest.mark.parametrize(
    ("trained", "split"), [(None, None), ("train", "heldout"), ("heldout", "heldout"), ("of another text", None)]
)
def test_a_file_is_held_out_where_the_model_was_trained_on_a_part_of_it(trained, split, tmp_path):
    file = tmp_path / "text.txt"
    text = str(tmp_path / "other.txt") if trained == "of another text" else str(file)
    provenance = {} if trained is None else {"prune": {"text": text, "split": trained}}
    assert evaluation.scored_split(file, provenance) == split
    assert evaluation.scored_split("python-docs", provenance) == "heldout"


def test_that_training_text_is_scored_is_said_at_the_line_that_asks_for_it(attached_model, monkeypatch, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(DOCUMENTS[0].text)
    monkeypatch.setitem(attachment(attached_model).provenance, "prune", {"text": str(file), "split": None})
    with pytest.warns(UserWarning, match="trained on all of") as found:
        evaluate(attached_model, file, window=32, compare_dense=False)
    assert [warning.filename for warning in found if "trained on" in str(warning.message)] == [__file__]


def test_a_wrong_task_fails_before_any_work(plain_model):
    with pytest.raises(EvaluationError, match="no task 'squad'"):
        evaluate(plain_model, "no-such-file.txt", tasks=["squad"])


def test_the_fused_path_gives_the_masked_figures_and_says_how_many_decisions_differ(attached_model, monkeypatch):
    masked = evaluate(attached_model, DOCUMENTS, window=32, batch_size=2, compare_dense=False)
    modes = [part is not attached_model.lm_head for part in attached_model.modules()]
    attached_model.train().lm_head.eval()
    report = evaluate(attached_model, DOCUMENTS, window=32, batch_size=2, compare_dense=False, fused=True)
    assert [part.training for part in attached_model.modules()] == modes
    assert report.masked == masked.model
    assert report.model.perplexity.perplexity == pytest.approx(masked.model.perplexity.perplexity, rel=1e-4)
    assert 0.0 <= report.flip_rate < 0.01
    assert report.sparsity.tokens == masked.sparsity.tokens
    assert "decisions that differ" in report.table()
    assert report.to_json()["flip_rate"] == report.flip_rate
    again = evaluate(attached_model, DOCUMENTS, window=32, batch_size=2, compare_dense=False)
    assert again.model == masked.model
    eight = evaluate(attached_model, DOCUMENTS, window=32, compare_dense=False, fused=True, weights="int8")
    assert eight.masked.perplexity.perplexity == pytest.approx(masked.model.perplexity.perplexity, rel=1e-4)
    assert 1e-5 < abs(eight.model.perplexity.perplexity / masked.model.perplexity.perplexity - 1) < 0.05
    # Decisions of the two paths are compared, not those of one with themselves.
    monkeypatch.setattr(evaluation.RoutingTape, "flip_rate", lambda self, other: float(self is not other))
    assert evaluate(attached_model, DOCUMENTS[:1], window=32, compare_dense=False, fused=True).flip_rate == 1.0


@pytest.mark.parametrize("name", ["batch_size", "max_windows", "limit"])
def test_a_count_below_one_fails_before_any_work(name, plain_model):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        evaluate(plain_model, ["text"], **{name: 0})


def test_dense_is_the_base_model_without_lora_unless_it_was_merged(attached_model, plain_model):
    wanted = evaluate(plain_model, DOCUMENTS, window=32).model
    handle = add_lora(attached_model, rank=2)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    parts = [parameter.requires_grad for parameter in attached_model.parameters()]
    report = evaluate(attached_model, DOCUMENTS, window=32)
    assert report.dense == wanted != report.model
    assert parts == [parameter.requires_grad for parameter in attached_model.parameters()]
    assert evaluate(attached_model, DOCUMENTS, window=32) == report
    assert not report.dense_has_lora
    merge_lora(attached_model)
    merged = evaluate(attached_model, DOCUMENTS, window=32)
    assert merged.dense != wanted
    assert merged.dense_has_lora
    assert "dense + LoRA" in merged.table()
    assert "LoRA" not in report.table()
