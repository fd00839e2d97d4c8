"""What a search chooses from: the axes as a cube, and the values that belong to one of its points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from isomerge.errors import RequestError
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.document import as_data
from isomerge.sweeping.optimisers import Dimension, Unit
from isomerge.sweeping.parameter_names import RecipeData, changed, without_other_options
from isomerge.sweeping.points import Point, Values, points_of
from isomerge.sweeping.ranges import Axis, Value

METHOD = "merge_method"


@dataclass(frozen=True)
class Space:
    """Axes of one recipe. Where the method is among them, an axis counts only for the methods that have it."""

    recipe: Recipe
    axes: Sequence[Axis]
    _unused: dict[Value, frozenset[str]] = field(default_factory=dict)
    """By method: the axes that say nothing to it."""

    @classmethod
    def of(cls, recipe: Recipe, axes: Sequence[Axis]) -> Space:
        """Refuses what no method can do, and finds out which numbers are whole."""
        data = as_data(recipe)
        methods: tuple[Value, ...] = next((axis.values for axis in axes if axis.name == METHOD), ())
        unused = {method: frozenset(a.name for a in axes if not _takes(data, method, a)) for method in methods}
        for axis in axes if methods else ():
            if all(axis.name in unused[method] for method in methods):
                changed(without_other_options(data, methods[0]), {METHOD: methods[0], axis.name: _some(axis)})
        space = cls(recipe, axes, unused)
        space.points(space.corners())
        return replace(space, axes=[replace(axis, whole=space._is_whole(axis)) for axis in axes])

    @property
    def dimensions(self) -> list[Dimension]:
        return [dimension for axis in self.axes for dimension in _dimensions(axis)]

    def values(self, unit: Unit) -> Values:
        """The values at a point of the cube, without those that its method does not know."""
        left = iter(unit)
        values: Values = {}
        for axis in self.axes:
            places = [next(left) for _ in _dimensions(axis)]
            values[axis.name] = _value(axis, places)
        return self._used(values)

    def corners(self) -> list[Values]:
        """All parameters at their lower and at their upper bound, with each method: if these are refused, so is the
        search."""
        ends: list[Values] = []
        for method in self._unused or {None: frozenset()}:
            for side in (0, 1):
                values: Values = {axis.name: _end(axis, side) for axis in self.axes}
                end = self._used(values if method is None else {**values, METHOD: method})
                if end not in ends:  # a method that none of the other axes is for has one
                    ends.append(end)
        return ends

    def points(self, combinations: Sequence[Values]) -> list[Point]:
        """Their recipes; a method that is chosen by the search goes without the options of the others."""
        made = []
        for values in combinations:
            if METHOD not in values:
                made += points_of(self.recipe, [values])
                continue
            data = without_other_options(as_data(self.recipe), values[METHOD])
            made += [Point(values, point.recipe) for point in points_of(data, [values])]
        return made

    def _used(self, values: Values) -> Values:
        unused = self._unused.get(values.get(METHOD), frozenset())
        return {name: value for name, value in values.items() if name not in unused}

    def _is_whole(self, axis: Axis) -> bool:
        """The recipe is asked: whole numbers between which there is nothing."""
        if axis.bounds is None or axis.log or axis.gradient or not all(isinstance(x, int) for x in axis.bounds):
            return False
        between = axis.bounds[0] + (axis.bounds[1] - axis.bounds[0]) / 2.0001
        corner = next(values for values in self.corners() if axis.name in values)
        try:
            self.points([{**corner, axis.name: between}])
        except RequestError:
            return True
        return False


def _takes(data: RecipeData, method: Value, axis: Axis) -> bool:
    if axis.name == METHOD:
        return True
    try:
        changed(without_other_options(data, method), {METHOD: method, axis.name: _some(axis)})
    except RequestError:
        return False
    return True


def _some(axis: Axis) -> Value:
    return _end(axis, 0)


def _end(axis: Axis, side: int) -> Value:
    if axis.bounds is None:
        return axis.values[-side]
    end = axis.bounds[side]
    return [end] * axis.gradient if axis.gradient else end


def _dimensions(axis: Axis) -> list[Dimension]:
    if axis.bounds is None:
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in axis.values)
        return [Dimension(len(axis.values), ordered=numbers)]
    levels = int(axis.bounds[1] - axis.bounds[0]) + 1 if axis.whole else 0
    return [Dimension(levels)] * (axis.gradient or 1)


def _value(axis: Axis, places: Sequence[float]) -> Value:
    if axis.bounds is None:
        return axis.values[Dimension(len(axis.values)).level(places[0])]
    if axis.whole:
        (dimension,) = _dimensions(axis)
        return int(axis.bounds[0]) + dimension.level(places[0])
    numbers = [_number(axis, place) for place in places]
    return numbers if axis.gradient else numbers[0]


def _number(axis: Axis, place: float) -> float:
    """Inside the bounds, and with no more digits than a recipe should have."""
    assert axis.bounds is not None
    low, high = axis.bounds
    value = low * (high / low) ** place if axis.log else low + (high - low) * place
    return min(max(float(f"{value:.6g}"), low), high) if math.isfinite(value) else high
