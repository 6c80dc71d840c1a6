"""The commands on a tiny model: what they write, what they say, and that bad input leaves no trace."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

import wide
from wide.cli.main import main
from wide.config import ObjectiveConfig, StageConfig
from wide.data.corpus import load_documents
from wide.data.tokenizer import load_tokenizer
from wide.errors import AdapterError
from wide.models.attach import attachment
from wide.plan import Dense, LayerPlan, Plan, Skipped
from wide.records import RecordFile, read_records
from wide.report.selection import Selection
from wide.runs import measuring, sources
from wide.runs.materials import Materials
from wide.runs.settings import AdapterOptions, EvalOptions, RunOptions

SHORT = [
    "--dtype=float32",
    "--device=cpu",
    "--ffn_group_size=16",
    "--router_rank=4",
    "--train.steps=3",
    "--train.batch_size=2",
    "--train.sequence_length=32",
    "--eval.tokens=128",
    "--eval.window=32",
]
LORA = ["--recover.steps=2", "--recover.batch_size=2", "--recover.sequence_length=32"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model_folder, prose_folder, drawn_at_once):
    """Return the folder of a finished run of both stages."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    code = main(
        [
            "prune",
            *("--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(folder)),
            *SHORT,
            *LORA,
            *("--sample.prompt=The quick", "--sample.tokens=4"),
        ]
    )
    assert code == 0
    return folder


def test_a_dry_run_says_what_it_costs_and_writes_nothing(finished, tiny_model_folder, prose_folder, tmp_path, capsys):
    named = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(tmp_path / "run")]
    assert main(["prune", *named, *SHORT, *LORA, "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "groups   layers 0-1: attention 2 groups of 16 channels, " in text
    assert "stage 1: 3 steps of 2 x 32 tokens = 192, the text " in text
    assert text.count("memory   calculated: ") == text.count("time     measured on cpu, 1 threads: ") == 2
    # The time of everything, not of training alone.
    whole = text.partition("in all")[1] + text.partition("in all")[2]
    assert whole.startswith("in all   about 0:00:")
    assert yaml.safe_load(text.partition("settings\n")[2].partition("\n\n")[0])["train"]["steps"] == 3
    adapter = ["--adapter", str(finished), "--recover.steps=2", *SHORT[:2], "--recover.batch_size=2"]
    assert main(["recover", *named, *adapter, "--recover.sequence_length=32", "--eval.window=32", "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "stage 2: 2 steps" in text
    assert text.endswith("nothing was written\n")
    assert not list(tmp_path.iterdir())
    assert main(["prune", *named, *SHORT, "--ffn_grouping=clustered", "--start_tokens=64", "--dry_run"]) == 0
    assert re.search(r"in all   about .*: clustering 0:00:\d\d, training ", capsys.readouterr().out)
    # What a run refuses, a dry run refuses, too.
    assert main(["prune", *named, *SHORT, "--ffn_group_size=15", "--dry_run"]) == 1
    assert "ffn_group_size 15 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["a dry run on a GPU", "a dry run on a CPU", "a run on a CPU"])
def test_what_does_not_fit_is_refused_before_loading(how, tiny_model_folder, prose_folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "GPU" in how)
    monkeypatch.setattr("wide.training.memory.memory_of", lambda _device: (1 << 16, "the GPU has 0.0"))
    monkeypatch.setattr("wide.runs.run.Materials.model", property(lambda _self: pytest.fail("loaded")))
    named = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", "unused"]
    short = [flag for flag in SHORT if "device" not in flag]
    assert main(["prune", *named, *short, *(["--dry_run"] if "dry" in how else [])]) == 1
    assert "stage 1: this stage needs about" in capsys.readouterr().err


def test_prune_leaves_adapter_records_report_and_configuration(finished):
    for name in ("adapter/wide_config.json", "adapter/lora", "records.jsonl", "report.html", "config.yaml"):
        assert (finished / name).exists(), name


def test_the_report_of_a_run_can_be_drawn_again(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("report*", "figures"))
    assert main(["report", str(run)]) == 0
    assert len(list((run / "figures").glob("*.svg"))) == len(list((finished / "figures").glob("*.svg"))) > 3


def test_prune_measures_every_model_of_the_run(finished):
    run = Selection(*read_records(finished / "records.jsonl"))
    assert run.subjects() == ["dense", "stage 1", "stage 1+2"]
    for subject in run.subjects()[1:]:
        assert run.number(subject, "token_perplexity") > 1
        assert 0 <= run.number(subject, "sparsity.mean") <= 1
        assert len(run.by_layer(subject, "sparsity.ffn")) == 2
    assert len(run.by_step("stage 1", "training.lm_loss")) == 3
    assert run.text("stage 1+2", "sample").startswith("The quick")
    assert run.number("dense", "token_perplexity") != run.number("stage 1", "token_perplexity")


def test_the_dense_model_with_the_same_lora_stands_beside_the_pruned_one(
    finished, tiny_model_folder, prose_folder, tmp_path, capsys
):
    given = ["prune", "--model", str(tiny_model_folder), "--data", str(prose_folder), *SHORT, *LORA, "--report=false"]
    given += ["--output", str(tmp_path / "run"), "--recover.dense_baseline=true"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "dense, with the same LoRA" in said
    assert "x dense + LoRA" in said
    run, without = (Selection(*read_records(folder / "records.jsonl")) for folder in (tmp_path / "run", finished))
    assert run.subjects() == ["dense", "dense + LoRA", "stage 1", "stage 1+2"]
    assert run.number("dense + LoRA", "token_perplexity") != run.number("dense", "token_perplexity")
    # What is pruned does not notice it.
    for subject in ("dense", "stage 1", "stage 1+2"):
        assert run.number(subject, "token_perplexity") == without.number(subject, "token_perplexity")
    assert main([*given, "--resume"]) == 0
    assert "dense + LoRA: training" not in capsys.readouterr().out


def test_saved_configuration_can_be_fed_back(finished, tmp_path, capsys):
    settings = yaml.safe_load((finished / "config.yaml").read_text())
    assert settings["train"]["steps"] == 3
    assert main(["prune", "--config", str(finished / "config.yaml"), "--train.steps", "many"]) == 2
    capsys.readouterr()
    # The folder holds a run, so the very same command is refused and changes nothing.
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert main(["prune", "--config", str(finished / "config.yaml")]) == 1
    assert "--resume" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_resume_with_other_settings_is_refused(finished, capsys):
    given = ["prune", "--config", str(finished / "config.yaml"), "--resume", "--train.steps", "5"]
    assert main(given) == 1
    assert "train.steps 3 -> 5" in capsys.readouterr().err


def test_resume_of_a_finished_run_measures_nothing_again(finished):
    before = read_records(finished / "records.jsonl")[0]
    assert main(["prune", "--config", str(finished / "config.yaml"), "--resume"]) == 0
    after = read_records(finished / "records.jsonl")[0]
    measured = [record for record in after[len(before) :] if record.metric == "token_perplexity"]
    assert measured == []


def test_a_run_begun_before_an_option_existed_goes_on(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    lines = (run / "config.yaml").read_text().replace(str(finished), str(run)).splitlines(keepends=True)
    (run / "config.yaml").write_text("".join(line for line in lines if "adam_beta2" not in line))
    assert main(["prune", "--config", str(run / "config.yaml"), "--resume"]) == 0
    assert main(["prune", "--config", str(run / "config.yaml"), "--resume", "--train.adam_beta2", "0.9"]) == 1
    assert "train.adam_beta2 0.999 -> 0.9" in capsys.readouterr().err


def test_interrupted_run_goes_on_with_resume(tiny_model_folder, prose_folder, tmp_path, monkeypatch, capsys):
    from wide.runs import run as pipeline

    train, given = pipeline.prune, ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--report=false"]
    given += ["--output", str(tmp_path / "run"), *SHORT]

    def interrupt(*args, **kwargs):
        train(*args, **kwargs)
        raise KeyboardInterrupt("stopped after step 3 of 3")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "prune", interrupt)
        assert main(["prune", *given]) == 130
    assert "stopped after step 3 of 3; what was reached is kept in" in capsys.readouterr().err
    assert not (tmp_path / "run" / "adapter").exists()
    assert main(["prune", *given, "--resume"]) == 0
    assert (tmp_path / "run" / "adapter" / "wide_config.json").exists()


@pytest.mark.parametrize("method", ["skipgpt", "slicegpt"])
def test_a_run_that_died_before_its_last_records_ends_as_if_it_had_not(
    method, tiny_model_folder, prose_folder, tmp_path, monkeypatch
):
    pytest.importorskip("peft")
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--report=false", f"--method={method}"]
    given += [*LORA, "--recover.learning_rate=0.01", *SHORT[:2], *SHORT[-3:]]
    own = SHORT[4:6] if method == "skipgpt" else ["--slicegpt.num_windows=2", "--slicegpt.window_length=32"]
    run, whole, plain = tmp_path / "run", tmp_path / "whole", RecordFile.append
    assert main(["prune", *given, *own, "--output", str(whole)]) == 0

    def append(self, records):
        found = list(records)
        if any(record.subject == "pruned + LoRA" for record in found) and self.path.name == "records.jsonl":
            raise GeneratorExit
        plain(self, found)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", append)
        with pytest.raises(GeneratorExit):
            main(["prune", *given, *own, "--output", str(run)])
    # LoRA that lies in the adapter by now is not trained a second time.
    shutil.rmtree(run / "stage2")
    assert main(["prune", *given, *own, "--output", str(run), "--resume"]) == 0
    found, wanted = (load_file(each / "adapter/lora/adapter_model.safetensors") for each in (run, whole))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    read = [json.loads((each / "adapter" / "wide_config.json").read_text())["provenance"] for each in (run, whole)]
    assert read[0].keys() == read[1].keys()
    assert read[0]["method"]["tokens_backward"] == read[1]["method"]["tokens_backward"]
    counts = [len(read_records(each / "records.jsonl")[0]) for each in (run, whole)]
    assert counts[0] == counts[1]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "wide.cli.main"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_two_processes_write_one_run(tiny_model_folder, prose_folder, tmp_path, parallel):
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(tmp_path / "run")]
    command = [*TORCHRUN, "prune", "--report=false", *given, *SHORT, f"--parallel={parallel}", "--sample.prompt=A"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("finished in") == 1
    assert f"parallel {parallel} over 2 processes" in result.stdout
    run = Selection(*read_records(tmp_path / "run" / "records.jsonl"))
    assert run.subjects() == ["dense", "stage 1"]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_with_one_message_and_one_process_goes_on(
    tiny_model_folder, prose_folder, tmp_path
):
    run = tmp_path / "run"
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(run), "--resume"]
    long = [*SHORT, "--train.steps=400", "--train.checkpoint_every=20", "--eval.tokens=0"]
    command = [*TORCHRUN, "prune", "--report=false", *given, *long, "--parallel=fsdp"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as torchrun:
        until = time.monotonic() + 120
        while not list(run.glob("stage1/checkpoints/step-*")) and time.monotonic() < until:
            time.sleep(0.1)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, said = torchrun.communicate(timeout=300)
    assert torchrun.returncode != 0
    assert sum(line.startswith("wide:") for line in said.splitlines()) == 1
    assert main(["prune", "--report=false", *given, *long]) == 0
    assert (run / "adapter" / "wide_config.json").is_file()


def test_a_run_stands_for_its_adapter_in_python_too(finished, tiny_model_folder):
    plans = [wide.load(str(tiny_model_folder), path, device="cpu") for path in (finished, str(finished / "adapter"))]
    assert len({str(attachment(model).plan) for model in plans}) == 1
    assert wide.load(finished, device="cpu") is not None
    with pytest.raises(AdapterError, match=f"{finished.parent} is not an adapter.*or a run"):
        wide.load(str(tiny_model_folder), finished.parent)


def test_recover_continues_from_the_adapter(finished, tiny_model_folder, prose_folder, tmp_path):
    stage1 = tmp_path / "one"
    everyday = ["--model", str(tiny_model_folder), "--data", str(prose_folder)]
    assert main(["prune", *everyday, "--output", str(stage1), "--report=false", *SHORT]) == 0
    code = main(
        [
            *("recover", *everyday, "--adapter", str(stage1), "--output", str(tmp_path / "two"), "--report=false"),
            *LORA,
            *("--eval.tokens=128", "--eval.window=32", "--dtype=float32", "--device=cpu"),
        ]
    )
    assert code == 0
    assert (tmp_path / "two" / "adapter" / "lora").is_dir()
    run = Selection(*read_records(tmp_path / "two" / "records.jsonl"))
    assert run.subjects() == ["dense", "stage 1", "stage 1+2"]


def objective_of_stage_2(folder):
    return json.loads((folder / "adapter" / "wide_config.json").read_text())["provenance"]["recover"]["objective"]


def test_the_dense_model_learns_its_lora_from_what_the_pruned_one_does(tiny_model_folder, prose_folder, tmp_path):
    given = ["prune", "--model", str(tiny_model_folder), "--data", str(prose_folder), *SHORT, *LORA, "--report=false"]
    given += ["--objective.distillation=0.5", "--recover.dense_baseline=true", "--output", str(tmp_path / "run")]
    assert main(given) == 0
    for name in ("dense", "stage2"):
        assert objective_of_stage_2(tmp_path / "run" / name)["distillation"] == 0.5


@pytest.fixture
def recover_static(tiny_model_folder, prose_folder, tmp_path):
    """Return a function that recovers, through the command, an adapter that skips two half-layers for every token."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()
    first, second = LayerPlan(attention=Skipped(), ffn=Dense()), LayerPlan(attention=Dense(), ffn=Skipped())
    wide.save(wide.attach(model, Plan((first, second))), tmp_path / "static")
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--adapter", str(tmp_path / "static")]
    given += [*LORA, "--report=false", "--eval.tokens=128", "--eval.window=32", "--dtype=float32", "--device=cpu"]
    return lambda output, *more: main(["recover", *given, "--output", str(tmp_path / output), *more])


def test_recover_trains_lora_alone_where_there_are_no_routers(recover_static, tmp_path):
    assert recover_static("run", "--recover.distillation=0.5") == 0
    assert (tmp_path / "run" / "adapter" / "lora").is_dir()
    wanted = ObjectiveConfig(sparsity=0.0, weight=0.0, distillation=0.5)
    assert ObjectiveConfig(**objective_of_stage_2(tmp_path / "run")) == wanted
    run = Selection(*read_records(tmp_path / "run" / "records.jsonl"))
    assert run.subjects() == ["dense", "pruned", "pruned + LoRA"]
    assert run.number("pruned", "sparsity.mean") == run.number("pruned + LoRA", "sparsity.mean") == 0.5
    assert run.text("run", "target") == "none: what is pruned stays pruned"
    assert recover_static("again", "--config", str(tmp_path / "run" / "config.yaml")) == 0
    assert objective_of_stage_2(tmp_path / "again") == objective_of_stage_2(tmp_path / "run")


def test_recover_refuses_to_steer_what_has_no_routers(recover_static, tmp_path, capsys):
    assert recover_static("run", "--sparsity", "0.25") == 2
    error = capsys.readouterr().err
    assert f"--sparsity 0.25 steers routers, and {tmp_path / 'static'} has none" in error
    assert "leave it out" in error
    assert not (tmp_path / "run").exists()


def test_recover_refuses_to_steer_routers_that_stay_as_they_are(finished, tiny_model_folder, prose_folder, capsys):
    named = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--adapter", str(finished)]
    given = ["recover", *named, "--output", "unused", "--sparsity", "0.25", "--recover.train_routers", "false"]
    assert main(given) == 2
    assert "--sparsity 0.25 steers routers, and --recover.train_routers false freezes them" in capsys.readouterr().err


def test_a_text_that_is_trained_on_and_scored_has_a_part_held_out(tiny_model_folder, prose_folder):
    data, scored = str(prose_folder), f"{prose_folder}/"
    run = RunOptions(model=str(tiny_model_folder), data=data, output="unused", device="cpu")
    texts = Materials(run, EvalOptions(data=scored, window=32), max_tokens=0)
    trained = texts.blocks(StageConfig(sequence_length=32)).num_tokens
    alone = Materials(run, EvalOptions(tokens=0), max_tokens=0).blocks(StageConfig(sequence_length=32)).num_tokens
    assert trained < alone
    assert texts.held_out[1] == f"{data} (heldout)"
    part = Materials(run, EvalOptions(data=f"{data}/00.txt", window=32), max_tokens=0)
    with pytest.warns(UserWarning, match=f"was trained on all of {data}, so what is scored of it is training text"):
        assert part.held_out[1] == f"{data}/00.txt"


def test_a_text_of_the_same_name_elsewhere_is_scored(tiny_model_folder, prose_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("00.txt").write_text("another text " * 200)
    run = RunOptions(model=str(tiny_model_folder), data=f"{prose_folder}/00.txt", output="unused", device="cpu")
    texts = Materials(run, EvalOptions(data="00.txt", window=32), max_tokens=0)
    assert texts.held_out[1] == "00.txt"
    assert texts.held_out[0][0].text.startswith("another text")


def test_recover_holds_out_what_stage_1_was_trained_on(finished, tiny_model_folder, prose_folder, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("another text " * 200)
    given = ["--model", str(tiny_model_folder), "--data", str(tmp_path / "other.txt"), "--adapter", str(finished)]
    given += ["--output", str(tmp_path / "run"), "--recover.steps=2", "--recover.batch_size=2", *SHORT[:2]]
    given += ["--recover.sequence_length=32", "--eval.window=32", f"--eval.data={prose_folder}/*.txt", "--dry_run"]
    assert main(["recover", *given]) == 0
    assert f"held out {prose_folder}/*.txt (heldout)" in capsys.readouterr().out


def test_all_that_a_run_leaves_names_its_device_alike(finished):
    records = read_records(finished / "records.jsonl")[0] + read_records(finished / "stage1" / "metrics.jsonl")[0]
    facts = json.loads((finished / "adapter" / "wide_config.json").read_text())["provenance"]
    devices = {record.device for record in records} | {facts[stage]["device"] for stage in ("prune", "recover")}
    assert devices == {f"cpu, {torch.get_num_threads()} threads"}


def test_eval_puts_dense_beside_pruned(finished, tiny_model_folder, prose_folder, tmp_path, capsys, monkeypatch):
    given = [
        *("eval", "--model", str(tiny_model_folder), "--adapter", str(finished), "--data", str(prose_folder)),
        # What the adapter was not trained on is scored without being asked for.
        *("--tokens=128", "--window=32", "--dtype=float32", "--device=cpu"),
    ]
    assert main([*given, "--json", "--output", str(tmp_path / "e")]) == 0
    printed, said = capsys.readouterr()
    # Nothing else is on stdout, whoever says it.
    found = json.loads(printed)
    assert found == json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert f"written to {tmp_path / 'e'}" in said
    records = read_records(tmp_path / "e" / "records.jsonl")[0]
    assert {record.device for record in records} == {f"cpu, {torch.get_num_threads()} threads"}
    # LoRA read text that the dense model did not, and the page says so.
    assert {record.subject for record in records} == {"dense", "pruned + LoRA"}
    assert main(["report", str(tmp_path / "e")]) == 0
    assert "LoRA also learned from the training text" in (tmp_path / "e" / "report.html").read_text()
    # Which tokens execute is drawn of whatever text is scored.
    assert (tmp_path / "e" / "figures" / "tokens.svg").is_file()
    run = Selection(*read_records(finished / "records.jsonl"))
    assert found["model"]["perplexity"]["perplexity"] == pytest.approx(run.number("stage 1+2", "token_perplexity"))
    assert found["dense"]["perplexity"]["perplexity"] == pytest.approx(run.number("dense", "token_perplexity"))
    assert main(given) == 0
    assert "dense" in capsys.readouterr().out
    # Scores outlive what is measured after them.
    monkeypatch.setattr(measuring, "routing_stats", lambda *_, **__: 1 / 0)
    assert main([*given, "--output", str(tmp_path / "f")]) == 1
    assert json.loads((tmp_path / "f" / "evaluation.json").read_text())["model"] == found["model"]


def test_generate_streams_and_tells_speed_and_sparsity(finished, tiny_model_folder, capsys):
    given = ["generate", "--model", str(tiny_model_folder), "--adapter", str(finished), "--device=cpu"]
    said = []
    for backend in ("auto", "torch"):
        assert main([*given, "--prompt", "The quick", "--max_new_tokens", "5", "--backend", backend]) == 0
        said.append(capsys.readouterr())
    masked, optimised = said
    assert masked.out == optimised.out
    assert masked.out.startswith("The quick")
    assert "need a GPU" in masked.err
    assert "optimised" in optimised.err
    last = masked.err.splitlines()[-1]
    assert re.match(
        r"\[prompt 10 tokens, [\d.]+/s; text \d tokens, [\d.]+/s; skipped groups on prompt and text: att", last
    )
    # What is skipped does not depend on how it is run.
    assert last.partition("skipped")[2] == optimised.err.splitlines()[-1].partition("skipped")[2]
    eight = ["--prompt", "The quick", "--max_new_tokens", "5", "--weights", "int8"]
    assert main([*given, *eight, "--backend", "torch"]) == 0
    assert "optimised: kernels avoid the skipped computation; weights in int8 take" in capsys.readouterr().err
    assert main([*given, *eight]) == 1
    assert "--weights int8 is for models that run optimised, and this one is masked" in capsys.readouterr().err
    assert main([*given, "--prompt", "The quick", "--max_new_tokens", "500"]) == 1
    assert "128 positions" in capsys.readouterr().err


def test_chat_answers_by_the_template_turn_after_turn(finished, tiny_model_folder, tmp_path, monkeypatch, capsys):
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tiny_model_folder)
    given = ["generate", "--device=cpu", "--max_new_tokens=4"]
    chat = [*given, "--model", str(tmp_path), "--chat"]
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)

    def count(messages):
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return len(encoded["input_ids"])

    assert main([*chat, "--prompt=Hello", "--system=Be kind"]) == 0
    told = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    first = capsys.readouterr()
    assert f"[prompt {count(told)} tokens" in first.err
    assert "Hello" not in first.out

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd now?\n"))
    assert main([*chat, "--adapter", str(finished), "--system=Be kind"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[prompt")]
    assert len(lines) == 2
    asked = [int(re.search(r"prompt (\d+)", line)[1]) for line in lines]
    assert asked[0] == count(told)
    # The second turn holds the first, its answer and the next message.
    assert asked[1] > count([*told, {"role": "user", "content": "And now?"}])

    # A message that is too long costs nothing but itself.
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" + 200 * "x" + "\nAnd now?\n"))
    assert main([*chat, "--adapter", str(finished)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said if "positions" in line or line.startswith("[prompt")][::2] == 2 * [
        "[prompt"
    ]

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    answer = wide.generate(model, "Hello", system="Be kind", max_new_tokens=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert answer == first.out.rstrip("\n")
    assert wide.generate(model.train(), told, tokenizer=tokenizer, max_new_tokens=4) == answer
    assert model.training
    plain = wide.generate(model, "Hello", max_new_tokens=4)
    ids = model.eval().generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert plain == tokenizer.decode(ids[0, -4:], skip_special_tokens=True)

    assert main([*given, "--model", str(tiny_model_folder), "--chat"]) == 1
    said = capsys.readouterr().err
    assert "no chat template" in said
    assert "[" not in said, "the model was loaded, and a message read, before that was told"


def test_sampling_follows_the_seed(tiny_model_folder, capsys):
    def text(seed):
        given = ["generate", "--model", str(tiny_model_folder), "--prompt", "a", "--temperature", "1", "--device=cpu"]
        assert main([*given, "--seed", seed, "--max_new_tokens", "12"]) == 0
        return capsys.readouterr().out

    assert text("1") == text("1") != text("2")


LEAKS = {
    "num_beams": 3,
    "return_dict_in_generate": True,
    "repetition_penalty": 5.0,
    "do_sample": True,
    "max_time": 0.0,
    "no_repeat_ngram_size": 1,
}


@pytest.mark.parametrize("leak", [{key: value} for key, value in LEAKS.items()] + [LEAKS | {"num_return_sequences": 2}])
def test_what_a_base_says_of_generation_changes_no_text(leak, tiny_model_folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    expected = wide.generate(model, "The quick", max_new_tokens=12)
    model.generation_config = GenerationConfig(eos_token_id=1, **leak)
    assert wide.generate(model, "The quick", max_new_tokens=12) == expected
    assert all(getattr(model.generation_config, key) == value for key, value in leak.items())
    # Below that, what softmax is taken of is infinite.
    assert wide.generate(model, "The quick", max_new_tokens=12, temperature=1e-40) == expected
    shutil.copytree(tiny_model_folder, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | leak))
    given = ["generate", "--model", str(tmp_path / "base"), "--prompt=The quick", "--max_new_tokens=12"]
    assert main([*given, "--device=cpu"]) == 0
    assert capsys.readouterr().out.strip() == f"The quick{expected}".strip()


def test_stop_strings_of_a_base_end_a_text_and_threads_wait_for_each_other(tiny_model_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    whole = wide.generate(model, "The quick", max_new_tokens=12, temperature=1.0)
    with ThreadPoolExecutor(4) as pool:
        texts = list(
            pool.map(lambda _: wide.generate(model, "The quick", max_new_tokens=12, temperature=1.0), range(8))
        )
    assert set(texts) == {whole}
    letter = re.search("[a-zA-Z]", whole)
    model.generation_config.stop_strings = [letter[0]]
    assert wide.generate(model, "The quick", max_new_tokens=12, temperature=1.0) == whole[: letter.end()]
    assert letter.end() < len(whole)


def test_inspect_tells_what_fits_and_what_an_adapter_holds(finished, tiny_model_folder, capsys):
    assert main(["inspect", "--model", str(tiny_model_folder)]) == 0
    said = capsys.readouterr().out
    assert "possible 8, 16, 32" in said
    assert "output head" in said
    assert main(["inspect", "--adapter", str(finished)]) == 0
    said = capsys.readouterr().out
    assert "4 groups of 16 channels, rank 4" in said
    assert "sequence_length: 32," in said
    assert "wide_router.safetensors" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--ffn_group_size=48"], "choose one of"),
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--data=short.txt", "--train.sequence_length=128"], "one block needs"),
        (["--model=./nowhere"], "./nowhere"),
        (["--data=.", "--cache=run/cache"], "cache run/cache is inside a folder that data . reads"),
        (["--device=quantum"], "quantum"),
        (["--eval.data=nowhere.txt"], "nowhere.txt"),
        (["--eval.window=129"], "eval.window 129 exceeds the 128 positions of the model"),
        (["--train.sequence_length=129"], "train.sequence_length 129 exceeds the 128 positions of the model"),
        (
            ["--recover.steps=1", "--recover.sequence_length=129"],
            "recover.sequence_length 129 exceeds the 128 positions of the model",
        ),
        (["--train.batch_size=4", "--train.micro_batch_size=3"], "does not divide the 4 sequences"),
    ],
)
def test_bad_input_writes_nothing(changes, words, tmp_path, tiny_model_folder, prose_folder, capsys):
    output = tmp_path / "run"
    (tmp_path / "short.txt").write_text("A few words.")
    changes = [word.replace("short.txt", str(tmp_path / "short.txt")) for word in changes]
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(output)]
    assert main(["prune", *given, *SHORT, *changes]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert not output.exists()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("mmlu", "there is no task 'mmlu'; tasks: wikitext"),
        ("arc_challenge", "data of the task 'arc_challenge' cannot be loaded: .*allenai/ai2_arc.*--local_data"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_before_the_model_is_read(task, words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")

    def no_network(_name, _kind):
        raise OSError("no network")

    monkeypatch.setattr("wide.data.local_names._ask_hub", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    (tmp_path / "config.json").write_text("{}")
    assert main(["eval", f"--model={tmp_path}", f"--tasks={task}"]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_all_that_is_wanted_may_be_more_documents_than_a_machine_counts(prose_folder):
    assert len(list(load_documents(prose_folder, max_documents=10**25))) == 40


def test_inspect_counts_experts_that_a_token_runs_and_refuses_other_names_in_words(tmp_path, capsys):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"intermediate_size": 64, "num_key_value_heads": 4, "num_local_experts": 4}
    CONFIG_MAPPING["mixtral"](**sizes, **experts).save_pretrained(tmp_path / "experts")
    assert main(["inspect", "--model", str(tmp_path / "experts")]) == 0
    total = 2 * (4 * 32 * 32 + 4 * 32 + 2 * 3 * 64 * 32) + 97 * 32
    assert f"{2 * total / 1e6:.2f} MFLOP" in (said := capsys.readouterr().out)
    assert f"not routed {2 * (4 * 32 + 2 * 3 * 64 * 32) / total:>13.1%}" in said
    CONFIG_MAPPING["opt"](**sizes, ffn_dim=64, word_embed_proj_dim=32).save_pretrained(tmp_path / "opt")
    assert main(["inspect", "--model", str(tmp_path / "opt")]) == 1
    assert "num_key_value_heads" in capsys.readouterr().err


def test_a_configuration_that_transformers_stumbles_over_is_refused(tiny_model_folder, tmp_path, capsys):
    shutil.copytree(tiny_model_folder, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": 1}))
    assert main(["inspect", "--model", str(tmp_path / "base")]) == 1
    assert "no model can be loaded from the folder" in capsys.readouterr().err


def test_slow_weights_are_seen_in_a_log(finished, tiny_model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wide.data.progress._Lines.seconds_between", 0.0)
    monkeypatch.setattr("wide.data.progress._Lines.last", 0.0)
    monkeypatch.setattr("wide.data.progress._QUIET", {"mininterval": 0.0, "miniters": 1})
    assert (
        main(["generate", "--model", str(tiny_model_folder), "--prompt=A", "--max_new_tokens=1", "--device=cpu"]) == 0
    )
    assert re.search(r"Loading weights: .* \d+/20 after", capsys.readouterr().err)
    given = ["--model", str(tiny_model_folder), "--adapter", str(finished), "--device=cpu"]
    assert main(["export", *given, "--output", str(tmp_path / "whole")]) == 0
    assert re.search(r"Writing model shards: .* 1/1 after.*sha256 of weights: file 1/1", capsys.readouterr().err, re.S)


@pytest.mark.parametrize(
    ("command", "words"),
    [("recover", "choose another folder"), ("eval", "--output {0} holds or is part of --adapter {0}")],
)
def test_what_a_command_reads_is_never_overwritten(command, words, finished, tiny_model_folder, prose_folder, capsys):
    given = ["--model", str(tiny_model_folder), "--adapter", str(finished), "--data", str(prose_folder)]
    before = sorted(finished.rglob("*"))
    assert main([command, *given, "--output", str(finished), "--overwrite"]) == 1
    assert words.format(finished) in capsys.readouterr().err
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--recover.lora_rank=4"], "this model has LoRA already, and lora_rank 4 instead of 16 was asked for"),
        # The dense model would get only the second part of the LoRA that it is compared with.
        (["--recover.dense_baseline=true"], "begin with the adapter of stage 1"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_recover_refuses_other_lora_at_once(
    asked, words, dry, finished, tiny_model_folder, prose_folder, tmp_path, capsys
):
    code = main(
        [
            *("recover", "--model", str(tiny_model_folder), "--data", str(prose_folder), "--adapter", str(finished)),
            *("--output", str(tmp_path / "run"), "--recover.steps=1", "--report=false", *asked, *dry),
            *("--recover.batch_size=2", "--recover.sequence_length=32", "--eval.tokens=64", "--eval.window=32"),
            "--device=cpu",
        ]
    )
    assert code == 1
    assert words in capsys.readouterr().err
    # Before the dense model is measured, or trained for hours.
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_without_a_traceback(tiny_model_folder, prose_folder, tmp_path, monkeypatch, capsys):
    def full(path, config):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("wide.runs.folder.save_config", full)
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(tmp_path / "run")]
    assert main(["prune", *given, *SHORT]) == 1
    assert "config.yaml: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_full_checkpoints_are_taken_as_they_are(command, finished, tiny_model_folder, prose_folder, tmp_path, capsys):
    model = wide.load(str(tiny_model_folder), finished / "adapter")
    wide.save_checkpoint(wide.merge_lora(model), tmp_path / "full")
    load_tokenizer(tiny_model_folder).save_pretrained(tmp_path / "full")
    given = ["--model", str(tmp_path / "full"), "--device=cpu"]
    what = ["--data", str(prose_folder), "--tokens=128", "--window=32"]
    if command == "generate":
        what = ["--prompt=The", "--max_new_tokens=4"]
    assert main([command, *given, *what]) == 0
    said = capsys.readouterr()
    assert "skipped" in (said.err if command == "generate" else said.out)
    prune = ["--data", str(prose_folder), "--output", str(tmp_path / "run"), *SHORT]
    assert main(["prune", *given, *prune]) == 1
    assert "pruned checkpoint already" in capsys.readouterr().err


def test_a_prompt_of_another_vocabulary_is_refused(tiny_model_folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(8)
    model.save_pretrained(tmp_path)
    load_tokenizer(tiny_model_folder).save_pretrained(tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--device=cpu", "--prompt=zzz", "--max_new_tokens=4"]) == 1
    captured = capsys.readouterr()
    assert "vocabulary has 8" in captured.err
    assert "zzz" not in captured.out


def test_eval_does_not_offer_to_resume(finished, tiny_model_folder, prose_folder, capsys):
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(finished)]
    assert main(["eval", *given]) == 1
    error = capsys.readouterr().err
    assert "--overwrite" in error
    assert "--resume" not in error


def test_folders_of_others_are_never_touched(tmp_path, tiny_model_folder, prose_folder, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(tmp_path), "--overwrite"]
    assert main(["prune", *given, *SHORT]) == 1
    assert "holds no run of wide" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(("half", "dtype"), [(4.0, torch.float32), (1.2, torch.bfloat16)])
def test_auto_on_a_cpu_takes_the_dtype_that_is_fast_there_and_keeps_to_it(half, dtype, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path))
    options = AdapterOptions(model="models/nano", device="cpu")
    monkeypatch.setattr(sources, "_product_seconds", lambda dtype: 1.0 if dtype == torch.float32 else half)
    assert sources.load_base(options).dtype == dtype
    printed = capsys.readouterr()
    # stdout may be the text of wide generate.
    assert not printed.out
    assert ("faster on this CPU" in printed.err) == (dtype == torch.float32)
    # Measured once: a run that goes on finds the same.
    monkeypatch.setattr(sources, "_product_seconds", lambda dtype: 1.0 if dtype != torch.float32 else half)
    assert getattr(torch, sources.chosen_dtype(options).replace("auto", "bfloat16")) == dtype
    assert sources.load_routed(options, keeps_dtype=True).dtype == torch.bfloat16
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sources.chosen_dtype(options) == "auto"
