"""What tests share: seeds, poisoned memory, and a tiny model with its tokenizer on disk."""

import gc
import io
import os
import signal
import sys
from pathlib import Path

import pytest

# What is imported and collected is never let go; looking for what might be takes a fifth of the time of imports.
gc.disable()

PROSE = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A list holds values in order, and a dictionary maps keys to values.",
    "Every token chooses which groups of channels it executes.",
    "Return the number of items in the container, or raise an error.",
)


# Files that take more than five seconds, longest first: begun last, one of them would run alone at the end.
LONGEST = (
    *("compile_targets", "parallel", "every_method", "compare", "engine", "agreement", "commands", "serve"),
    *("native_compile", "paged", "profile", "fuzz", "gemv_emulated", "families", "start", "static_stages", "static"),
    *("callback", "gemm_edges", "trainer", "materialise_use", "threads", "compare_on_gpus", "decoder", "adapter"),
    *("stock_tools", "ddp", "int8", "house", "report", "legible", "routed", "stages", "glue", "cooppruner"),
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        # This process hands out tests; what runs them imports for two seconds, and begins the sooner.
        return
    global torch
    import torch
    from hypothesis import settings

    # What takes longer than a fifth of a second on a busy machine is not wrong.
    settings.register_profile("wide", deadline=None)
    settings.load_profile("wide")
    # Read by Triton when it and each kernel are imported, which any test module may do first.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        # Seeds of devices that are not there would be noted with the stack of each call: a millisecond for every test.
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda _seed: None
    # Threads cost tiny models more than they give, above all where several processes share the cores.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config, items):
    begun = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: begun.get(item.path.name, len(begun)))
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "batches_on_cpu" in item.keywords and torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="transformers' generate_batch runs on the GPU that is there"))


def pytest_collection_finish(session):
    # What is imported by then, little of it garbage, is never looked through: a sixth of the time of tests of models.
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        import quick_interpreter

        quick_interpreter.install()


def _global_state():
    return {
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
        "working directory": os.getcwd(),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
    }


@pytest.fixture(autouse=True)
def _as_found():
    """Seed, and name the test that leaves behind what would change the tests after it."""
    torch.manual_seed(0)
    before = _global_state()
    yield
    after = _global_state()
    if after != before:
        # The tests after it begin as they would have.
        torch.set_grad_enabled(before["gradients"])
        torch.set_default_dtype(before["default dtype"])
        torch.use_deterministic_algorithms(before["deterministic"])
        torch.set_num_threads(before["threads of torch"])
        os.chdir(before["working directory"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, before[number.name])
    assert after == before, "this test leaves global state behind"


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill uninitialised floating-point memory with NaN, so that reading what nobody wrote shows."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Return a byte-level tokenizer of 258 tokens that begins every text with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """Return a folder with a random two-layer Llama and its tokenizer, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prose_folder(tmp_path_factory) -> Path:
    """Return a folder of 40 short text files, of which some are held out by name."""
    folder = tmp_path_factory.mktemp("prose")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(PROSE[(number + k) % 4] for k in range(4)))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _kept():
    """Have what earlier files imported never looked through: transformers' batches collect garbage at each end."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def short_calibration(request):
    """Calibrate from little text for few thresholds: many tiny batches would take most of the time of trainings."""
    with pytest.MonkeyPatch.context() as patch:
        # The import takes seconds where a folder is run alone.
        if request.path.parent.name not in ("architecture", "data", "docs", "kernels"):
            patch.setattr("wide.training.inference_target._MIN_TOKENS", 256)
            patch.setattr("wide.training.inference_target.DEFAULT_POINTS", (0.1, 0.5, 0.9))
        yield


@pytest.fixture
def every_point(monkeypatch):
    """Calibrate for as many thresholds as users do, for tests of how well a target is met."""
    from wide.models.thresholds import DEFAULT_POINTS

    monkeypatch.setattr("wide.training.inference_target.DEFAULT_POINTS", DEFAULT_POINTS)


@pytest.fixture(scope="module")
def drawn_at_once():
    """Leave pictures empty, because drawing takes longer than a run of a tiny model."""
    from matplotlib.figure import Figure

    def savefig(_figure, file, **_options):
        file.write("<svg/>") if isinstance(file, io.StringIO) else Path(file).write_bytes(b"x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield
