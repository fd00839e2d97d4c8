"""What isomerge has: architectures, merge methods, solvers, combinations — read off the registries, never written
twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isomerge.alignment.solvers.by_group import ORDER_SOLVERS, SOLVERS
from isomerge.architectures import FAMILIES
from isomerge.arguments import require_choice, require_types
from isomerge.ensembling.combinations import COMBINATIONS
from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS
from isomerge.results import Result


@dataclass
class CatalogueEntry(Result):
    """An architecture."""

    name: str
    summary: str


@dataclass
class SolverEntry(Result):
    """How the spaces of one group are solved, or a value of `solver`: the functions of each step, where it has one."""

    name: str
    summary: str
    solve: str | None
    start: str | None
    balance: str | None
    rescale: str | None


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


@dataclass
class CombinationEntry(Result):
    """A way to combine predictions."""

    name: str
    weights: bool
    """Models may have weights."""
    held_out: str | None
    """"weights" or "stack": what is fitted on held-out data."""
    summary: str
    reference: str | None


Entry = CatalogueEntry | CombinationEntry | MethodEntry | SolverEntry


def catalogue(kind: str) -> Sequence[Entry]:
    """All "methods", "architectures", "solvers" or "combinations" there are.

    >>> [entry.name for entry in catalogue("methods") if entry.name.startswith("dare")]
    ['dare_linear', 'dare_ties']
    """
    readers: dict[str, Callable[[], Sequence[Entry]]] = {
        "methods": _methods,
        "architectures": _architectures,
        "solvers": _solvers,
        "combinations": _combinations,
    }
    require_types(kind=(kind, str))
    require_choice("kind", kind, readers)
    return readers[kind]()


def _methods() -> Sequence[MethodEntry]:
    entries = []
    for name, method in sorted(ALL_METHODS.items()):
        # Some methods weigh by what was measured of the models, on data or read from files.
        measures = getattr(method, "measures", None) is not None
        data = "required" if name in DATA_METHODS else "optional" if measures else "ignored"
        options = [option.name for option in method.options]
        entries.append(MethodEntry(name, method.base, data, options, method.summary, method.reference))
    return entries


def _architectures() -> Sequence[CatalogueEntry]:
    return [CatalogueEntry(name, family.summary) for name, family in sorted(FAMILIES.items())]


def _solvers() -> Sequence[SolverEntry]:
    steps = ("solve", "start", "balance", "rescale")
    groups = [
        SolverEntry(group, solver.summary, *(_name(getattr(solver, step)) for step in steps))
        for group, solver in SOLVERS.items()
    ]
    return groups + [
        SolverEntry(word, way.summary, _name(way.orders), None, None, None) for word, way in ORDER_SOLVERS.items()
    ]


def _combinations() -> Sequence[CombinationEntry]:
    return [
        CombinationEntry(name, one.weighs, one.finds, one.summary, one.reference)
        for name, one in sorted(COMBINATIONS.items())
    ]


def _name(function: Callable[..., object] | None) -> str | None:
    return None if function is None else function.__name__.lstrip("_")
