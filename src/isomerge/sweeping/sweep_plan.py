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
from isomerge.sweeping.natural import natural_axes
from isomerge.sweeping.parameter_names import of_one_model
from isomerge.sweeping.points import Point, describe_values, grid, one_recipe, points_of, raise_all, require_different
from isomerge.sweeping.ranges import Axis, read_axes
from isomerge.sweeping.space import Space


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
    space: Space | None = None
    """Of a search."""

    def outline(self, merger: Merger) -> Merged:
        """What is known of the merged models before any is made; a point that cannot be merged says which it is."""
        first = self.points[0]
        try:
            return merger.outline(first.recipe)
        except RequestError as error:
            raise_all({self._hinted(error): describe_values(first.values)})
            raise

    def open_models(self, merger: Merger) -> None:
        """Of every point; what headers tell is checked here, as a sweep of hours must not end at its last point.

        A search goes round a corner that cannot be merged, such as all weights at 0, unless the other cannot either.
        """
        merger.open([self.recipe, *(point.recipe for point in self.points)])
        problems: dict[str, str] = {}
        fitting = set()
        for point in self.points:
            try:
                merger.require(point.recipe)
                fitting.add(point.recipe.merge_method)
            except RequestError as error:
                if self.space is None or point.recipe.merge_method not in fitting:
                    problems.setdefault(self._hinted(error), describe_values(point.values))
        if self.space is None or {point.recipe.merge_method for point in self.points} - fitting:
            raise_all(problems)

    def _hinted(self, error: RequestError) -> str:
        return f"{error} {self.hint}." if self.hint else str(error)


def plan_sweep(
    recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe],
    over: Mapping[str, Any] | Iterable[str] | None,
    *,
    mode: str,
    search: int | None,
    force: bool,
) -> SweepPlan:
    """Read the recipe and the axes; all points that do not fit are refused at once. A search needs no axes."""
    written = one_recipe(recipe)
    natural = search is not None and not over
    axes = natural_axes(written) if natural else read_axes(over or (), search=search is not None, force=force)
    hint = " ".join(filter(None, (of_one_model(as_data(written), axis.name) for axis in axes)))
    if search is None:
        points = points_of(written, grid(axes, mode, force=force))
        require_different(points)
        return SweepPlan(written, axes, points, mode, len(points), hint)
    space = Space.of(written, axes)
    corners = space.points(space.corners())
    require_different(corners)
    return SweepPlan(written, space.axes, corners, "search", search, hint, space)
