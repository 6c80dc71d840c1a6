"""What training needs of a GPU, calculated: as it was measured, and a way out that fits."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import RandomSource, dense_model, routed_model

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig
from wide.errors import TrainingError
from wide.models.attach import attach
from wide.profiling.synthetic import random_model
from wide.runs import forecast
from wide.training import memory, token_loss
from wide.training.memory import needed, saying_what_fits, step_flops, way_out
from wide.training.stages import prune

GIB = 2**30
CUDA = torch.device("cuda")


def gpu_of(monkeypatch, total, *, free=None):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (total if free is None else free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)


STAGE = StageConfig(batch_size=16, micro_batch_size=1, sequence_length=4096)
LORA = RecoverConfig(batch_size=16, micro_batch_size=1, sequence_length=4096)


@pytest.fixture(scope="module")
def skeleton():
    return random_model("llama-3.1-8b", num_layers=None, device=torch.device("meta"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "measured"),
    # Peaks on an H200, torch 2.11.
    [
        (STAGE, 38.78),
        (replace(STAGE, compile=True), 29.37),
        (replace(STAGE, compile=True, micro_batch_size=2), 43.24),
        (replace(STAGE, compile=True, gradient_checkpointing=True), 16.94),
        (LORA, 53.61),
        (replace(LORA, compile=True), 44.21),
    ],
)
def test_the_calculation_is_near_the_measured_peaks(skeleton, stage, measured):
    assert needed(skeleton, stage, dtype="bfloat16").total / GIB == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("size", "each"), [(2, 10), (4, 16)])
def test_the_loss_of_a_chunk_needs_its_logits_wherever_the_base_is_and_twice_where_it_distils(
    monkeypatch, skeleton, size, each
):
    dtype, elements = {2: "bfloat16", 4: "float32"}[size], token_loss.ELEMENTS_PER_CHUNK
    stage = replace(STAGE, compile=True)
    for shards in (1, 4):
        plain = needed(skeleton, stage, dtype=dtype, world=4, shards=shards)
        taught = needed(skeleton, stage, distils=True, dtype=dtype, world=4, shards=shards)
        assert plain.logits == each * elements
        # The teacher's logits, and two float32 copies of them.
        assert taught == replace(plain, logits=plain.logits + (size + 8) * elements)
    gpu_of(monkeypatch, 20 * GIB)
    assert "logits 1.25," in way_out(skeleton, stage, CUDA, distils=True, dtype="bfloat16")


def test_the_way_out_fits_and_changes_as_little_as_it_can(monkeypatch, skeleton):
    whole = replace(STAGE, micro_batch_size=None)

    def found(stage, size):
        gpu_of(monkeypatch, size * GIB)
        return way_out(skeleton, stage, CUDA, dtype="bfloat16").partition("; ")[2]

    assert found(whole, 141).startswith("with --train.micro_batch_size 4 it is about ")
    assert found(whole, 48).startswith("with --train.micro_batch_size 1 it is about 38.")
    assert found(whole, 40).startswith("with --train.micro_batch_size 1 --train.compile true it is about 29.")
    assert "--train.gradient_checkpointing true it is about 17." in found(STAGE, 24)
    assert "on 2 such GPUs" in found(STAGE, 16)
    assert "--recover.compile true" in found(LORA, 60)
    assert found(STAGE, 2) == "take larger GPUs, or a shorter --train.sequence_length"


def test_the_work_of_a_step_is_four_per_weight_and_token_and_attention(skeleton):
    weights = sum(p.numel() for p in skeleton.parameters()) - skeleton.get_input_embeddings().weight.numel()
    tokens = 16 * 4096
    scores = 3.5 * 32 * 2 * 4096 * 4096
    assert step_flops(skeleton, STAGE) == pytest.approx(tokens * (4 * weights + scores), rel=1e-3)


def test_routers_and_lora_of_an_attached_model_are_no_part_of_its_base():
    model = routed_model()
    routers = sum(p.numel() for name, p in model.named_parameters() if "wide_router" in name)
    base = sum(p.numel() for p in model.parameters()) - routers
    found = needed(model, StageConfig(batch_size=4, sequence_length=16))
    assert found.weights == 4 * base
    assert found.optimizer == 16 * routers


def test_a_model_that_was_saved_and_one_of_an_unknown_structure_are_counted(tmp_path, monkeypatch):
    model = dense_model()
    # transformers leaves the name of the type behind.
    model.save_pretrained(tmp_path)
    assert model.config.dtype == "float32"
    attach(model, WideConfig(ffn_group_size=16))
    before = needed(model, STAGE), step_flops(model, STAGE)

    def refuse(model):
        raise AssertionError("its owner has described the layers")

    monkeypatch.setattr(memory, "discover", refuse)
    assert (needed(model, STAGE), step_flops(model, STAGE)) == before


def test_weights_that_are_quantised_count_as_they_are(monkeypatch, skeleton):
    model, stage = routed_model(), StageConfig(batch_size=4, sequence_length=16)
    plain = needed(model, stage).weights
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.uint8), requires_grad=False)
    assert needed(model, stage).weights == plain - 2 * 3 * 32 * 64
    gpu_of(monkeypatch, GIB)
    settings = {"device": CUDA, "distils": False, "dtype": "auto", "may_shard": False}
    with pytest.raises(TrainingError, match="this stage needs about"):
        forecast.check_fits(skeleton, STAGE, **settings)
    monkeypatch.setattr(skeleton.config, "quantization_config", {"load_in_4bit": True}, raising=False)
    forecast.check_fits(skeleton, STAGE, **settings)


def test_a_model_that_is_sharded_already_needs_a_share(monkeypatch):
    model, stage = routed_model(num_hidden_layers=8), StageConfig(batch_size=4, sequence_length=16)
    wanted = needed(model, stage, world=4, shards=4)
    assert wanted.weights < needed(model, stage, world=4).weights
    monkeypatch.setattr(memory, "is_sharded", lambda _model: True)
    assert needed(model, stage, world=4) == wanted


def test_a_dry_run_counts_on_shares_only_where_the_base_may_be_shared(monkeypatch):
    model, stage = routed_model(num_hidden_layers=8), StageConfig(batch_size=4, sequence_length=16)
    share, whole = (needed(model, stage, world=4, shards=shards).total for shards in (4, 1))
    gpu_of(monkeypatch, (share + whole) / 2 / memory.USABLE)
    monkeypatch.setattr(forecast, "num_processes", lambda: 4)
    settings = {"distils": False, "device": CUDA, "dtype": "auto"}
    forecast.check_fits(model, stage, may_shard=True, **settings)
    with pytest.raises(TrainingError, match="this stage needs about"):
        forecast.check_fits(model, stage, may_shard=False, **settings)


def test_what_the_first_step_takes_once_does_not_grow_with_the_step(monkeypatch, capsys):
    monkeypatch.setattr(forecast, "_MOST_FLOPS_ON_CPU", 0)
    model, source, stage = routed_model(), RandomSource(), StageConfig(steps=11, batch_size=4, sequence_length=16)
    source.cut = lambda _length, seed: source
    source.num_tokens = 1600

    def train(clock):
        for step in range(3):
            clock.batch_at(step, batch_size=1)
        return SimpleNamespace(peak_memory_bytes=None)

    # 10 seconds once, and 2 for a step of a quarter of the work.
    times = iter([0.0, 12.0, 14.0, 16.0])
    monkeypatch.setattr(forecast, "now", lambda _device: next(times))
    monkeypatch.setattr(
        forecast, "Trainer", lambda _model, _loss, clock, *_, **__: SimpleNamespace(train=lambda: train(clock))
    )
    seconds = forecast.stage_seconds(model, source, ObjectiveConfig(), stage, routers=True)
    assert "the first step takes 18.0 s" in capsys.readouterr().out
    assert seconds == pytest.approx(18 + 10 * 8)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_a_full_memory_says_what_would_fit(error):
    stage = StageConfig(batch_size=4, sequence_length=16)
    message = "stage 1: the memory is full: this stage needs about .* GiB"
    told = {"distils": False, "world": 1}
    with pytest.raises(TrainingError, match=message), saying_what_fits("stage 1", routed_model(), stage, **told):
        raise error


def test_a_gpu_that_others_fill_says_what_is_free(monkeypatch, skeleton):
    gpu_of(monkeypatch, 80 * GIB, free=20 * GIB)
    told = {"device": CUDA, "distils": False, "dtype": "bfloat16", "may_shard": False}
    with pytest.raises(TrainingError, match=r"the GPU has 20.0 free of 80.0, others hold the rest; with --train"):
        forecast.check_fits(skeleton, STAGE, **told)


def test_a_host_is_asked_before_its_memory_is_full(monkeypatch, skeleton):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "_host_memory", lambda: 23 * GIB)
    words = (
        r"stage 1: this stage needs about .* GiB .* and this machine has 23.0 free; with --train.micro_batch_size 1 "
        "--train.gradient_checkpointing true it is about"
    )
    whole = replace(STAGE, micro_batch_size=None)
    with pytest.raises(TrainingError, match=words):
        forecast.check_fits(skeleton, whole, device=cpu, distils=False, dtype="bfloat16", may_shard=False)
    monkeypatch.setattr(memory, "_host_memory", lambda: 1 << 16)
    # In Python, too, and before the first step.
    with pytest.raises(TrainingError, match="take a machine with more"):
        prune(routed_model(), RandomSource(), stage=StageConfig(steps=1, batch_size=4, sequence_length=16))


def test_a_container_has_no_more_than_its_limit(monkeypatch):
    real, free = Path.read_text, memory._host_memory()
    assert free > GIB // 4
    group = {
        "memory.max": "1073741824",
        "memory.current": "1000000000",
        "memory.stat": "anon 5\ninactive_file 500000000",
    }

    def read(path, *args, **options):
        return group.get(path.name) or real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    pages = int(real(Path("/proc/self/statm")).split()[1])
    assert memory._host_memory() - 4096 * pages == pytest.approx(573741824, rel=0.1)
