"""What isomerge has: architectures, merge methods, solvers — read off the registries, never written twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isomerge.alignment.solvers import SOLVERS
from isomerge.architectures import FAMILIES
from isomerge.errors import RequestError, did_you_mean, require_type
from isomerge.merging.whole import EVERY, WHOLE
from isomerge.results import Result


@dataclass
class CatalogueEntry(Result):
    """An architecture or a solver."""

    name: str
    summary: str


@dataclass
class MethodEntry(Result):
    """A merge method."""

    name: str
    base: str
    """"required", "optional" or "ignored"."""
    data: str
    """"required", "optional" or "ignored"."""
    options: list[str]
    summary: str
    reference: str | None


def catalogue(kind: str) -> Sequence[CatalogueEntry | MethodEntry]:
    """All "methods", "architectures" or "solvers" there are.

    >>> [entry.name for entry in catalogue("methods")][:2]
    ['arcee_fusion', 'breadcrumbs']
    """
    readers = {"methods": _methods, "architectures": _architectures, "solvers": _solvers}
    require_type("kind", kind, str, "a word")
    if kind not in readers:
        raise RequestError(f"Listing '{kind}': there is no such list. {did_you_mean(kind, readers)}")
    return readers[kind]()


def _methods() -> Sequence[CatalogueEntry | MethodEntry]:
    entries = []
    for name, method in sorted(EVERY.items()):
        # Some methods weigh by what was measured of the models, on data or read from files.
        measures = getattr(method, "measures", None) is not None
        data = "required" if name in WHOLE else "optional" if measures else "ignored"
        options = [option.name for option in method.options]
        entries.append(MethodEntry(name, method.base, data, options, method.summary, method.reference))
    return entries


def _architectures() -> Sequence[CatalogueEntry | MethodEntry]:
    return [CatalogueEntry(name, family.summary) for name, family in sorted(FAMILIES.items())]


def _solvers() -> Sequence[CatalogueEntry | MethodEntry]:
    return [CatalogueEntry(name, summary) for name, summary in sorted(SOLVERS.items())]
