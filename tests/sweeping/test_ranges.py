"""What --over may say, against values written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from isomerge.errors import RequestError
from isomerge.sweeping.points import grid
from isomerge.sweeping.ranges import read_axes

TENTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("t=0:1:0.1", TENTHS),
        ("t=0:1:0.4", (0.0, 0.4, 0.8)),
        ("t=1:0:-0.5", (1.0, 0.5, 0.0)),
        ("t=0:1:0.3333333", (0.0, 0.3333333, 0.6666666, 0.9999999)),
        ("k=1:7:3", (1, 4, 7)),
        ("t=-1:1:1", (-1, 0, 1)),
        ("t=0.3:0.3:1", (0.3,)),
        ("density=0.1,0.5,1e-3", (0.1, 0.5, 0.001)),
        ("merge_method=ties,dare_ties", ("ties", "dare_ties")),
        ("normalize=true,false", (True, False)),
        ("data=C:/pictures", ("C:/pictures",)),
        ("t=1,1.0,true", (1, 1.0, True)),
        ("t=1e-3", (0.001,)),
    ],
)
def test_a_text_names_these_values(text: str, values: tuple[Any, ...]) -> None:
    (axis,) = read_axes([text], search=False)
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]


def test_a_mapping_takes_lists_texts_and_single_values() -> None:
    axes = read_axes({"t": "0:1:0.5", "density": [0.1, 0.2], "seed": 3}, search=False)
    assert [axis.values for axis in axes] == [(0.0, 0.5, 1.0), (0.1, 0.2), (3,)]


@pytest.mark.parametrize(
    ("text", "search", "words"),
    [
        ("t", False, "NAME=START:STOP:STEP"),
        ("t=", False, "NAME=START:STOP:STEP"),
        ("t=0:1:0", False, "the step is 0"),
        ("t=0:1:-0.1", False, "leads away from 1"),
        ("t=0:1:x", False, "made of numbers"),
        ("t=0:1", False, "no step"),
        ("t=0:1:1e-6", False, "1000001 values"),
        ("t=0.1,,0.3", False, "missing between commas"),
        ("t=0:1:gradient1", True, "2 to 100 numbers"),
        ("t=0:1:log", True, "above 0 only"),
        ("t=0.1:1:lg", True, "made of numbers"),
        ("t=0.1:1:log", False, "no step"),
        ("t=1:0", True, "nothing between 1 and 0"),
        ("t=0:1:0.1:", False, "a range is made of numbers"),
        ("t=0:1:1e-300", False, "too many values"),
    ],
)
def test_a_wrong_range_is_told(text: str, search: bool, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_axes([text], search=search)


def test_a_search_takes_bounds_factors_gradients_and_choices() -> None:
    texts = ["t=0:1", "lambda=0.01:1:log", "weight=0:2:gradient4", "method=ties,slerp", "density=0.1:1:log:gradient2"]
    axes = read_axes(texts, search=True)
    assert [axis.record() for axis in axes] == [
        {"name": "t", "bounds": [0, 1]},
        {"name": "lambda", "bounds": [0.01, 1], "log": True},
        {"name": "weight", "bounds": [0, 2], "gradient": 4},
        {"name": "merge_method", "values": ["ties", "slerp"]},
        {"name": "density", "bounds": [0.1, 1], "log": True, "gradient": 2},
    ]


def test_nothing_and_twice_are_refused() -> None:
    with pytest.raises(RequestError, match="nothing to vary"):
        read_axes([], search=False)
    with pytest.raises(RequestError, match="named twice"):
        read_axes(["t=0,1", "t=2"], search=False)


def test_points_are_every_combination_or_go_together() -> None:
    axes = read_axes(["a=1,2", "b=x,y"], search=False)
    assert grid(axes) == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert grid(axes, "together") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    again = read_axes(["a=1,1,2", "b=1,2,2"], search=False)
    assert grid(again, "together") == [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]
    assert grid(again) == [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2}]
    with pytest.raises(RequestError, match="a 2, b 3"):
        grid(read_axes(["a=1,2", "b=1,2,3"], search=False), "together")
    with pytest.raises(RequestError, match="Did you mean 'together'"):
        grid(axes, "togeter")


def test_absurd_numbers_of_points_need_force() -> None:
    axes = read_axes(["a=0:1:0.01", "b=0:1:0.01"], search=False)
    with pytest.raises(RequestError, match="101 × 101 = 10201 points"):
        grid(axes)
    assert len(grid(axes, force=True)) == 10201
