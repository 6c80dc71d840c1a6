"""What `wide profile` is asked for; light, so that flags can be shown without torch."""

from dataclasses import dataclass

from wide.errors import ConfigError


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
        optimised: Race the Hugging Face model itself through its public doors, forward and generate(): dense as loaded,
            masked, and after wide.optimize; the routers decide.
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
            if _shares(pair) is None:
                raise ConfigError(f"rates are pairs of shares in [0, 1) like 0.66,0.285, got {pair!r}")

    @property
    def batches(self) -> list[int]:
        """Sequences."""
        return [int(word) for word in self.batch.split(",")]

    @property
    def prompts(self) -> list[int]:
        """Tokens of prompts."""
        return [int(word) for word in self.prompt.split(",")]

    @property
    def skipped(self) -> list[tuple[float, float]]:
        """Shares that random masks skip, in attention and FFN."""
        return [pair for pair in map(_shares, self.rates.split()) if pair is not None]

    @property
    def name(self) -> str:
        """Of the model; a shape cut to fewer layers is another one, whose figures must not stand for the whole."""
        if self.model is not None:
            return self.model
        shape = self.shape or "llama-3.1-8b"
        return shape if self.layers is None else f"{shape}, {self.layers} layers"


def _shares(text: str) -> tuple[float, float] | None:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        return None
    return (shares[0], shares[1]) if len(shares) == 2 and all(0.0 <= share < 1.0 for share in shares) else None
