"""What isomerge has: architectures, merge methods, solvers — read off the registries, never written twice."""

from __future__ import annotations

from typing import Any

from isomerge.errors import RequestError, did_you_mean


def catalogue(kind: str) -> list[dict[str, Any]]:
    """All "methods", "architectures" or "solvers" there are: rows with a `name`, a `summary` and what else is known.

    >>> [row["name"] for row in catalogue("methods")][:2]
    ['arcee_fusion', 'breadcrumbs']
    """
    readers = {"methods": _methods, "architectures": _architectures, "solvers": _solvers}
    if kind not in readers:
        raise RequestError(f"Listing '{kind}': there is no such list. {did_you_mean(kind, readers)}")
    return readers[kind]()


def _methods() -> list[dict[str, Any]]:
    from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS

    return [
        {
            "name": name,
            "base": method.base,
            "data": "required" if name in DATA_METHODS else "optional" if _measures(method) else "ignored",
            "options": [option.name for option in method.options],
            "summary": method.summary,
            "reference": method.reference,
        }
        for name, method in sorted(ALL_METHODS.items())
    ]


def _measures(method: Any) -> bool:
    """Whether it weighs by what was measured of the models: on data, or read from files."""
    return getattr(method, "measures", None) is not None


def _architectures() -> list[dict[str, Any]]:
    from isomerge.architectures import FAMILIES

    return [{"name": name, "summary": family.summary} for name, family in sorted(FAMILIES.items())]


def _solvers() -> list[dict[str, Any]]:
    from isomerge.alignment.solvers.table import SOLVERS

    steps = ("solve", "start", "balance", "rescale")
    return [
        {
            "name": group,
            "summary": solver.summary,
            **{step: function.__name__ if (function := getattr(solver, step)) else None for step in steps},
        }
        for group, solver in SOLVERS.items()
    ]
