"""What `wide profile` is asked for; light, so that flags can be shown without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from wide.errors import ConfigError
from wide.schema import Between, Checked, Positive, positive_numbers

CALLS = ("forward", "generate")
"""The calls that are timed for each prompt and batch; `generate_batch` has numbers of requests of its own."""
_Tokens = Annotated[int, Between(2, hint="a step is what a token beyond the first takes")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(Checked):
    """What is timed.

    Args:
        output: Folder for endtoend.json; wide report draws it, with the run's quality if it is RUN/profile. Null
            with a comparison, whose cells keep their own.
        model: Hub name or local folder of a real model; null takes a shape with random weights.
        adapter: Folder of its routers, or of a static plan; null takes random routers.
        comparison: Folder of a wide compare: what each of its cells keeps is timed, one after the other, into the
            cell's folder; wide report draws the comparison's quality against its speed. Cells that were timed before
            are left alone.
        text: Text, as wide eval --data takes it, whose beginning is the prompt, so that an adapter's routers decide as
            they do on text; null takes random tokens.
        shape: Model with random weights: llama-3.1-8b or tiny; null means llama-3.1-8b. Not with a model.
        layers: Only so many layers of the shape; null means all. Not with a model.
        batch: Sequences, one or more numbers separated by commas.
        prompt: Tokens of the prompt, one or more numbers separated by commas.
        generate: Tokens to generate.
        calls: forward (a call of the model without a cache), generate (time to the first token, and of each further
            one), or both, separated by commas.
        batched: Numbers of requests at once for generate_batch, separated by commas; null leaves it out.
        batched_generate: Tokens that generate_batch makes for each request, after the first of the prompts.
        sparsities: Shares that random routers skip, separated by commas, 'A/F' where attention and FFN differ; at 0
            everything executes. Adapters stay as they are.
        ffn_group_size: Channels in a group of the FFN, where routers are random; null means 128. Not with an adapter or
            a comparison.
        weights: Format of the linear layers' weights in the engine, pruned and dense: 'model', 'int8' or 'w8a8'; always
            'model' where a plan is static.
        quick: Fewer samples.
        description: What this profile is for, in a sentence.
    """

    output: str | None = None
    model: str | None = None
    adapter: str | None = None
    comparison: str | None = None
    text: str | None = None
    shape: str | None = None
    layers: Positive | None = None
    batch: str = "1"
    prompt: str = "2048"
    generate: _Tokens = 128
    calls: str = "forward,generate"
    batched: str | None = None
    batched_generate: _Tokens = 256
    sparsities: float | str = "0.5"
    ffn_group_size: int | None = None
    weights: Literal["model", "int8", "w8a8"] = "model"
    quick: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _ = self.batches, self.prompts, self.requests  # what is no number is refused now
        if not self.calls_timed or not set(self.calls_timed) <= set(CALLS):
            raise ConfigError(f"calls are {' and '.join(CALLS)}, separated by commas, got {self.calls!r}")
        try:
            right = all(0.0 <= share < 1.0 for pair in self.skipped for share in pair)
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f"sparsities are shares in [0, 1), or pairs like 0.66/0.285, got {self.sparsities!r}")

    @property
    def batches(self) -> list[int]:
        """Numbers of sequences."""
        return positive_numbers(self.batch, "batch")

    @property
    def prompts(self) -> list[int]:
        """Tokens of prompts."""
        return positive_numbers(self.prompt, "prompt")

    @property
    def requests(self) -> list[int]:
        """Requests at once in `generate_batch`."""
        return positive_numbers(self.batched, "batched")

    @property
    def calls_timed(self) -> list[str]:
        """The calls by name."""
        return [word.strip() for word in self.calls.split(",") if word.strip()]

    @property
    def skipped(self) -> list[tuple[float, float]]:
        """Shares that random routers skip, in attention and FFN."""
        pairs = [word.partition("/") for word in str(self.sparsities).split(",")]
        return list(dict.fromkeys((float(first), float(second or first)) for first, _, second in pairs))

    @property
    def name(self) -> str:
        """Of the model; a shape cut to fewer layers is another one, whose figures must not stand for the whole."""
        if self.model is not None:
            return self.model
        shape = self.shape or "llama-3.1-8b"
        return shape if self.layers is None else f"{shape}, {self.layers} layers"
