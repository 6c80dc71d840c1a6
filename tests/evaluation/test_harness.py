import copy
import json
import math
import os
import random
import re
from pathlib import Path

import pytest
import torch

from wide.errors import EvaluationError
from wide.evaluation.harness import run_harness
from wide.evaluation.tasks import TASKS, ZERO_SHOT_TASKS
from wide.models.observe import capture_routing

PIQA = [
    {"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Throw it far away from you", "label": 0},
    {"goal": "Boil water", "sol1": "Put it into a freezer and wait", "sol2": "Heat it", "label": 1},
    {"goal": "Write", "sol1": "Take a pen", "sol2": "Sleep", "label": 0},
]
ROWS = {
    "arc_easy.test.jsonl": [
        {
            "id": "1",
            "question": "What is wet?",
            "choices": {"text": ["sand", "water"], "label": ["A", "B"]},
            "answerKey": "B",
        }
    ],
    "boolq.validation.jsonl": [{"question": "is it so", "answer": True, "passage": "It is so."}],
    "winogrande_xl.validation.jsonl": [
        {"sentence": "The cup did not fit the box as _ was big.", "option1": "cup", "option2": "box", "answer": "1"}
    ],
    "hellaswag.validation.part.jsonl": [
        {"ind": 1, "activity_label": "Tango", "ctx": "A band plays. They", "endings": ["stop.", "fly."], "label": 0}
    ],
    "test.pages.jsonl": [{"page": " = A page = \n\n Some text of the page , with words . \n"}],
}


@pytest.fixture
def local_data(tmp_path):
    folder = tmp_path / "copies"
    (folder / "below").mkdir(parents=True)
    for name, rows in {"piqa.validation.jsonl": PIQA, **ROWS}.items():
        where = folder / "below" if name.startswith("boolq") else folder
        (where / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_scores_are_the_stock_harness_s(plain_model, tokenizer, local_data, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from wide.evaluation.tasks import write_local_task

    ours = run_harness(plain_model, ["wikitext", "piqa"], tokenizer=tokenizer, local_data=local_data, max_length=32)
    stock_tasks = Path(lm_eval.__file__).parent / "tasks"
    names = [write_local_task(TASKS[n], local_data, stock_tasks, tmp_path) for n in ("wikitext", "piqa")]
    raw = lm_eval.simple_evaluate(
        model=HFLM(pretrained=plain_model, tokenizer=copy.deepcopy(tokenizer), max_length=32, batch_size=1),
        tasks=names,
        num_fewshot=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )["results"]
    wikitext, piqa = ours.tasks
    assert wikitext.value == pytest.approx(raw["wikitext_local"]["word_perplexity,none"], rel=1e-4)
    # The task rewrites the text, e.g. " , " as ", ", and counts words before that.
    page = " = A page =\n\nSome text of the page, with words.\n"
    scored = len(tokenizer(page)["input_ids"])
    words = len(re.split(r"\s+", ROWS["test.pages.jsonl"][0]["page"]))
    assert scored * math.log(wikitext.token_perplexity) == pytest.approx(words * math.log(wikitext.value), rel=1e-4)
    assert piqa.token_perplexity is None
    assert piqa.value == raw["piqa_local"]["acc_norm,none"]
    assert piqa.stderr == raw["piqa_local"]["acc_norm_stderr,none"]
    assert piqa.other_metrics["acc"] == raw["piqa_local"]["acc,none"]


def test_every_process_of_several_is_told_the_scores(plain_model, tokenizer, local_data, monkeypatch):
    told = {"tokenizer": tokenizer, "local_data": local_data, "max_length": 32}
    wanted = run_harness(plain_model, ["piqa"], **told).tasks[0].value
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_harness(plain_model, ["piqa"], **told).tasks[0].value == wanted
    assert os.environ["LOCAL_RANK"] == "1"


def test_perplexities_have_the_error_of_their_documents(plain_model, tokenizer, local_data):
    pages = [
        ROWS["test.pages.jsonl"][0]["page"],
        " = Other = \n\n Much less is said here . \n",
        " = Third = \n\n No . \n",
    ]

    def errors(texts):
        (local_data / "test.pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in texts))
        task = run_harness(plain_model, ["wikitext"], tokenizer=tokenizer, local_data=local_data).tasks[0]
        return task, task.stderr / task.value, task.token_stderr / task.token_perplexity

    task, per_word, per_token = errors(pages)
    assert min(per_word, per_token) > 0
    assert json.loads(json.dumps(task.to_json()))["token_stderr"] == task.token_stderr
    # Four times the documents: half of the error, but for n - 1.
    again, *halves = errors(4 * pages)
    assert again.value == pytest.approx(task.value, rel=1e-4)
    shrink = math.sqrt((12 / 11) / (3 / 2)) / 2
    assert halves == pytest.approx([shrink * per_word, shrink * per_token], rel=1e-3)
    alone = run_harness(plain_model, ["wikitext"], tokenizer=tokenizer, local_data=local_data, limit=1).tasks[0]
    assert (alone.stderr, alone.token_stderr) == (None, None)


def test_other_layouts_are_converted_and_subsets_are_labelled(plain_model, tokenizer, local_data):
    result = run_harness(
        plain_model, ["hellaswag", "boolq", "arc_easy", "winogrande"], tokenizer=tokenizer, local_data=local_data
    )
    assert [task.metric for task in result.tasks] == ["acc_norm", "acc", "acc_norm", "acc"]
    assert result.tasks[0].label == "hellaswag (1-item subset)"
    assert result.average == pytest.approx(sum(task.value for task in result.tasks) / 4)
    assert json.loads(json.dumps(result.to_json()))["tasks"][1]["is_subset"]


def test_skips_are_counted_on_real_tokens_only(attached_model, tokenizer, local_data):
    one, padded = (
        run_harness(attached_model, ["piqa"], tokenizer=tokenizer, local_data=local_data, batch_size=size).tasks[0]
        for size in (1, 6)
    )
    rows = []
    for item in PIQA:
        context = tokenizer(f"Question: {item['goal']}\nAnswer:")["input_ids"]
        rows += [
            tokenizer(f"Question: {item['goal']}\nAnswer: {item[sol]}")["input_ids"][:-1] for sol in ("sol1", "sol2")
        ]
        assert rows[-1][: len(context)] == context
    skipped, total = 0, 0
    for row in rows:
        with torch.no_grad(), capture_routing(attached_model) as routing:
            attached_model(torch.tensor([row]), use_cache=False)
        skipped += sum(int((~layer.ffn).sum()) for layer in routing)
        total += sum(layer.ffn.numel() for layer in routing)
    assert one.sparsity.tokens == padded.sparsity.tokens == sum(map(len, rows))
    assert one.sparsity.ffn == pytest.approx(skipped / total, abs=1e-9)
    # Other matrix shapes round differently, and a near tie may flip.
    assert padded.sparsity.ffn == pytest.approx(one.sparsity.ffn, abs=5e-3)


def test_the_model_the_tokenizer_and_the_random_state_are_left_alone(
    attached_model, tokenizer, local_data, tmp_path, monkeypatch, capfd
):
    import lm_eval.evaluator
    from lm_eval.utils import env

    describe = lm_eval.evaluator.add_env_info
    find_commit = lm_eval.evaluator.get_git_commit_hash
    # No git repository.
    monkeypatch.chdir(tmp_path)
    attached_model.train()
    random.seed(5)
    torch.manual_seed(5)
    expected = random.Random(5).random(), torch.rand(1, generator=torch.Generator().manual_seed(5))
    run_harness(attached_model, ["boolq"], tokenizer=tokenizer, local_data=local_data, limit=1)
    assert attached_model.training
    assert tokenizer.pad_token is None
    assert (random.random(), torch.rand(1)) == expected
    assert lm_eval.evaluator.add_env_info is describe
    assert lm_eval.evaluator.get_git_commit_hash is find_commit
    assert "fatal" not in capfd.readouterr().err
    assert "from_string" not in vars(env)


def test_a_tokenizer_without_bos_and_eos_scores_options(plain_model, tokenizer, local_data):
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = bare.pad_token = None
    (found,) = run_harness(plain_model, ["piqa"], tokenizer=bare, local_data=local_data, max_length=32).tasks
    assert found.items == 3
    with pytest.raises(EvaluationError, match="wikitext begins documents with BOS or EOS"):
        run_harness(plain_model, ["piqa", "wikitext"], tokenizer=bare, local_data=local_data)


def test_what_cannot_run_is_refused(plain_model, tokenizer, local_data):
    def run(task):
        return run_harness(plain_model, [task], tokenizer=tokenizer, local_data=local_data)

    with pytest.raises(EvaluationError, match="no task 'mmlu'; tasks: wikitext, arc_easy"):
        run("mmlu")
    with pytest.raises(EvaluationError, match=r"no file for the task 'openbookqa'; wanted openbookqa.test\*"):
        run("openbookqa")
    (local_data / "piqa.validation.jsonl").write_text('{"goal": "x", "label": 1}\n')
    with pytest.raises(EvaluationError, match=r"line 1.*\['sol1', 'sol2'\] are missing; fields seen"):
        run("piqa")


def test_a_task_whose_data_fails_without_a_word_is_refused_by_the_kind_of_its_error(
    plain_model, tokenizer, monkeypatch
):
    import lm_eval

    known = {"__name__": "datasets.load"}
    exec("def load(**_):\n    raise OSError", known)
    monkeypatch.setattr(lm_eval.evaluator, "simple_evaluate", known["load"])
    with pytest.raises(EvaluationError, match="'piqa' cannot be loaded: OSError; check the network"):
        run_harness(plain_model, ["piqa"], tokenizer=tokenizer, max_length=32)


def test_logits_that_are_no_numbers_are_refused(tokenizer, local_data, attached_model):
    torch.nn.init.constant_(attached_model.model.norm.weight, float("nan"))
    with pytest.raises(EvaluationError, match="not numbers"):
        run_harness(attached_model, ["piqa"], tokenizer=tokenizer, local_data=local_data)


def test_the_average_is_over_the_seven_tasks_of_the_paper():
    assert len(ZERO_SHOT_TASKS) == 7
    assert {name for name in TASKS if TASKS[name].metric == "acc"} == {"boolq", "winogrande"}
