"""What a sweep will measure: its axes and the recipe of every point, checked before anything is merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.document import as_data
from isomerge.sweeping.merger import Merger
from isomerge.sweeping.parameter_names import of_one_model
from isomerge.sweeping.points import Point, describe_values, grid, one_recipe, points_of, raise_all, require_different
from isomerge.sweeping.ranges import Axis, read_axes
from isomerge.sweeping.search import corners, typed


@dataclass(frozen=True)
class SweepPlan:
    """A recipe with what is varied in it."""

    recipe: Recipe
    axes: Sequence[Axis]
    points: Sequence[Point]
    """All points of a grid; of a search, the corners of what it may try."""
    mode: str
    """grid, together or search"""
    total: int
    """How many points will be measured."""
    hint: str
    """How to write the options of one model, where an axis may have meant one."""

    def outline(self, merger: Merger) -> Merged:
        """What is known of the merged models before any is made; a point that cannot be merged says which it is."""
        first = self.points[0]
        try:
            return merger.outline(first.recipe)
        except RequestError as error:
            raise_all({self._hinted(error): describe_values(first.values)})
            raise

    def open_models(self, merger: Merger) -> None:
        """Of every point; what headers tell is checked here, as a sweep of hours must not end at its last point."""
        merger.open(point.recipe for point in self.points)
        problems: dict[str, str] = {}
        for point in self.points:
            try:
                merger.require(point.recipe)
            except RequestError as error:
                problems.setdefault(self._hinted(error), describe_values(point.values))
        raise_all(problems)

    def _hinted(self, error: RequestError) -> str:
        return f"{error} {self.hint}." if self.hint else str(error)


def plan_sweep(
    recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe],
    over: Mapping[str, Any] | Iterable[str],
    *,
    mode: str,
    search: int | None,
    force: bool,
) -> SweepPlan:
    """Read the recipe and the axes; all points that do not fit are refused at once."""
    written = one_recipe(recipe)
    axes = read_axes(over, search=search is not None, force=force)
    points = points_of(written, grid(axes, mode, force=force) if search is None else corners(axes))
    require_different(points)
    hint = " ".join(filter(None, (of_one_model(as_data(written), axis.name) for axis in axes)))
    if search is None:
        return SweepPlan(written, axes, points, mode, len(points), hint)
    return SweepPlan(written, typed(written, axes), points, "search", search, hint)
