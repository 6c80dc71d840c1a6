"""`wide profile`: time a whole model on a GPU, dense beside routed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wide.cli.arguments import Arguments, build
from wide.cli.gpu import require_gpu
from wide.cli.provenance import noted
from wide.errors import ConfigError, DataError, EvaluationError, UsageError
from wide.runs.folder import ADAPTER, CELLS
from wide.runs.process import say

PROFILE = "profile"
"""Folder of a run or a cell that holds its speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What is timed.

    Args:
        out: Folder for endtoend.json; wide report draws it, and beside a run's quality if it is RUN/profile. Null with
            a comparison, whose cells keep their own.
        model: Hub name or local folder of a real model; null takes a shape with random weights.
        adapter: Folder of its routers, or of a static plan, which is then materialised; null takes random routers.
        checkpoint: Folder of what wide.materialise left of the model, to be timed beside it; not with an adapter.
        comparison: Folder of a wide compare: what each of its cells keeps is timed, one after the other, into the
            cell's folder, without energy and breakdown; wide report draws the comparison's quality against its speed.
            Cells that were timed before are left alone.
        text: File whose beginning is the prompt, so that an adapter's routers decide as they do on text; null takes
            random tokens.
        shape: Model with random weights: llama-3.1-8b or tiny; null means llama-3.1-8b. Not with a model.
        layers: Only so many layers of the shape; null means all. Not with a model.
        batch: Sequences, one or more numbers separated by commas.
        prompt: Tokens of the prompt, one or more numbers separated by commas.
        generate: Tokens to generate.
        rates: Shares skipped by random masks in attention and FFN, 'A,F'; several pairs are separated by spaces. With
            an adapter's routers their own decisions are timed as well, and in a third run nothing is skipped. Of no
            matter to static plans and checkpoints.
        ffn_group_size: Channels in a group of the FFN, where routers are random; null means 128. Not with an adapter, a
            checkpoint or a comparison.
        compiled_peer: Race the compiled Hugging Face model, too; not with static plans and checkpoints.
        optimised: Race the Hugging Face model itself instead of the runtime: dense, masked, and after wide.optimize,
            each in a CUDA graph; the routers decide.
        quick: Fewer samples.
        description: What this profile is for, in a sentence.
    """

    out: str | None = None
    model: str | None = None
    adapter: str | None = None
    checkpoint: str | None = None
    comparison: str | None = None
    text: str | None = None
    shape: str | None = None
    layers: int | None = None
    batch: str = "1"
    prompt: str = "2048"
    generate: int = 128
    rates: str = "0.5,0.5"
    ffn_group_size: int | None = None
    compiled_peer: bool = False
    optimised: bool = False
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
    _check(options)
    cells = [] if options.comparison is None else _cells(Path(options.comparison))
    require_gpu("profile")
    if options.comparison is not None:
        _time_cells(options, cells, given)
        return
    from wide.profiling.endtoend import main

    with noted(Path(str(options.out)), "profile", given):
        red = main([*_arguments(options), "--out", str(options.out), "--energy"])
    if red:
        raise EvaluationError("the runtime does not compute what the model computes; see the gate above")


def _check(options: ProfileOptions) -> None:
    if options.shape is not None:
        from wide.profiling.synthetic import SHAPES

        if options.shape not in SHAPES:
            raise UsageError(f"unknown shape {options.shape!r}; choose one of {', '.join(sorted(SHAPES))}, or --model")
    _check_sizes(options)
    for name in ("adapter", "checkpoint", "comparison", "text"):
        if getattr(options, name) is not None and options.model is None:
            raise UsageError(f"--{name} needs its base: give --model, too")
    if options.adapter is not None and options.checkpoint is not None:
        raise UsageError("--checkpoint is timed as it is, so --adapter would change nothing; give one of them")
    if options.checkpoint is not None and options.compiled_peer:
        raise UsageError("--compiled_peer is raced beside routed models only; leave it out with --checkpoint")
    if options.optimised and (options.compiled_peer or options.checkpoint is not None):
        raise UsageError(
            "--optimised races a routed model as Hugging Face runs it; leave out --compiled_peer, --checkpoint"
        )
    if options.comparison is None:
        if options.out is None:
            raise UsageError("--out is missing: name the folder for endtoend.json")
        return
    for name in ("out", "adapter", "checkpoint"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} does not go with --comparison, whose cells say what is timed and keep it")
    for name in ("compiled_peer", "optimised"):
        if getattr(options, name):
            raise UsageError(f"--{name} is raced beside one model; leave it out with --comparison")


def _check_sizes(options: ProfileOptions) -> None:
    """Refuse sizes that something else says already."""
    for name in ("shape", "layers"):
        value = getattr(options, name)
        if value is not None and options.model is not None:
            raise UsageError(
                f"the model says how large it is, and all of it is timed; leave out --{name} (got {value}; null where "
                "a file names it), or --model"
            )
    reasons = {
        "adapter": "the adapter says how large its groups are",
        "comparison": "the adapter of each cell says how large its groups are",
        "checkpoint": "--checkpoint is timed as it is",
    }
    for name, reason in reasons.items():
        if options.ffn_group_size is not None and getattr(options, name) is not None:
            raise UsageError(
                f"{reason}; leave out --ffn_group_size (got {options.ffn_group_size}; null where a file names it)"
            )


def _cells(comparison: Path) -> list[Path]:
    """Return the folders of a comparison's cells that kept an adapter; the dense model is every cell's peer.

    Raises:
        DataError: If there are none.
    """
    found = sorted(path.parent for path in (comparison / CELLS).glob(f"*/{ADAPTER}"))
    cells = [cell for cell in found if not cell.name.startswith("dense-")]
    if not cells:
        raise DataError(
            f"{comparison} holds no cells with adapters; name the --output of a wide compare that kept them "
            "(--keep_adapters true)"
        )
    return cells


def _time_cells(options: ProfileOptions, cells: Sequence[Path], words: Sequence[str]) -> None:
    """Time one cell after the other; what goes wrong with one costs no other.

    Raises:
        EvaluationError: If cells could not be timed; the others are.
    """
    from wide.profiling.endtoend import main

    failed = []
    for number, cell in enumerate(cells, 1):
        out = cell / PROFILE
        if _is_timed(out):
            say(f"[{number}/{len(cells)}] {cell.name}: timed before")
            continue
        say(f"[{number}/{len(cells)}] {cell.name}")
        given = [*_arguments(options), "--adapter", str(cell / ADAPTER), "--out", str(out), "--no-breakdown"]
        try:
            with noted(out, "profile", words):
                red = main(given)
            if red:
                failed.append(f"{cell.name} does not compute what the model computes")
        # Kernels that do not fit a shape have errors of their own kinds.
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
            failed.append(f"{cell.name}: {type(error).__name__}")
    if failed:
        raise EvaluationError(f"{len(failed)} of {len(cells)} cells could not be timed: {'; '.join(failed)}")


def _is_timed(out: Path) -> bool:
    try:
        # The summary comes last; a file that was cut while it was written is measured again.
        return "summary" in json.loads((out / "endtoend.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False


def _arguments(options: ProfileOptions) -> list[str]:
    """Return the command line of the end-to-end bench, without where it writes."""
    given = ["--batch", options.batch, "--prompt", options.prompt]
    given += ["--generate", str(options.generate), "--rates", *options.rates.split()]
    given += [] if options.ffn_group_size is None else ["--ffn-group-size", str(options.ffn_group_size)]
    if options.model is None:
        given += [] if options.shape is None else ["--shape", options.shape]
        given += [] if options.layers is None else ["--layers", str(options.layers)]
    else:
        from wide.runs.sources import find_adapter

        given += ["--model", options.model]
        given += [] if options.text is None else ["--text", options.text]
        given += [] if options.adapter is None else ["--adapter", str(find_adapter(options.adapter))]
        given += [] if options.checkpoint is None else ["--checkpoint", options.checkpoint]
    given += ["--compiled-peer", "default"] if options.compiled_peer else []
    given += ["--optimised"] if options.optimised else []
    return [*given, "--quick"] if options.quick else given
