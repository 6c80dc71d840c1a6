"""The settings of each method of the benchmark as frozen dataclasses; the defaults are the originals'.

Like `wide.config`, this file imports no torch, so that the command line is quick.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """The dense model has no settings."""
