"""What a run is told besides the settings of `wide.config`: frozen dataclasses, one per group of flags. No torch."""

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from wide.config import ObjectiveConfig, RecoverConfig, Seed, Sparsity, StageConfig, WideConfig
from wide.data.corpus import reads, require_found
from wide.data.local_names import missing_folder
from wide.errors import ConfigError
from wide.methods.catalogue import Match, WideMethodConfig, get
from wide.schema import Between, Checked, Positive

T = TypeVar("T")
WeightsFormat = Literal["model", "int8", "w8a8"]
Parallel = Literal["auto", "replicate", "fsdp"]
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(Checked):
    """The base model.

    Args:
        model: Hub name, local folder or GGUF file of the base model; remote code is never run.
        dtype: Type of the base weights; routers and LoRA stay float32.
        device: 'auto' is the GPU where there is one, else the CPU; or cpu, cuda, cuda:1, ...
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"

    def require_found(self) -> None:
        """Refuse a model that can be loaded from nowhere, before seconds go into importing what would load it.

        Raises ConfigError if there is no such folder, and the hub does not have the name or does not answer.
        """
        wrong = missing_folder(self.model)
        if wrong is not None:
            raise ConfigError(wrong)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(ModelOptions):
    """A run that trains and writes into a folder.

    Args:
        data: Text to train on: 'python-docs'; a file, folder or glob (.txt .md .csv .tsv .json .jsonl .parquet, also
            .gz .zst); a folder that save_to_disk wrote; the name of a Hugging Face data set, with its configuration
            after a colon; or a mixture, NAME=SHARE,NAME=SHARE.
        output: Folder for adapter, records, report, checkpoints and the resolved configuration.
        description: What this run is, in a sentence; shown in the report.
        text_field: Field that holds the text, or a chat's messages, where rows have fields.
        max_documents: Train on only so many documents, the first ones; null means all.
        cache: Folder where packed tokens are built once, kept and memory-mapped; null packs them into memory.
        report: Draw report.html and figures (needs matplotlib).
        tensorboard: Also write the curves of training to OUTPUT/tensorboard; null writes them if tensorboard is
            installed.
        tracker: Also send the curves to a service, wandb or trackio, each configured in its own way (for example
            WANDB_MODE=offline); null sends nothing.
        parallel: What each process that torchrun started holds of the base: 'replicate' all of it, 'fsdp' a share,
            'auto' all of it if base and activations fit the smallest GPU.
    """

    data: str
    output: str
    description: str = ""
    text_field: str = "text"
    max_documents: Annotated[int, Between(1, hint="null means all")] | None = None
    cache: str | None = None
    report: bool = True
    tensorboard: bool | None = None
    tracker: Literal["wandb", "trackio"] | None = None
    parallel: Parallel = "auto"

    def require_found(self) -> None:
        """Refuse a model or text that can be loaded from nowhere, and folders that would become part of the text.

        Raises ConfigError if there is no such model, or `output` or `cache` lies in a folder that `data` reads;
        DataError if there is no such text.
        """
        ModelOptions.require_found(self)
        for name in ("output", "cache"):
            folder = getattr(self, name)
            if folder is not None and reads(self.data, Path(folder).expanduser()):
                raise ConfigError(
                    f"{name} {folder} is inside a folder that data {self.data} reads, so it would become text; "
                    "choose another one"
                )
        # What was packed before needs no source.
        if self.cache is None:
            require_found(self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions(Checked):
    """The evaluation on held-out text.

    Args:
        data: Held-out text, written like a training source. Null after training means what the run held out of its
            training source: the test or validation split if there is one, otherwise one document in ten, or the last
            tenth of each of a few documents.
        split: Split of that source; null means 'heldout' of 'python-docs' and of a mixture, 'test' of a Hugging Face
            data set, and all documents of files.
        tokens: How many tokens to score; 0 switches the evaluation off, null scores all.
        window: Tokens that the model sees at once.
        stride: Tokens by which the window moves; null means disjoint windows.
        batch_size: Windows per forward.
    """

    data: str | None = None
    split: str | None = None
    tokens: Annotated[int, Between(0, hint="0 switches the evaluation off")] | None = 65_536
    window: int = 1024
    stride: int | None = None
    batch_size: Positive = 4

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.window < 2 or (self.stride is not None and not 1 <= self.stride <= self.window):
            raise ConfigError(
                f"window={self.window} and stride={self.stride}: wanted 1 <= stride <= window, window >= 2"
            )

    def require_found(self) -> None:
        """Refuse text that can be read from nowhere; raises DataError if there is no such text."""
        if self.data is not None and self.tokens != 0:
            require_found(self.data)

    @property
    def protocol(self) -> dict[str, Any]:
        """How `wide.evaluate` is to read the text; all of it where `tokens` is None."""
        windows = None if self.tokens is None else max(1, self.tokens // (self.stride or self.window))
        return {"window": self.window, "stride": self.stride, "batch_size": self.batch_size, "max_windows": windows}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTasks(Checked):
    """Tasks on which models are evaluated.

    Args:
        tasks: Tasks of lm-evaluation-harness, separated by commas: wikitext, arc_easy, arc_challenge, boolq,
            winogrande, piqa, openbookqa, hellaswag; empty leaves them out.
        local_data: Folder with copies of the tasks' data; null loads them from the Hugging Face hub.
        limit: Items of each task; null means all.
    """

    tasks: str = ""
    local_data: str | None = None
    limit: Annotated[int, Between(1, hint="null means all items of each task")] | None = None

    @property
    def names(self) -> list[str]:
        """The tasks by name."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    @property
    def protocol(self) -> dict[str, Any]:
        """What `wide.evaluate` is to do about tasks."""
        return {"tasks": self.names, "local_data": self.local_data, "limit": self.limit}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions(Checked):
    """A sample of generated text for the report.

    Args:
        prompt: Its beginning; empty writes no sample.
        tokens: Tokens to generate.
    """

    prompt: str = ""
    tokens: Annotated[int, Between(1, hint="an empty prompt writes no sample")] = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions(ModelOptions):
    """A base model and, usually, its adapter.

    Args:
        adapter: Folder of an adapter (or a run's folder that holds one), or its name on the Hub; null leaves the model
            dense.
        sparsity: Share of groups to skip, by the adapter's calibrated thresholds; null keeps what the adapter says.
    """

    adapter: str | None = None
    sparsity: Sparsity | None = None

    def require_found(self) -> None:
        """Refuse a model as `ModelOptions` does, and a sparsity where nothing has thresholds (ConfigError)."""
        ModelOptions.require_found(self)
        if self.sparsity is not None and self.adapter is None:
            from wide.models.pretrained import is_pruned_checkpoint  # Brings torch; full checkpoints have thresholds.

            if not is_pruned_checkpoint(self.model):
                raise ConfigError("sparsity is set by an adapter's calibrated thresholds: give --adapter, too")


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceOptions(AdapterOptions):
    """A model that generates text.

    Args:
        backend: 'auto' runs `wide.optimize` if there is a GPU and the engine takes the model; 'triton' and 'torch'
            (the reference, slow) name the operators and raise errors instead; 'none' runs masked.
        weights: Format of the linear layers' weights under the operators; 'int8' is made of the model's own;
            'w8a8' also quantises the inputs of products with more than 16 tokens.
    """

    backend: Literal["auto", "triton", "torch", "none"] = "auto"
    weights: WeightsFormat = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions(Checked):
    """The server, of transformers.

    Args:
        host: Address to listen at; 0.0.0.0 lets other machines in.
        port: Port to listen at.
        name: What clients call the model; null takes --model as it is written.
        api_key: What clients must send as their API key; null lets everybody in.
        allowed_hosts: Names of this server that clients may use, separated by commas; null takes any, but at an address
            of this machine alone only those of this machine.
        request_timeout: Seconds that a request may take, waiting included.
        continuous_batching: Let requests share forwards over paged caches, instead of one `generate` after the other.
        cb_max_batch_tokens: Tokens of a shared forward at most; null leaves it to transformers, as below.
        cb_num_blocks: Blocks of the paged cache.
        cb_block_size: Tokens in a block.
        cb_max_memory_percent: Share of the GPU's memory that the paged cache may take.
        cb_use_cuda_graph: Whether shared forwards are replayed from CUDA graphs.
    """

    host: str = "localhost"
    port: Annotated[int, Between(1, 65535)] = 8000
    name: str | None = None
    api_key: str | None = None
    allowed_hosts: str | None = None
    request_timeout: Annotated[float, Between(0, without="low")] = 600.0
    continuous_batching: bool = False
    cb_max_batch_tokens: int | None = None
    cb_num_blocks: int | None = None
    cb_block_size: int | None = None
    cb_max_memory_percent: float | None = None
    cb_use_cuda_graph: bool | None = None

    def hosts(self) -> list[str]:
        """Return the names of the server that clients may use; '*' is any."""
        if self.allowed_hosts is not None:
            return [name.strip() for name in self.allowed_hosts.split(",")]
        return list(_THIS_MACHINE) if self.host in _THIS_MACHINE else ["*"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions(Checked):
    """How text is generated.

    Args:
        max_new_tokens: Tokens to generate at most.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: Sample from the smallest set of tokens with this probability, in (0, 1].
        seed: Of sampling.
    """

    max_new_tokens: Positive = 128
    temperature: Annotated[float, Between(0, hint="0 takes the likeliest token")] = 0.0
    top_p: Annotated[float, Between(0, 1, without="low")] = 1.0
    seed: Seed = 17


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions(Checked):
    """Whether LoRA is trained, and whether on the dense model, too.

    Args:
        steps: Optimiser steps of stage 2; 0 leaves stage 2 out.
        dense_baseline: Also train the same LoRA on the dense model and evaluate it, so that what LoRA learns of the
            text is on both sides of the comparison.
    """

    steps: Annotated[int, Between(0, hint="0 leaves LoRA out")] = 0
    dense_baseline: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What any run is told; without `recover` there is no stage 2."""

    run: RunOptions
    objective: ObjectiveConfig
    recover: RecoverConfig | None
    dense_baseline: bool = False
    scoring: EvalOptions
    sample: SampleOptions

    @property
    def max_tokens(self) -> int:
        """Tokens of training text that the run can use."""
        return 0 if self.recover is None else self.recover.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest(RunRequest):
    """What one `wide prune` is told.

    Args:
        match: What the sparsity counts, for methods other than 'wide' at 'nominal', which counts by the objective.
        stage: Stage 1; of methods that train nothing, the length of calibration text and the seed.
    """

    method: str
    match: Match
    settings: Any
    stage: StageConfig

    @property
    def max_tokens(self) -> int:
        """Tokens of training text that the run can use."""
        read = self.stage.num_tokens if get(self.method).trains else calibration_tokens(self.settings, self.stage)
        return read + (0 if self.recover is None else self.recover.num_tokens)

    @property
    def is_papers(self) -> bool:
        """Whether this is stage 1 of the paper, which has its own objective, rather than a row of the benchmark."""
        return isinstance(self.settings, WideConfig) and not isinstance(self.settings, WideMethodConfig)


def calibration_tokens(settings: Any, stage: StageConfig) -> int:
    """Return how many tokens of text a method's settings ask for, at most."""
    blocks = getattr(settings, "num_windows", None) or getattr(settings, "steps", 0) * getattr(
        settings, "batch_size", 0
    )
    return blocks * stage.sequence_length + sum(getattr(settings, "stage_tokens", ()))


@contextmanager
def flags_named(group: str, *, of: Container[str], not_of: Container[str] = ()) -> Iterator[None]:
    """Put a group's name before the setting with which the message of an error begins, as its flag has it.

    Args:
        group: Prefix of the flags; empty leaves messages as they are.
        not_of: Settings that may be refused with them and have flags elsewhere.

    Raises:
        ConfigError: What was raised inside, with that name.
    """
    try:
        yield
    except ConfigError as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        if not group or name in not_of:
            raise
        raise type(error)(f"{group}.{error}" if name in of else f"{group}: {error}") from error


def build(cls: type[T], values: Mapping[str, Any], *, group: str = "", **changes: Any) -> T:
    """Return a dataclass from the parsed values of its fields; keys that are not its fields are ignored.

    Raises ConfigError if a value is out of its range; the message names it as its flag does.

    Args:
        group: Prefix of its flags, e.g. 'train'; empty for everyday flags.
        changes: Values that win.
    """
    if group:
        values = values.get(group.replace("-", "_"), {})
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    with flags_named(group, of=names - set(changes), not_of=changes):
        return cls(**({key: value for key, value in values.items() if key in names} | changes))
