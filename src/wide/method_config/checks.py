"""What several settings are checked for."""

from wide.errors import ConfigError


def require_positive(settings: object, *names: str) -> None:
    """Refuse counts below 1.

    Raises:
        ConfigError: If one is.
    """
    for name in names:
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(settings, name)}")


def require_not_negative(settings: object, *names: str) -> None:
    """Refuse values below 0.

    Raises:
        ConfigError: If one is.
    """
    for name in names:
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name} must not be negative, got {getattr(settings, name)}")
