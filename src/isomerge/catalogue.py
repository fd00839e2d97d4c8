"""What isomerge has: architectures, merge methods, solvers — read off the registries, never written twice."""

from __future__ import annotations

from typing import Any

from isomerge.errors import RequestError, did_you_mean

RECONSTRUCT = {
    "name": "reconstruct",
    "base": "ignored",
    "options": ["weight", "ridge", "floor"],
    "summary": "With data: solve every linear map towards the mean features of the models. Command line and Python.",
    "reference": "docs/reconstruct.md",
}


def catalogue(kind: str) -> list[dict[str, Any]]:
    """Rows with a name and a summary.

    >>> [row["name"] for row in catalogue("methods")][:2]
    ['arcee_fusion', 'breadcrumbs']
    """
    readers = {"methods": _methods, "architectures": _architectures, "solvers": _solvers}
    if kind not in readers:
        raise RequestError(f"Listing '{kind}': there is no such list. {did_you_mean(kind, readers)}")
    return readers[kind]()


def _methods() -> list[dict[str, Any]]:
    from isomerge.merge.methods import METHODS

    return [
        {
            "name": name,
            "base": method.base,
            "options": [option.name for option in method.options],
            "summary": method.summary,
            "reference": method.reference,
        }
        for name, method in sorted(METHODS.items())
    ] + [RECONSTRUCT]


def _architectures() -> list[dict[str, Any]]:
    from isomerge.architectures import FAMILIES

    return [{"name": name, "summary": family.summary} for name, family in sorted(FAMILIES.items())]


def _solvers() -> list[dict[str, Any]]:
    from isomerge.align.solvers import SOLVERS

    return [{"name": name, "summary": summary} for name, summary in sorted(SOLVERS.items())]
