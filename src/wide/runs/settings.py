"""What a run is told besides the settings of `wide.config`: frozen dataclasses, one per group of flags. No torch."""

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig
from wide.errors import ConfigError, UsageError
from wide.methods.catalogue import Match, WideMethodConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The base model.

    Args:
        model: Hub name or local folder of the base model; remote code is never run.
        dtype: Type of the base weights; routers and LoRA stay float32.
        device: 'auto' is the GPU where there is one, else the CPU; or cpu, cuda, cuda:1, ...
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(ModelOptions):
    """A run that trains and writes into a folder.

    Args:
        data: Text to train on: 'python-docs'; a file, folder or glob (.txt .md .json .jsonl .parquet, also .gz .zst);
            or the name of a Hugging Face data set, with its configuration after a colon.
        output: Folder for adapter, records, report, checkpoints and the resolved configuration.
        description: What this run is, in a sentence; shown in the report.
        text_field: Field that holds the text, where rows have fields.
        max_documents: Train on only so many documents, the first ones; null means all.
        cache: Folder where packed tokens are built once, kept and memory-mapped; null packs them into memory.
        report: Draw report.html, report.png and figures (needs matplotlib).
        tensorboard: Write the curves of training for TensorBoard, too, into OUTPUT/tensorboard; null writes them where
            tensorboard is installed.
        tracker: Keep the curves with a service, too: wandb or trackio, each configured by its own means (for example
            WANDB_MODE=offline); null keeps them here.
    """

    data: str
    output: str
    description: str = ""
    text_field: str = "text"
    max_documents: int | None = None
    cache: str | None = None
    report: bool = True
    tensorboard: bool | None = None
    tracker: Literal["wandb", "trackio"] | None = None

    def __post_init__(self) -> None:
        """Refuse to train on no documents."""
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"max_documents must be at least 1 or null, got {self.max_documents}; null means all")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The evaluation on held-out text.

    Args:
        data: Source of held-out text, named as a training source is; where a run trains, null means the held-out
            documents (one in ten) of its training source, which are then not trained on.
        split: Split of that source; null means 'heldout' of 'python-docs' and 'test' of a Hugging Face data set, and
            all documents of files.
        tokens: How many tokens to score; 0 switches the evaluation off, null scores all.
        window: Tokens that the model sees at once.
        stride: Tokens by which the window moves; null means disjoint windows.
        batch_size: Windows per forward.
        untrained: Evaluate untrained routers at the same sparsity too, for comparison.
    """

    data: str | None = None
    split: str | None = None
    tokens: int | None = 65_536
    window: int = 1024
    stride: int | None = None
    batch_size: int = 4
    untrained: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be scored."""
        if self.window < 2 or (self.stride is not None and not 1 <= self.stride <= self.window):
            raise ConfigError(
                f"window={self.window} and stride={self.stride}: wanted 1 <= stride <= window, window >= 2"
            )
        if self.tokens is not None and self.tokens < 0:
            raise ConfigError(f"tokens must not be negative, got {self.tokens}; 0 switches the evaluation off")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def protocol(self) -> dict[str, Any]:
        """How `wide.evaluate` is to read the text; all of it where `tokens` is None."""
        windows = None if self.tokens is None else max(1, self.tokens // (self.stride or self.window))
        return {
            "window": self.window,
            "stride": self.stride,
            "batch_size": self.batch_size,
            "max_windows": windows,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTasks:
    """Tasks on which models are evaluated.

    Args:
        tasks: Tasks of lm-evaluation-harness, separated by commas: wikitext, arc_easy, arc_challenge, boolq,
            winogrande, piqa, openbookqa, hellaswag; empty leaves them out.
        local_data: Folder with copies of the tasks' data; null loads them from the Hugging Face hub.
        limit: Items of each task; null means all.
    """

    tasks: str = ""
    local_data: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse to score nothing of a task."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1 or null, got {self.limit}; null means all items of each task")

    @property
    def names(self) -> list[str]:
        """The tasks by name."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    @property
    def protocol(self) -> dict[str, Any]:
        """What `wide.evaluate` is to do about tasks."""
        return {"tasks": self.names, "local_data": self.local_data, "limit": self.limit}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """A sample of generated text for the report.

    Args:
        prompt: Its beginning; empty writes no sample.
        tokens: Tokens to generate.
    """

    prompt: str = ""
    tokens: int = 60

    def __post_init__(self) -> None:
        """Refuse a sample without tokens."""
        if self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1, got {self.tokens}; an empty prompt writes no sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions(ModelOptions):
    """A base model and, usually, its adapter.

    Args:
        adapter: Folder of an adapter (or a run's folder that holds one); null leaves the model dense.
        sparsity: Share of groups to skip, by the adapter's calibrated thresholds; null keeps what the adapter says.
    """

    adapter: str | None = None
    sparsity: float | None = None

    def __post_init__(self) -> None:
        """Refuse a sparsity without an adapter, or beyond its range."""
        if self.sparsity is not None and self.adapter is None:
            raise ConfigError("sparsity is set by an adapter's calibrated thresholds: give --adapter, too")
        if self.sparsity is not None and not 0.0 <= self.sparsity < 1.0:
            raise ConfigError(f"sparsity must lie in [0, 1), got {self.sparsity}; 0.5 skips half of the work")


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceOptions(AdapterOptions):
    """A model that generates text.

    Args:
        backend: 'auto' installs operators that skip where there is a GPU, if the model can run them; 'triton' and
            'torch' (the reference, slow) insist on them; 'none' leaves the masks.
    """

    backend: Literal["auto", "triton", "torch", "none"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """The server, of transformers.

    Args:
        host: Address to listen at; 0.0.0.0 lets other machines in.
        port: Port to listen at.
        name: What clients call the model; null takes --model as it is written.
        continuous_batching: Let requests share forwards over paged caches, instead of one `generate` after the other.
        cb_max_batch_tokens: Tokens of a shared forward at most; null leaves it to transformers, as below.
        cb_num_blocks: Blocks of the paged cache.
        cb_block_size: Tokens in a block.
        cb_max_memory_percent: Share of the GPU's memory that the paged cache may take.
        cb_use_cuda_graph: Whether shared forwards are replayed from CUDA graphs.
        chat_template_kwargs: JSON of further values for the chat template, for every request.
        enable_cors: Let web pages of any origin ask.
        default_seed: Of sampling.
    """

    host: str = "localhost"
    port: int = 8000
    name: str | None = None
    continuous_batching: bool = False
    cb_max_batch_tokens: int | None = None
    cb_num_blocks: int | None = None
    cb_block_size: int | None = None
    cb_max_memory_percent: float | None = None
    cb_use_cuda_graph: bool | None = None
    chat_template_kwargs: str | None = None
    enable_cors: bool = False
    default_seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no port."""
        if not 0 < self.port < 65536:
            raise ConfigError(f"port must lie in [1, 65535], got {self.port}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """How text is generated.

    Args:
        max_new_tokens: Tokens to generate at most.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: Sample from the smallest set of tokens with this probability, in (0, 1].
        seed: Of sampling.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 17

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must not be negative, got {self.temperature}; 0 takes the likeliest token")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2**63), got {self.seed}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """Whether LoRA is trained, and on what beside the pruned model.

    Args:
        steps: Optimiser steps of stage 2; 0 leaves stage 2 out.
        dense_baseline: Train the same LoRA on the dense model, too, and evaluate it: what LoRA learns of the text is
            then on both sides of the comparison.
    """

    steps: int = 0
    dense_baseline: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no number of steps."""
        if self.steps < 0:
            raise UsageError(f"steps must not be negative, got {self.steps}; 0 leaves LoRA out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What any run is told.

    Args:
        run: Model, data, output.
        recover: Stage 2; None leaves it out.
        dense_baseline: Whether the dense model is given the same LoRA, for comparison.
        scoring: Evaluation on held-out text.
        sample: Generated text for the report.
    """

    run: RunOptions
    recover: RecoverConfig | None
    dense_baseline: bool = False
    scoring: EvalOptions
    sample: SampleOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest(RunRequest):
    """What one `wide prune` is told.

    Args:
        method: Name of the method that decides.
        match: What the sparsity counts, for methods other than 'wide' at 'nominal', which counts by the objective.
        settings: Of the method; for 'wide' at 'nominal' its groups and routers.
        objective: Sparsity and loss.
        stage: Stage 1; of methods that train nothing, the length of calibration text and the seed.
    """

    method: str
    match: Match
    settings: Any
    objective: ObjectiveConfig
    stage: StageConfig

    @property
    def is_papers(self) -> bool:
        """Whether this is stage 1 of the paper, which has its own objective, rather than a row of the benchmark."""
        return isinstance(self.settings, WideConfig) and not isinstance(self.settings, WideMethodConfig)


@contextmanager
def flags_named(group: str, *, of: Container[str], not_of: Container[str] = ()) -> Iterator[None]:
    """Put a group's name before the setting with which the message of an error begins, as its flag has it.

    Args:
        group: Prefix of the flags; empty leaves messages as they are.
        of: The settings that belong to the group.
        not_of: Settings that may be refused with them and have flags elsewhere.

    Raises:
        ConfigError: What was raised inside, with that name.
    """
    try:
        yield
    except ConfigError as error:
        first = re.match(r"\w*", str(error))
        name = first[0] if first else ""
        if not group or name in not_of:
            raise
        raise type(error)(f"{group}.{error}" if name in of else f"{group}: {error}") from error


def build(cls: type[T], values: Mapping[str, Any], *, group: str = "", **changes: Any) -> T:
    """Return a dataclass from the parsed values of its fields; keys that are not its fields are ignored.

    Args:
        cls: The dataclass.
        values: All values.
        group: Prefix of its flags, e.g. 'train'; empty for everyday flags.
        changes: Values that win.

    Raises:
        ConfigError: If a value is out of its range; the message names it as its flag does.
    """
    if group:
        values = values.get(group.replace("-", "_"), {})
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    with flags_named(group, of=names - set(changes), not_of=changes):
        return cls(**({key: value for key, value in values.items() if key in names} | changes))
