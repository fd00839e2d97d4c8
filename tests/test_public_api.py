"""Every name of `isomerge` is what an editor, `help()` and a worker process expect of it."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from models import image_pair, noisy
from samples import digits

NAMES = [name for name in isomerge.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(isomerge, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(isomerge, name))]


def public_methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, member in vars(kind).items():
        function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else member
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


CALLABLES = {name: getattr(isomerge, name) for name in FUNCTIONS} | {
    f"{name}.{method}": function for name in CLASSES for method, function in public_methods(getattr(isomerge, name))
}


def test_what_users_meet_is_exported() -> None:
    wanted = {"AlignedFamily", "Checkpoint", "RequestError", "Sweep", "align", "calibrate", "check", "demo", "evaluate"}
    assert wanted | {"merge", "report", "reproduce", "sweep"} <= set(NAMES)
    assert set(NAMES) == set(FUNCTIONS) | set(CLASSES), "every name is a plain function or a class"
    assert set(NAMES) <= set(dir(isomerge))


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    source = Path(isomerge.__file__).read_text(encoding="utf-8")
    assert not [name for name in NAMES if f" import {name} as {name}\n" not in source]


@pytest.mark.parametrize("name", CALLABLES)
def test_a_signature_is_true_and_typed(name: str) -> None:
    signature = inspect.signature(CALLABLES[name])
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    assert {each.kind for each in parameters} != {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert not [each.name for each in parameters if each.annotation is each.empty]
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", CALLABLES)
def test_type_hints_resolve(name: str) -> None:
    hints = typing.get_type_hints(CALLABLES[name])
    assert hints.keys() >= set(inspect.signature(CALLABLES[name]).parameters) - {"self", "cls"}
    assert "return" in hints


@pytest.mark.parametrize("name", NAMES)
def test_help_is_about_the_name_itself(name: str) -> None:
    value = getattr(isomerge, name)
    text = pydoc.render_doc(value, renderer=pydoc.plaintext)
    kind = "class" if name in CLASSES else "function"
    assert text.splitlines()[0] == f"Python Library Documentation: {kind} {name} in module {value.__module__}"
    assert value.__doc__ and value.__doc__.strip().splitlines()[0] in text
    assert value.__doc__ != sys.modules[value.__module__].__doc__


RESULTS: dict[str, Callable[[str, str, Path], Any]] = {
    "check": lambda a, b, out: isomerge.check(a, b),
    "selftest": lambda a, b, out: isomerge.selftest(a),
    "evaluate": lambda a, b, out: isomerge.evaluate(a, digits(), limit=9),
    "ensemble": lambda a, b, out: isomerge.ensemble([a, b], digits(), limit=9),
    "barrier": lambda a, b, out: isomerge.barrier(a, b, data=digits(), limit=9, points=3),
    "plane": lambda a, b, out: isomerge.plane(a, b, noisy(Path(a)), data=digits(), limit=9, points=3),
    "calibrate": lambda a, b, out: isomerge.calibrate(a, digits(), what={"gram"}, limit=9),
    "catalogue": lambda a, b, out: isomerge.catalogue("methods"),
    "merge_state_dicts": lambda a, b, out: isomerge.merge_state_dicts([{"w": torch.ones(2)}, {"w": torch.zeros(2)}]),
    "save": lambda a, b, out: isomerge.merge([a, b]).save(out / "merged"),
    "reproduce": lambda a, b, out: isomerge.reproduce(isomerge.merge([a, b]).save(out / "merged").out),
    "verify": lambda a, b, out: isomerge.verify(isomerge.merge([a, b]).save(out / "merged").out),
    "report": lambda a, b, out: isomerge.report(isomerge.merge([a, b]).save(out / "merged").out),
    "sweep": lambda a, b, out: isomerge.sweep(
        {"merge_method": "linear", "models": [{"model": a, "parameters": {"weight": 1}}, {"model": b}]},
        {"models[0].weight": [1, 2]}, data=digits(), limit=9,
    ),
}  # fmt: skip
"""A way to make each kind of result, from two models and a folder to write in."""


def seen(value: Any) -> Any:
    """What can be compared of a result: tensors by their values, the rest as JSON shows it."""
    for method in ("to_dict", "state_dict", "report"):
        if hasattr(value, method):
            return seen(getattr(value, method)())
    if isinstance(value, isomerge.Checkpoint):
        return {name: seen(value.read(name)) for name in value.tensors}
    if isinstance(value, Mapping):
        return {key: seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [seen(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else repr(value)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_can_be_pickled_and_copied(name: str, tmp_path: Path) -> None:
    result = RESULTS[name](*image_pair(), tmp_path)
    expected = seen(result)
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert type(again) is type(result)
        assert seen(again) == expected


def test_an_error_can_be_pickled_and_copied() -> None:
    with pytest.raises(isomerge.RequestError) as refused:
        isomerge.merge(["no-such-model"], method="no-such-method")
    for again in (pickle.loads(pickle.dumps(refused.value)), copy.deepcopy(refused.value)):
        assert type(again) is isomerge.RequestError and str(again) == str(refused.value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import isomerge\ntry: isomerge.algin\nexcept AttributeError as error: print('align' in str(error))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
