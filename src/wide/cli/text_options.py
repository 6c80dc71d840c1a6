"""How text is generated, as flags."""

from dataclasses import dataclass

from wide.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What is continued.

    Args:
        prompt: The beginning of the text.
    """

    prompt: str


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
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")
