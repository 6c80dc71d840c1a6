"""`wide tune`: measure on this machine's GPU which operator pays at a model's own shapes, for `wide.optimize`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wide.cli.arguments import Arguments
from wide.cli.measuring import require_gpu
from wide.errors import ConfigError, UsageError
from wide.runs.process import say
from wide.runs.settings import WeightsFormat, build
from wide.schema import positive_numbers

if TYPE_CHECKING:
    from wide.inference.choice.tuning.tune import TunedLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What is measured.

    Args:
        model: Hub name or local folder; only its configuration is read, weights are random.
        adapter: Folder of routers, or of a run that holds them, whose groups are measured; null takes the sizes below.
        ffn_group_size: Channels in a group of the FFN; not with an adapter.
        attention_group_size: Channels in a group of the attention; null means the queries of a KV head. Not with an
            adapter.
        rows: Numbers of tokens of a prompt, separated by commas; steps of one to four rows are measured before them.
            The choice for one number holds up to the next larger one.
        executed: Expected shares of (token, group) pairs that execute, 'attention,FFN'; give `wide.optimize` the same.
        output: The table to add to; null means the one that `wide.optimize` reads ($WIDE_CACHE, or the user's cache).
        weights: Their format; with 'int8' prompts multiply as with 'model'.
        quick: Fewer tiles and rounds.
        seconds: No tile is begun after so many seconds, and what was not measured stays dense; null takes its time.
    """

    model: str
    adapter: str | None = None
    ffn_group_size: int | None = None
    attention_group_size: int | None = None
    rows: str = "1024,4096,16384"
    executed: str = "0.5,0.5"
    output: str | None = None
    weights: WeightsFormat = "model"
    quick: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        positive_numbers(self.rows, "rows")
        if len(self.shares) != 2 or not all(0.0 < share <= 1.0 for share in self.shares):
            raise ConfigError(f"executed must be two shares in (0, 1] like 0.34,0.7, got {self.executed!r}")
        if self.adapter is not None and (self.ffn_group_size, self.attention_group_size) != (None, None):
            raise UsageError("the adapter says how large its groups are; leave out --ffn_group_size and its like")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds must be positive, got {self.seconds}; null takes the time that it takes")

    @property
    def shares(self) -> tuple[float, ...]:
        """The expected shares; empty if they are no numbers."""
        try:
            return tuple(float(word) for word in self.executed.split(","))
        except ValueError:
            return ()


def arguments() -> Arguments:
    flags = Arguments(
        "tune",
        "Measure which operator pays at a model's own shapes on this GPU, dense products included; wide.optimize and "
        "wide eval --fused follow it.",
    )
    flags.add_fields(TuneOptions)
    return flags


def run(given: Sequence[str]) -> None:
    options = build(TuneOptions, arguments().parse(given))
    require_gpu("tune")
    import torch

    from wide.inference.choice.tuning.tune import tune_layers
    from wide.kernels.tuning import TuningTable

    table = TuningTable(None if options.output is None else Path(options.output))
    attention, ffn = options.shares
    tuned = tune_layers(
        layers(options),
        device=torch.device("cuda", torch.cuda.current_device()),
        rows=positive_numbers(options.rows, "rows"),
        executed=(attention, ffn),
        quick=options.quick,
        seconds=options.seconds,
        table=table,
        progress=lambda each: say(f"[{each.done}/{each.total}] {each.name}: {each.verdict}"),
    )
    if tuned.left_out:
        say(f"{options.seconds:g} s have passed; not measured, so dense: {'; '.join(tuned.left_out)}")
    say(f"{table.path}: {len(tuned.choices)} choices of which {tuned.num_sparse} skip; wide.optimize follows them")


def layers(options: TuneOptions) -> "list[TunedLayer]":
    """Return the layers whose operators are measured: those in which tokens skip anything."""
    from wide.config import WideConfig
    from wide.inference.choice.tuning.tune import tuned_layers
    from wide.models.attach import plan_for
    from wide.models.discovery import discover
    from wide.models.pretrained import load_skeleton

    specs = discover(load_skeleton(options.model))
    if options.adapter is not None:
        from wide.models.adapter import read_config
        from wide.models.hub import find_adapter

        return tuned_layers(specs, read_config(find_adapter(options.adapter))["plan"], options.weights)
    given: dict[str, Any] = {
        "ffn_group_size": options.ffn_group_size,
        "attention_group_size": options.attention_group_size,
    }
    config = WideConfig(**{name: size for name, size in given.items() if size is not None})
    return tuned_layers(specs, plan_for(config, specs), options.weights)
