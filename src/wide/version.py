"""The version of wide, written into every adapter and record."""

__version__ = "0.1.0"
