"""What training needs of memory, calculated from a model's structure, and what to change where it does not fit.

Fitted to peaks measured on a GPU at the shapes of Llama-3.1-8B with 4096 tokens, eager, compiled, recomputed, with and
without LoRA; `tests/training/test_memory.py` holds them. A CPU needs up to 1.2 times that, with LoRA up to 1.8 times.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wide.config import RecoverConfig, StageConfig
from wide.errors import TrainingError, is_out_of_memory
from wide.grouping import divisors
from wide.models.attach import attachment, is_attached
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.pretrained import is_added
from wide.models.router import Router
from wide.models.sharding import is_sharded
from wide.training.token_loss import ELEMENTS_PER_CHUNK
from wide.training.trainer import micro_batch_size

# What the allocator cannot use, workspaces of libraries, and what the calculation leaves out.
USABLE = 0.92
# Parameter, gradient and two moments, float32, of each trained value.
_TRAINED = 16
# Routers of a layer, values: two of rank 32, whose input is as wide as the layer's.
_ROUTERS = 2 * 32 * 1.1
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Bytes of one GPU, or of the host: weights, activations that layers keep for the backward, and optimizer.

    `optimizer` is routers and LoRA with gradients and moments; `logits` those of a chunk of tokens, with what their
    loss takes, or what the backward of a layer takes, if that is more.
    """

    weights: int
    activations: int
    logits: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.activations + self.logits + self.optimizer

    def fits(self, available: int) -> bool:
        """Return whether so many bytes can hold it."""
        return self.total <= USABLE * available

    def __str__(self) -> str:
        names = ("weights", "activations", "logits", "optimizer")
        parts = ", ".join(f"{name} {getattr(self, name) / _GIB:.3g}" for name in names)
        return f"{self.total / _GIB:.3g} GiB ({parts})"


def needed(
    model: Any,
    stage: StageConfig,
    *,
    distils: bool = False,
    dtype: str = "auto",
    world: int = 1,
    shards: int | None = None,
) -> Need:
    """Return what each of `world` processes that share a batch needs of its GPU.

    Args:
        model: Attached or not; may be without weights (`load_skeleton`).
        distils: Whether the loss compares with the dense model.
        dtype: Of the base, as for `load_pretrained`; 'auto' is that of the model's configuration.
        shards: Processes that share the base, 1 where each has the whole; None means all where FSDP shards the model.
    """
    stored = model.config.dtype if dtype == "auto" else dtype
    # What was saved in this process has a name there.
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    size, specs = (stored or torch.float32).itemsize, _specs(model)
    shards = shards or (world if is_sharded(model) else 1)
    head = model.get_output_embeddings().weight
    counts = [_weight_bytes(spec.layer, size) for spec in specs]
    weights = base = _weight_bytes(model, size)
    if shards > 1:
        # Two layers are whole at a time, and what lies outside of layers.
        weights = sum(counts) // shards + 2 * max(counts) + base - sum(counts)
    tokens = micro_batch_size(stage, world) * stage.sequence_length
    layers = [tokens * _kept(spec, stage, size) for spec in specs]
    width = max(0 if spec.ffn is None else spec.ffn.width for spec in specs)
    activations = sum(layers)
    if stage.gradient_checkpointing:
        activations = tokens * size * sum(spec.hidden_size for spec in specs) + max(layers)
    # Beside them the dense model's, as they are and in float32 as logarithms and probabilities.
    each = 3 * size + 4 + distils * (size + 8)
    logits = min(tokens * len(head), ELEMENTS_PER_CHUNK) * each
    routers = [p.numel() for module in model.modules() if isinstance(module, Router) for p in module.parameters()]
    trained = sum(routers) if routers else int(sum(_ROUTERS * spec.hidden_size for spec in specs))
    if isinstance(stage, RecoverConfig):
        trained += stage.lora_rank * sum(inputs + outputs for spec in specs for inputs, outputs in _sizes(spec))
    return Need(
        weights=weights,
        activations=activations,
        logits=max(logits, 3 * size * tokens * width),
        optimizer=_TRAINED * trained,
    )


def _specs(model: Any) -> Sequence[BlockSpec]:
    """Return the layers of a model, those that its owner described where it is attached with them."""
    return attachment(model).specs if is_attached(model) else discover(model)


def _weight_bytes(module: torch.nn.Module, size: int) -> int:
    """Return the bytes of a module's part of the base; of a value that is not there yet, `size`."""
    own = (parameter for name, parameter in module.named_parameters() if not is_added(name))
    # What is quantised has a size of its own.
    return sum(p.numel() * (size if p.is_meta else p.element_size()) for p in own)


def _kept(spec: BlockSpec, stage: StageConfig, size: int) -> int:
    attention, ffn, hidden = spec.attention, 0 if spec.ffn is None else spec.ffn.width, spec.hidden_size
    heads = 2 * attention.query_width + 2 * attention.num_kv_heads * attention.head_dim
    if stage.compile:
        # The streams before the norms and what routers read; gate and up.
        kept = size * (4 * hidden + heads + 2 * ffn)
    else:
        # Norms keep a float32 copy; the activation is kept before and after its mask, too.
        kept = 2 * (4 + size) * hidden + size * (heads + 4 * ffn)
    if isinstance(stage, RecoverConfig):
        # What dropout leaves of the input of each linear, and where it left it.
        kept += (size + bool(stage.lora_dropout)) * sum(inputs for inputs, _ in _sizes(spec))
    return kept


def _sizes(spec: BlockSpec) -> list[tuple[int, int]]:
    linears: list[Any] = [*spec.attention.linears(), *([] if spec.ffn is None else spec.ffn.linears())]
    return [(linear.in_features, linear.out_features) for linear in linears]


def step_flops(model: Any, stage: StageConfig) -> float:
    """Return the FLOP of an optimiser step of all processes: matrix products and attention, forward and backward.

    The frozen base needs gradients of its inputs alone, so that a backward costs what a forward does.
    """
    specs, head = _specs(model), model.get_output_embeddings().weight
    linear = sum(2.0 * inputs * outputs for spec in specs for inputs, outputs in _sizes(spec))
    scores = sum(2.0 * spec.attention.query_width * stage.sequence_length for spec in specs)
    each = 2.0 * linear + 3.5 * scores + 4.0 * head.numel()
    if stage.gradient_checkpointing:
        each += linear + scores
    if isinstance(stage, RecoverConfig):
        each += 6.0 * stage.lora_rank * sum(sum(sizes) for spec in specs for sizes in _sizes(spec))
    return each * stage.batch_size * stage.sequence_length


def memory_of(device: torch.device) -> tuple[int, str]:
    """Return the bytes that this process can have of a device, those that it holds included, and that in words."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = free + torch.cuda.memory_reserved(device)
        if available > USABLE * total:
            return available, f"the GPU has {total / _GIB:.1f}"
        return available, f"the GPU has {available / _GIB:.1f} free of {total / _GIB:.1f}, others hold the rest"
    available = _host_memory()
    return available, f"this machine has {available / _GIB:.1f} free"


def _host_memory() -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(facts["MemAvailable"].split()[0])
        own = page * int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, KeyError):
        # Not Linux.
        return page * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    # A container may have less than its host; it has "max" where it may have all.
    with suppress(OSError, ValueError):
        held = int((group / "memory.current").read_text())
        held -= int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"])
        free = min(free, int((group / "memory.max").read_text()) - held)
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + own


def way_out(
    model: Any, stage: StageConfig, device: torch.device, *, distils: bool = False, dtype: str = "auto", world: int = 1
) -> str:
    """Return in a sentence what a stage needs and which settings fit a device; arguments as for `needed`."""
    (available, place), on_gpu = memory_of(device), device.type == "cuda"
    group = "recover" if isinstance(stage, RecoverConfig) else "train"
    told: dict[str, Any] = {"distils": distils, "dtype": dtype}
    need, changed = needed(model, stage, world=world, **told), stage
    said = f"this stage needs about {need}, and {place}"
    flags: dict[str, str] = {}
    rows = micro_batch_size(stage, world)
    tried: list[tuple[str, Any]] = [("micro_batch_size", size) for size in reversed(divisors(rows)) if size < rows]
    # Compiling saves a CPU nothing that was measured.
    ways = ("compile", "gradient_checkpointing") if on_gpu else ("gradient_checkpointing",)
    tried += [(name, True) for name in ways if not getattr(stage, name)]
    for name, value in tried:
        changed = replace(changed, **{name: value})
        flags[name] = f"--{group}.{name} {str(value).lower()}"
        need = needed(model, changed, world=world, **told)
        if need.fits(available):
            return f"{said}; with {' '.join(flags.values())} it is about {need.total / _GIB:.1f} GiB"
    for shards in divisors(stage.batch_size) if on_gpu else ():
        need = needed(model, changed, world=shards, shards=shards, **told)
        if shards > 1 and need.fits(available):
            with_flags = " ".join([*flags.values(), "--parallel fsdp"])
            return f"{said}; on {shards} such GPUs with {with_flags} it is about {need.total / _GIB:.1f} GiB each"
    larger = "larger GPUs" if on_gpu else "a machine with more"
    return f"{said}; take {larger}, or a shorter --{group}.sequence_length"


@contextmanager
def saying_what_fits(title: str, model: Any, stage: StageConfig, *, distils: bool, world: int) -> Iterator[None]:
    """Raise TrainingError, which says what would fit, where the memory is full inside the block, or a host's would be.

    A host whose memory is full ends the process without a word.
    """
    device = next(model.parameters()).device
    told: dict[str, Any] = {"distils": distils, "world": world}
    require_room(title, model, stage, device, **told)
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"{title}: the memory is full: {way_out(model, stage, device, **told)}; checkpoints that were written are "
            "kept"
        ) from error


def require_room(
    title: str,
    model: Any,
    stage: StageConfig,
    device: torch.device,
    *,
    shards: int | None = None,
    on_gpus: bool = False,
    **told: Any,
) -> None:
    """Raise TrainingError, which says what would fit, if the memory of the host is too small for a stage on `device`.

    A quantised model without weights has no size that is known, and is not checked. With `on_gpus` GPUs are checked,
    too, which say themselves when they are full. `told` are `distils`, `dtype` and `world` of `needed`.
    """
    if (device.type == "cuda" and not on_gpus) or hasattr(model.config, "quantization_config"):
        return
    if not needed(model, stage, shards=shards, **told).fits(memory_of(device)[0]):
        raise TrainingError(f"{title}: {way_out(model, stage, device, **told)}")
