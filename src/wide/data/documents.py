"""The noun of this room, a document, and the rule that holds documents out."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text.

    Args:
        name: Says where it comes from; stable, because the split depends on it.
        text: The text, never blank.
    """

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Return whether the document of this name is kept from training (one in ten, by a hash of the name)."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0
