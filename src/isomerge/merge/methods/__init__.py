"""Merge methods: one pure function per file. Its keyword-only arguments are its options everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isomerge.merge.methods.linear import linear

METHODS: dict[str, Callable[..., Any]] = {"linear": linear}
