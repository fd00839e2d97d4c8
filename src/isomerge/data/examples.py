"""One example of a text data set, before any tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

Label = str | float | tuple[str, ...] | None
"""A class, a number to predict, several classes at once, the tags of the words; None where it is missing."""


@dataclass(frozen=True)
class Example:
    text: str | tuple[str, ...]
    """A text, or the words of a tagged sentence."""
    pair: str | None = None
    """The second text."""
    label: Label = None
