"""The error of a command line that cannot be understood."""

from wide.errors import ConfigError


class UsageError(ConfigError):
    """A flag, key, command or recipe is unknown, or a value has a wrong type; `wide` exits with 2."""
