"""`wide profile`: time a whole model on a GPU, dense beside routed."""

from collections.abc import Sequence
from dataclasses import dataclass

from wide.cli.arguments import Arguments, build
from wide.cli.gpu import require_gpu
from wide.cli.usage import UsageError
from wide.errors import ConfigError, EvaluationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What is timed.

    Args:
        out: Folder for endtoend.json; wide report draws it, and beside a run's quality if it is RUN/profile.
        model: Hub name or local folder of a real model; null takes --shape with random weights.
        adapter: Folder of its routers, or of a static plan, which is then materialised; null takes random routers.
        checkpoint: Folder of what wide.materialise left of the model, to be timed beside it; not with an adapter.
        shape: Model with random weights: llama-3.1-8b or tiny.
        layers: Only so many layers of the shape; null means all.
        batch: Sequences, one or more numbers separated by commas.
        prompt: Tokens of the prompt, one or more numbers separated by commas.
        generate: Tokens to generate.
        rates: Shares skipped by random masks in attention and FFN, 'A,F'; several pairs are separated by spaces. With
            an adapter's routers their own decisions are timed as well, and in a third run nothing is skipped. Of no
            matter to static plans and checkpoints.
        ffn_group_size: Channels in a group of the FFN, where routers are random.
        compiled_peer: Race the compiled Hugging Face model, too; not with static plans and checkpoints.
        quick: Fewer samples.
        description: What this profile is for, in a sentence.
    """

    out: str
    model: str | None = None
    adapter: str | None = None
    checkpoint: str | None = None
    shape: str = "llama-3.1-8b"
    layers: int | None = None
    batch: str = "1"
    prompt: str = "2048"
    generate: int = 128
    rates: str = "0.5,0.5"
    ffn_group_size: int = 128
    compiled_peer: bool = False
    quick: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be timed."""
        for name in ("batch", "prompt"):
            words = getattr(self, name).split(",")
            if not all(word.strip().isdigit() and int(word) > 0 for word in words):
                raise ConfigError(f"{name} must be positive numbers separated by commas, got {getattr(self, name)!r}")
        if self.generate < 1:
            raise ConfigError(f"generate must be at least 1, got {self.generate}")
        for pair in self.rates.split():
            if not _is_pair(pair):
                raise ConfigError(f"rates are pairs of shares in [0, 1) like 0.66,0.285, got {pair!r}")


def _is_pair(text: str) -> bool:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        return False
    return len(shares) == 2 and all(0.0 <= share < 1.0 for share in shares)


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments(
        "profile",
        "Time prefill (TTFT) and decode steps (TPOT) of a whole model by CUDA-graph replay, dense beside routed, with "
        "time to the last token (TTLT), energy per token (where the GPU counts it), peak memory and a breakdown.",
    )
    flags.add_fields(ProfileOptions)
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If an adapter or checkpoint is named without its model, or flags contradict.
        UnsupportedBackendError: If there is no GPU.
        ConfigError: If the adapter is static and a compiled peer is asked for, or the checkpoint is of another model.
        EvaluationError: If the runtime does not compute what the model computes.
    """
    options = build(ProfileOptions, arguments().parse(given))
    for name in ("adapter", "checkpoint"):
        if getattr(options, name) is not None and options.model is None:
            raise UsageError(f"--{name} needs its base: give --model, too")
    if options.adapter is not None and options.checkpoint is not None:
        raise UsageError("--checkpoint is timed as it is, so --adapter would change nothing; give one of them")
    if options.checkpoint is not None and options.compiled_peer:
        raise UsageError("--compiled_peer is raced beside routed models only; leave it out with --checkpoint")
    require_gpu("profile")
    from wide.profiling.endtoend import main

    if main(_arguments(options)):
        raise EvaluationError("the runtime does not compute what the model computes; see the gate above")


def _arguments(options: ProfileOptions) -> list[str]:
    """Return the command line of the end-to-end bench."""
    given = ["--out", options.out, "--batch", options.batch, "--prompt", options.prompt, "--energy"]
    given += ["--generate", str(options.generate), "--ffn-group-size", str(options.ffn_group_size)]
    given += ["--rates", *options.rates.split()]
    if options.model is None:
        given += ["--shape", options.shape]
        given += [] if options.layers is None else ["--layers", str(options.layers)]
    else:
        from wide.cli.loading import find_adapter

        given += ["--model", options.model]
        given += [] if options.adapter is None else ["--adapter", str(find_adapter(options.adapter))]
        given += [] if options.checkpoint is None else ["--checkpoint", options.checkpoint]
    given += ["--compiled-peer", "default"] if options.compiled_peer else []
    return [*given, "--quick"] if options.quick else given
