"""Every name of `isomerge` is what an editor, `help()` and a worker process expect of it."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import pkgutil
import pydoc
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.results import Result
from models import image_pair, llama, model, noisy
from provenance.stand_in_hub import hub_of_this_computer
from samples import digits

NAMES = [name for name in isomerge.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(isomerge, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(isomerge, name))]


RUNS = {"isomerge.__main__"}
"""Modules that do something when they are imported."""


def public_methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods and properties, also those of base classes in isomerge."""
    for owner in kind.__mro__:
        for name, member in vars(owner).items() if owner.__module__.startswith("isomerge.") else ():
            member = getattr(member, "fget", None) or getattr(member, "func", None) or member
            function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else member
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


CALLABLES = {name: getattr(isomerge, name) for name in FUNCTIONS} | {
    f"{name}.{method}": function for name in CLASSES for method, function in public_methods(getattr(isomerge, name))
}


def test_what_users_meet_is_exported() -> None:
    wanted = {"AlignedFamily", "Checkpoint", "RequestError", "Sweep", "align", "align_family", "calibrate", "check"}
    assert wanted | {"demo", "evaluate", "extract", "merge", "plan", "report", "reproduce", "sweep"} <= set(NAMES)
    assert set(NAMES) == set(FUNCTIONS) | set(CLASSES), "every name is a plain function or a class"
    assert set(NAMES) <= set(dir(isomerge))


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    source = Path(isomerge.__file__).read_text(encoding="utf-8")
    assert not [name for name in NAMES if f" import {name} as {name}\n" not in source]


def test_no_module_hides_behind_a_name() -> None:
    """A package's attribute with the name of one of its modules is that module, whatever was imported first."""
    modules = [each.name for each in pkgutil.walk_packages(isomerge.__path__, "isomerge.") if each.name not in RUNS]
    for name in modules:
        package, _, module = name.rpartition(".")
        assert getattr(importlib.import_module(package), module, None) in (None, importlib.import_module(name)), name
    assert not {f"isomerge.{name}" for name in NAMES} & set(modules)


VARIADIC = {
    "best": {"models"},
    "check": {"models"},
    "merge": {"options"},
    "merge_state_dicts": {"options"},
    "sweep": {"options"},
}
"""Any number of models; the options of a method."""


@pytest.mark.parametrize("name", CALLABLES)
def test_a_signature_is_true_and_typed(name: str) -> None:
    signature = inspect.signature(CALLABLES[name])
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    variadic = {each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    assert variadic == VARIADIC.get(name, set())
    assert not [each.name for each in parameters if each.annotation is each.empty]
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", CALLABLES)
def test_type_hints_resolve(name: str) -> None:
    hints = typing.get_type_hints(CALLABLES[name])
    assert hints.keys() >= set(inspect.signature(CALLABLES[name]).parameters) - {"self", "cls"}
    assert "return" in hints


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_returns_a_type_with_names_and_not_a_bare_dict(name: str) -> None:
    returned = typing.get_type_hints(getattr(isomerge, name))["return"]
    if name != "merge_state_dicts":  # state_dicts in, a state_dict out
        assert typing.get_origin(returned) is not dict and "dict[str, typing.Any]" not in str(returned)


@pytest.mark.parametrize("name", NAMES)
def test_help_is_about_the_name_itself(name: str) -> None:
    value = getattr(isomerge, name)
    text = pydoc.render_doc(value, renderer=pydoc.plaintext)
    kind = "class" if name in CLASSES else "function"
    assert text.splitlines()[0] == f"Python Library Documentation: {kind} {name} in module {value.__module__}"
    assert value.__doc__ and value.__doc__.strip().splitlines()[0] in text
    assert value.__doc__ != sys.modules[value.__module__].__doc__


def fine_tuned_pair() -> tuple[str, str]:
    base = model("llama", 0, torch.float32)
    return str(base), str(noisy(base, 0.05))


def adapted(out: Path) -> tuple[Path, str, str]:
    """An adapter, its base, and another base."""
    base, tuned = fine_tuned_pair()
    return isomerge.extract(base, tuned, out / "old", rank=2).out, base, tuned


def tokenized_pair(out: Path) -> tuple[str, str]:
    return llama(out / "first").name, llama(out / "second", seed=1).name


def linear_recipe(a: str, b: str) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": a, "parameters": {"weight": 1}}, {"model": b}]}


def pushed(folder: str, scratch: Path) -> Any:
    with hub_of_this_computer(scratch):
        return isomerge.push(folder, "me/merged", token="hf_good")


RESULTS: dict[str, Callable[[str, str, Path], Any]] = {
    "align": lambda a, b, out: isomerge.align(b, a),
    "align_family": lambda a, b, out: isomerge.align_family([a, b]),
    "universe": lambda a, b, out: isomerge.align_family([a, b], many="universe"),
    "save an alignment": lambda a, b, out: isomerge.align(b, a).save(out / "aligned"),
    "merge": lambda a, b, out: isomerge.merge([a, b]),
    "merge aligned": lambda a, b, out: isomerge.merge([a, b], align=True),
    "merge_recipe": lambda a, b, out: isomerge.merge_recipe(linear_recipe(a, b)),
    "plan": lambda a, b, out: isomerge.plan(linear_recipe(a, b)),
    "convert": lambda a, b, out: isomerge.convert(a, out / "converted"),
    "extract": lambda a, b, out: isomerge.extract(*fine_tuned_pair(), out / "adapter", rank=2),
    "open_checkpoint": lambda a, b, out: isomerge.open_checkpoint(a),
    "open_data": lambda a, b, out: isomerge.open_data(digits(), limit=9),
    "check": lambda a, b, out: isomerge.check(a, b),
    "selftest": lambda a, b, out: isomerge.selftest(a),
    "evaluate": lambda a, b, out: isomerge.evaluate(a, digits(), limit=9),
    "ensemble": lambda a, b, out: isomerge.ensemble([a, b], digits(), limit=9),
    "make_ensemble": lambda a, b, out: isomerge.make_ensemble([a, b]),
    "load_ensemble": lambda a, b, out: isomerge.load_ensemble(isomerge.make_ensemble([a, b]).save(out / "both.json")),
    "generate": lambda a, b, out: isomerge.generate([llama(out / "writer")], ["the cat"], tokens=2),
    "barrier": lambda a, b, out: isomerge.barrier(a, b, data=digits(), limit=9, points=3),
    "plane": lambda a, b, out: isomerge.plane(a, b, noisy(Path(a)), data=digits(), limit=9, points=3),
    "curve": lambda a, b, out: isomerge.curve(a, b, data=digits(), limit=9, steps=2, points=3),
    "calibrate": lambda a, b, out: isomerge.calibrate(a, digits(), what={"gram"}, limit=9),
    "catalogue": lambda a, b, out: isomerge.catalogue("methods"),
    "merge_state_dicts": lambda a, b, out: isomerge.merge_state_dicts([{"w": torch.ones(2)}, {"w": torch.zeros(2)}]),
    "save": lambda a, b, out: isomerge.merge([a, b]).save(out / "merged"),
    "reproduce": lambda a, b, out: isomerge.reproduce(isomerge.merge([a, b]).save(out / "merged").out),
    "verify": lambda a, b, out: isomerge.verify(isomerge.merge([a, b]).save(out / "merged").out),
    "report": lambda a, b, out: isomerge.report(isomerge.merge([a, b]).save(out / "merged").out),
    "sweep": lambda a, b, out: isomerge.sweep(
        linear_recipe(a, b), {"models[0].weight": [1, 2]}, data=digits(), limit=9
    ),
    "search": lambda a, b, out: isomerge.search(
        linear_recipe(a, b), data=digits(), limit=12, algorithm="random", evaluations=3
    ),
    "best": lambda a, b, out: isomerge.best(a, b, data=digits(), limit=12, algorithm="random", evaluations=4),
    "distill": lambda a, b, out: isomerge.distill([a, b], data=digits(), steps=1),
    "describe": lambda a, b, out: isomerge.describe(a, digits(), score=False, out=out / "about.json"),
    "find": lambda a, b, out: isomerge.find(digits(), [a, b], limit=40),
    "push": lambda a, b, out: pushed(a, out),
    "rebase": lambda a, b, out: isomerge.rebase(noisy(Path(a)), a, b, data=digits()),
    "rebase_adapter": lambda a, b, out: isomerge.rebase_adapter(*adapted(out), out / "carried"),
    "moe": lambda a, b, out: isomerge.moe(model("llama", 0), copies=2),
    "transplant": lambda a, b, out: isomerge.transplant(*tokenized_pair(out)),
    "demo": lambda a, b, out: isomerge.demo(out / "demo"),
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


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "demo" else name for name in RESULTS]


def test_every_function_has_a_row() -> None:
    assert set(FUNCTIONS) - {"trust_remote_code"} <= set(RESULTS), "all but the setting give a result"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_result_can_be_pickled_and_copied(name: str, tmp_path: Path) -> None:
    result = RESULTS[name](*image_pair(), tmp_path)
    expected = seen(result)
    if isinstance(result, Result):
        assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert type(again) is type(result)
        assert seen(again) == expected


WORKING: dict[str, Callable[[str, str, Path], dict[str, Any]]] = {
    "align": lambda a, b, out: {"source": b, "anchor": a},
    "align_family": lambda a, b, out: {"models": [a, b]},
    "barrier": lambda a, b, out: {"model_a": a, "model_b": b, "data": digits()},
    "best": lambda a, b, out: {"models": (a, b), "data": digits()},
    "calibrate": lambda a, b, out: {"model": a, "data": digits()},
    "catalogue": lambda a, b, out: {"kind": "methods"},
    "check": lambda a, b, out: {"models": (a, b)},
    "curve": lambda a, b, out: {"model_a": a, "model_b": b, "data": digits()},
    "demo": lambda a, b, out: {"out": out},
    "describe": lambda a, b, out: {"model": a, "data": digits(), "out": out},
    "find": lambda a, b, out: {"query": digits(), "models": [a, b]},
    "distill": lambda a, b, out: {"teachers": [a, b], "data": digits(), "steps": 1},
    "ensemble": lambda a, b, out: {"models": [a, b], "data": digits()},
    "evaluate": lambda a, b, out: {"model": a, "data": digits()},
    "generate": lambda a, b, out: {"models": [a, b], "prompts": ["a"]},
    "load_ensemble": lambda a, b, out: {"path": a},
    "make_ensemble": lambda a, b, out: {"models": [a, b]},
    "convert": lambda a, b, out: {"model": a, "out": out},
    "extract": lambda a, b, out: {"base": a, "finetuned": b, "out": out},
    "merge": lambda a, b, out: {"models": [a, b]},
    "merge_recipe": lambda a, b, out: {"recipe": linear_recipe(a, b)},
    "merge_state_dicts": lambda a, b, out: {"models": [{}, {}]},
    "moe": lambda a, b, out: {"source": [a, b]},
    "open_checkpoint": lambda a, b, out: {"source": a},
    "open_data": lambda a, b, out: {"source": digits()},
    "plan": lambda a, b, out: {"recipe": linear_recipe(a, b)},
    "plane": lambda a, b, out: {"model_a": a, "model_b": b, "model_c": a, "data": digits()},
    "push": lambda a, b, out: {"models": a, "to": "me/merged"},
    "rebase": lambda a, b, out: {"tuned": noisy(Path(a)), "base": a, "onto": b},
    "rebase_adapter": lambda a, b, out: {"adapter": noisy(Path(a)), "base": a, "onto": b, "out": out},
    "report": lambda a, b, out: {"folder": a},
    "reproduce": lambda a, b, out: {"folder": a},
    "search": lambda a, b, out: {"recipe": linear_recipe(a, b), "data": digits()},
    "selftest": lambda a, b, out: {"model": a},
    "sweep": lambda a, b, out: {"recipe": [a, b], "over": {"models[0].weight": [1, 2]}, "data": digits()},
    "transplant": lambda a, b, out: {"model": a, "donor": b},
    "trust_remote_code": lambda a, b, out: {},
    "verify": lambda a, b, out: {"folder": a},
}
"""Arguments that a function takes, before one of them is replaced."""
MANY_TYPES = {"Any", "CheckpointSource", "DataSource"}
"""Annotations of models and data, for which there are so many types that the error names them instead."""


class OfNoType:
    """Not text, no number, no list, no function."""


def arguments() -> Iterator[tuple[str, str, Any]]:
    """Every argument of every function, with values of a wrong type."""
    for name in FUNCTIONS:
        for parameter in inspect.signature(getattr(isomerge, name)).parameters.values():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.name, OfNoType()
                words = set(re.findall(r"\w+", parameter.annotation))
                if words & {"int", "bool"} and "str" not in words:
                    yield name, parameter.name, "2"
                if "str" in words and not words & {"int", "Sequence", "Iterable"}:
                    yield name, parameter.name, [0]


@pytest.mark.parametrize(("name", "argument", "wrong"), [*arguments()])
def test_a_wrong_type_is_refused_by_the_name_of_its_argument(
    name: str, argument: str, wrong: object, tmp_path: Path
) -> None:
    function = getattr(isomerge, name)
    given = {**WORKING[name](*image_pair(), tmp_path / "out"), argument: wrong}
    with pytest.raises(isomerge.RequestError) as refused:
        function(*given.pop("models"), **given) if name in ("check", "best") else function(**given)
    many = inspect.signature(function).parameters[argument].annotation in MANY_TYPES and argument != "tokenizer"
    assert (type(wrong).__name__ if many else argument) in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda a, b: isomerge.align(b, a, layers=[0]), "layers"),  # type: ignore[arg-type]
        (lambda a, b: isomerge.merge([a, b], weights="ab"), "weights"),  # type: ignore[arg-type]
        (lambda a, b: isomerge.merge([a, b], weights=["a", "b"]), "weights"),  # type: ignore[list-item]
        (lambda a, b: isomerge.merge(a), "models"),
        (lambda a, b: isomerge.merge_state_dicts([1, 2]), "models"),  # type: ignore[list-item]
        (lambda a, b: isomerge.plan([3]), "recipe"),  # type: ignore[list-item]
        (lambda a, b: isomerge.sweep([3], {"t": "0:1:0.5"}, data=digits()), "recipe"),  # type: ignore[list-item]
        (lambda a, b: isomerge.sweep(linear_recipe(a, b), [3], data=digits()), "over"),  # type: ignore[list-item]
        (lambda a, b: isomerge.report(a, measured="curve.json"), "measured"),
        (lambda a, b: isomerge.report(a, measured=[3]), "measured"),  # type: ignore[list-item]
        (lambda a, b: isomerge.calibrate(a, digits(), what="grams"), "what"),
        (lambda a, b: isomerge.evaluate(a, {"path": digits(), "limit": "x"}), "limit"),
    ],
)
def test_wrong_contents_are_refused_by_the_name_of_their_argument(
    call: Callable[[str, str], object], argument: str
) -> None:
    with pytest.raises(isomerge.RequestError, match=argument):
        call(*image_pair())


def test_an_error_can_be_pickled_and_copied() -> None:
    with pytest.raises(isomerge.RequestError) as refused:
        isomerge.merge(["no-such-model"], method="no-such-method")
    for again in (pickle.loads(pickle.dumps(refused.value)), copy.deepcopy(refused.value)):
        assert type(again) is isomerge.RequestError and str(again) == str(refused.value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import isomerge\ntry: isomerge.algin\nexcept AttributeError as error: print('align' in str(error))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
