"""The verdict in one sentence."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

SAME = 0.9  # of the squared distance that alignment takes away: these were one model, or siblings


def sentence(record: dict[str, Any], obstacles: list[str]) -> str:
    """Who they are to each other, and what that means for a merge."""
    who = _names(record["models"])
    verdict, cosine = record["verdict"], record["cosine"]
    near = "" if cosine is None else f" (cosine {cosine:.3g})"
    if verdict == "incompatible":
        more = len(record["reasons"]) - 1
        first = record["reasons"][0].split(". ")[0].rstrip(".")
        return f"{who} cannot be merged: {first}{f', and {more} more' if more else ''}."
    if verdict == "identical":
        return f"{who} hold the same weights: there is nothing to merge."
    if obstacles:
        others = f", and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""
        return f"{who} are {verdict}{near}, but cannot be merged as they are: {obstacles[0].rstrip('.')}{others}."
    words = ", matching tokens by their text" if record["tokenizer"]["vocabulary"] is False else ""
    if verdict == "siblings":
        return f"{who} are siblings{near}: merge them directly{words}; alignment would change nothing worth having."
    gain = (record["alignment"] or {}).get("gain", {}).get("full", 0.0)
    if gain > SAME:
        return (
            f"{who} are one model or siblings with units in another order{near}, and alignment takes away "
            f"{100 * gain:.0f} % of what lies between them: align, then merge{words}."
        )
    return f"{who} are strangers{near}: align them before merging{words}, since their plain average would be noise."


def _names(models: list[str]) -> str:
    """Short names where they tell the models apart."""
    short = [PurePath(m).name or m for m in models]
    names = short if len(set(short)) == len(models) else models
    return f"{', '.join(names[:-1])} and {names[-1]}"
