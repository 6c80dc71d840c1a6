"""Several processes do what one process does: replicated or with a shared base, killed, and in other numbers."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file
from tiny import FORKS, RandomSource, dense_model, freeze_noise, in_child, routed_model, stage
from transformers import LlamaConfig, LlamaForCausalLM

import wide
from wide.config import ObjectiveConfig, WideConfig
from wide.models.attach import attachment
from wide.training import inference_target
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import StageOptions
from wide.training.stages import prune
from wide.training.trainer import Trainer

pytestmark = FORKS


@pytest.fixture(scope="module")
def bases(tmp_path_factory, tiny_tokenizer):
    """Return a folder with a Llama of tied and one of untied embeddings, one of 130 MB, and a text."""
    folder = tmp_path_factory.mktemp("bases")
    for kind in ("tied", "untied"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 258}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = LlamaConfig(**sizes, **heads, tie_word_embeddings=kind == "tied", initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(folder / kind)
        tiny_tokenizer.save_pretrained(folder / kind)
    large = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 258}
    LlamaForCausalLM(LlamaConfig(**large, num_attention_heads=4)).save_pretrained(folder / "large")
    (folder / "text.txt").write_text("Some text that is long enough for a few windows. " * 3)
    return folder


def carried_out(folder, bases, *scenarios):
    assert in_child(partial(ranks.carry_out, folder, bases, *scenarios)) == 0
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory, bases):
    """Return the folder in which groups of processes left what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    return carried_out(folder, bases, "replicated", "sharded", "memory", "elastic")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, bases):
    """Return what one process finds with whole bases, and its folder."""
    folder, facts = tmp_path_factory.mktemp("alone"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference_target, "_MIN_TOKENS", 64)
        for kind in ("tied", "untied"):
            base = ranks._load(bases / kind, sharded=False)
            text = (bases / "text.txt").read_text()
            facts[kind] = ranks.train_all(folder / kind, base, text, in_every_way=kind == "tied")
        facts["others"] = ranks.others(ranks._load(bases / "untied", sharded=False))
        ranks.part_of_run(folder / "elastic", bases, sharded=False, resume=False)
    return folder, facts


def losses(folder):
    """Return losses and norms of gradients by step, as a run recorded them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = ("training.loss", "training.lm_loss", "training.gradient_norm")
    return {(line["metric"], line["step"]): line["value"] for line in lines if line["metric"] in wanted}


def test_loss_measurements_and_gradients_are_those_of_the_joint_batch(found):
    wanted = ranks.joint_steps(None)
    for rank in range(2):
        of_rank = load_file(str(found / f"step-{rank}.safetensors"))
        assert of_rank.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(of_rank[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_on_two_processes_ends_with_the_parameters_of_one_process(found):
    model = freeze_noise(routed_model())
    objective = Objective(model, ObjectiveConfig(sparsity=0.3))
    outcome = Trainer(model, objective, RandomSource(), stage(steps=5), StageOptions(title="stage 1")).train()
    trained = load_file(str(found / "run.safetensors"))
    assert outcome.tokens == 5 * 4 * 16
    for name, parameter in model.named_parameters():
        if "wide_router" in name:
            torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-3, atol=1e-5)
    assert len(list((found / "run" / "checkpoints").iterdir())) == 2


def test_processes_that_share_the_clustering_all_have_the_orders_of_one_process(found):
    config = WideConfig(ffn_group_size=16, router_rank=4, ffn_grouping="clustered", start_tokens=128)
    model = prune(dense_model(), RandomSource(), config=config, stage=stage(steps=1))
    wanted = attachment(model).regrouped.orders()
    assert len(wanted) == 2
    for rank in range(2):
        of_rank = load_file(str(found / f"orders-{rank}.safetensors"))
        assert all(torch.equal(of_rank[name], order) for name, order in wanted.items())


def test_processes_with_text_of_their_own_end_with_the_thresholds_of_the_first(found):
    points = []
    for rank in range(2):
        points.append([list(point) for point in ranks.calibrated(rank, DataParallel())])
        assert json.loads((found / f"thresholds-{rank}.json").read_text()) == points[0]
    assert len(points[0]) != len(points[1])


def test_all_processes_say_why_one_of_them_cannot_go_on(found):
    for rank in range(2):
        said = json.loads((found / f"said-{rank}.json").read_text())
        assert "No space left on device" in said["full"]
        assert "nan" in said["nan"]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_shared_base_is_trained_as_a_whole_one(found, alone, kind):
    folder, facts = alone
    for rank in range(2):
        of_rank = json.loads((found / f"{kind}-{rank}.json").read_text())
        assert of_rank["share"] < 0.51
        assert of_rank["types"] == ["torch.float32"]
        # Of a micro-batch of 16 tokens, the logits of so many exist at a time.
        assert of_rank["rows"] == 8
        assert of_rank["step"] == pytest.approx(facts[kind]["step"], rel=1e-4, abs=1e-6)
        for name in ("base", "generated", *(["orders"] if kind == "tied" else [])):
            assert of_rank[name] == facts[kind][name], name
        for name in ("perplexity", "merged", *(["fitted"] if kind == "tied" else [])):
            assert of_rank[name] == pytest.approx(facts[kind][name], rel=1e-4), name
        if kind == "tied":
            for here, there in zip(of_rank["always"], facts[kind]["always"], strict=True):
                assert here[:3] == there[:3]
                assert here[3] == pytest.approx(there[3], abs=1e-4)
            assert of_rank["balanced"] == pytest.approx(facts[kind]["balanced"], rel=1e-2, abs=1e-2)
        torch.testing.assert_close(
            torch.tensor(of_rank["dial"]), torch.tensor(facts[kind]["dial"]), rtol=1e-2, atol=1e-2
        )
    for name in ("stage1", "stage2"):
        assert losses(found / kind / name) == pytest.approx(losses(folder / kind / name), rel=1e-4)


@pytest.mark.parametrize("name", ranks.OTHERS)
def test_other_methods_train_on_a_shared_base_as_on_a_whole_one(found, alone, name):
    for rank in range(2):
        of_rank = json.loads((found / f"untied-{rank}.json").read_text())["others"][name]
        assert of_rank == pytest.approx(alone[1]["others"][name], rel=1e-3)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_a_process_reads_its_share_of_the_base_and_no_more(found):
    for rank in range(2):
        memory = json.loads((found / f"memory-{rank}.json").read_text())
        assert 0.9 < memory["held"] < 1.3
        # Of the file, twice as wide as what is kept of it, a few tensors are there at a time.
        assert memory["at most"] < 1.3


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_what_a_shared_base_leaves_on_the_disk_is_read_by_one_process(found, alone, bases, kind):
    assert len(list((found / kind / "checkpoint").glob("*.safetensors"))) > 1
    ids = torch.arange(4, 24).unsqueeze(0)
    with torch.no_grad():
        logits = {
            name: [
                wide.load(str(bases / kind), folder / kind / "adapter", dtype="float32", device="cpu")(ids).logits,
                wide.load_checkpoint(folder / kind / "checkpoint")(ids).logits,
            ]
            for name, folder in (("shared", found), ("whole", alone[0]))
        }
    for shared, whole in zip(logits["shared"], logits["whole"], strict=True):
        torch.testing.assert_close(shared, whole, rtol=1e-3, atol=1e-3)


def test_a_run_goes_on_with_another_number_of_processes_and_another_way_to_hold_the_base(found, alone):
    two, four, one = json.loads((found / "elastic.json").read_text())
    # One of two died: the other one ended by itself, soon.
    assert two["ends"] == [1, -signal.SIGKILL]
    assert two["seconds"] < 60
    assert four["ends"] == [-signal.SIGKILL] * 4
    assert one["ends"] == [0]
    assert (two["kept"][-1], four["kept"][-1], one["kept"][-1]) == (2, 4, 8)
    wanted = losses(alone[0] / "elastic")
    assert len(wanted) == 3 * 8
    assert losses(found / "elastic") == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_whatever_is_killed_when_the_run_ends_as_it_would_have(alone, bases, tmp_path):
    carried_out(tmp_path, bases, "random_ends")
    assert losses(tmp_path / "random") == pytest.approx(losses(alone[0] / "elastic"), rel=1e-4)


@pytest.mark.slow
def test_commands_compile_and_score_tasks_on_a_shared_base_as_on_a_whole_one(bases, tmp_path):
    page = {"page": " = A page = \n\n" + " Some text of the page , with words . \n" * 20}
    (tmp_path / "test.pages.jsonl").write_text(json.dumps(page) + "\n")
    sizes = ["--train.steps=3", "--train.batch_size=2", "--train.micro_batch_size=1", "--train.sequence_length=32"]
    how = ["--train.compile=true", "--train.gradient_checkpointing=true", "--eval.tokens=0", "--eval.data=null"]
    base = [f"--model={bases / 'untied'}", "--ffn_group_size=16", "--router_rank=4"]
    # Out of reach: all micro-batches lie on its one side, so that the sparsity term is that of the whole step.
    far = "--sparsity=0.9"
    scored = ["--tasks=wikitext", f"--local_data={tmp_path}", "--data=null"]
    found = []
    for count, parallel in ((1, "replicate"), (2, "fsdp")):
        for command, output, words in (
            ("prune", f"run{count}", [*base, far, f"--data={bases / 'text.txt'}", *sizes, *how]),
            ("eval", f"scores{count}", [base[0], f"--adapter={tmp_path / 'run1' / 'adapter'}", *scored]),
        ):
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "-m", "wide.cli.main", command]
            done = subprocess.run(
                [sys.executable, *torchrun, *words, f"--parallel={parallel}", f"--output={tmp_path / output}"],
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = (tmp_path / f"scores{count}" / "records.jsonl").read_text().splitlines()
        scores = {(r["subject"], r["metric"]): r["value"] for r in map(json.loads, lines) if "wikitext" in str(r)}
        found.append((losses(tmp_path / f"run{count}" / "stage1"), scores))
    assert all(found[0])
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-3)
