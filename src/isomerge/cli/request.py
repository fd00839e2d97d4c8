"""What merge and plan are asked: a recipe, or models with a method and its options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isomerge.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    from isomerge.merging.recipe import Recipe

# Options of a method are flags that are not known before the method is, so the verbs take them as they come.
ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}


@dataclass(frozen=True)
class DataFlags:
    """What the command line says about data and the steps that use it."""

    paths: Sequence[Path] = ()
    """One for all models, or one for each in their order."""
    split: str | None = None
    limit: int | None = None
    text: str | None = None
    label: str | None = None
    kind: str | None = None
    evidence: str | None = None
    fisher: str | None = None
    repair: bool = False

    def data(self) -> dict[str, Any] | list[dict[str, Any]] | None:
        """As a recipe writes it."""
        reading = {key: getattr(self, key) for key in READING if getattr(self, key) is not None}
        if reading and not self.paths:
            flags = ", ".join(f"--{key}" for key in reading)
            raise RequestError(f"{flags} says how to read data, and there is none. Name it with --data PATH.")
        found = [{"path": str(path), **reading} for path in self.paths]
        return found[0] if len(found) == 1 else found or None

    def flags(self) -> dict[str, Any]:
        """What is set, by flag."""
        named = {f"--{key}": getattr(self, key) for key in (*READING, "evidence", "fisher", "repair")}
        return {"--data": list(self.paths), **named}


READING = ("split", "limit", "text", "label", "kind")


@dataclass(frozen=True)
class Request:
    """A recipe's path, or models and the method's options as they were written."""

    models: list[str]
    options: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Path | None:
        """The only argument, when it is a file that holds no weights."""
        path = Path(self.models[0]).expanduser() if len(self.models) == 1 else None
        weights = {".safetensors", ".bin", ".pt", ".pth"}
        named = path is not None and path.suffix in {".yml", ".yaml"}
        return path if path is not None and (named or (path.is_file() and path.suffix not in weights)) else None

    @property
    def are_adapters(self) -> bool:
        """Every model is the folder of an adapter: they are merged into an adapter again."""
        folders = [Path(model).expanduser() for model in self.models]
        if not folders or not all((folder / "adapter_config.json").is_file() for folder in folders):
            return False
        from isomerge.adapters.adapter import is_adapter

        return all(map(is_adapter, folders))

    @property
    def is_adapted(self) -> bool:
        """The only model is base+adapter, which gives a model of its own."""
        from isomerge.merging.recipe import ModelReference

        try:
            return len(self.models) == 1 and ModelReference.parse(self.models[0]).adapter is not None
        except ValueError:
            return False

    def documents(
        self,
        *,
        method: str | None,
        base: str | None,
        weights: str | None,
        align: bool,
        level: str | None,
        seed: int | None,
        data: DataFlags,
        tokenizer: str | None = None,
        example: str = "isomerge merge {} -o OUT",
    ) -> list[Recipe]:
        """The recipes to run: read from the file, or made from the flags. `example` is how the verb is used."""
        from isomerge.merging.recipe import load_recipe, recipe_of
        from isomerge.merging.tokens import ROWS

        if self.recipe is not None:
            flags = {"--method": method, "--base": base, "--weights": weights, "--align": align, "--level": level}
            flags |= {**data.flags(), "--tokenizer": tokenizer}
            given = [f"--{key}" for key in self.options] + [flag for flag, value in flags.items() if value]
            if given:
                raise RequestError(
                    f"{', '.join(given)} belongs in the recipe {self.recipe}. Write it there, or name the models on "
                    "the command line instead."
                )
            return load_recipe(self.recipe)
        _require_commas(self.models, weights)
        if len(self.models) < 2 and not (base or method or self.is_adapted):  # a second one was probably forgotten
            raise RequestError(
                f"Merging needs a recipe, or at least two models: {example.format('recipe.yml')}, or "
                f"{example.format('model-a model-b')}. One alone is taken where --method names a method for it, such "
                "as passthrough."
            )
        name = method or "linear"
        options = typed_options(name, self.options)
        if weights is not None:
            options["weight"] = numbers(weights, len(self.models))
        for flag, value in {"--level": level, "--evidence": data.evidence}.items():
            if value is not None and not align:
                raise RequestError(f"{flag} says how to align, and nothing is aligned. Add --align, or leave it out.")
        settings: bool | dict[str, Any] = {"level": level or "full"} if align else False
        if isinstance(settings, dict) and data.evidence is not None:
            settings["evidence"] = data.evidence
        try:
            recipe = recipe_of(
                self.models, name, base=base, options=options, align=settings, data=data.data(),
                calibrate={"fisher": data.fisher} if data.fisher is not None else None, repair=data.repair,
                tokenizer=None if tokenizer == ROWS else tokenizer, seed=seed or 0,
            )  # fmt: skip
        except RequestError as error:
            raise RequestError(f"{error}{_as_flags(str(error), base)}") from error
        return [recipe]


def read_request(arguments: Sequence[str], known: Sequence[str]) -> Request:
    """Tell the models from the options among the arguments no flag has taken; `known` are the verb's own flags.

    >>> read_request(["a", "b", "--density", "0.5", "--no-normalize"], [])
    Request(models=['a', 'b'], options={'density': '0.5', 'normalize': 'false'})
    """
    models: list[str] = []
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            models.append(word)
            continue
        if not word.startswith("--"):
            raise RequestError(f"No such option: {word}. {did_you_mean(word, known)}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--")
            follows = follows and (not _is_switch(key) or rest[0].lower() in ("true", "false"))
            value = rest.pop(0) if follows else "true"
        if key.startswith("no-") and not equals:
            key, value = key[3:], "false"
        options[key.replace("-", "_")] = value
    if options:
        _refuse_unknown(options, known)
    return Request(models, options)


def _is_switch(key: str) -> bool:
    """Whether an option of this name is true or false: then no value follows it."""
    return bool in _known_options().get(key.removeprefix("no-").replace("-", "_"), set())


def _known_options() -> dict[str, set[type]]:
    """Every option that some method has, with its types."""
    from isomerge.merging.data_methods import ALL_METHODS

    known: dict[str, set[type]] = {}
    for method in ALL_METHODS.values():
        for option in method.options:
            known.setdefault(option.name, set()).add(option.kind)
        for name in getattr(method, "old_options", ()):
            known.setdefault(name, {float})
    return known


def _refuse_unknown(options: Iterable[str], flags: Sequence[str]) -> None:
    known = _known_options()
    for key in options:
        if key not in known:
            flag = "--" + key.replace("_", "-")
            hint = did_you_mean(flag, [*flags, *("--" + name.replace("_", "-") for name in known)])
            raise RequestError(
                f"No such option: {flag}. {hint if hint.startswith('Did') else 'See isomerge merge --help.'}"
            )


def _as_flags(problem: str, base: str | None) -> str:
    """The keys of a recipe that a problem speaks of, as flags."""
    hint = " On the command line base_model is --base, as in isomerge merge B --base A." if not base else ""
    hint = hint if "base" in problem else ""
    if "is wanted, and there is no 'base_model'" in problem:
        hint += " Or name the model whose tokenizer you want, or union."
    if "'data'" in problem:
        hint += " On the command line data is --data PATH; given once for each model, it is that model's own."
    return hint


def _require_commas(models: Sequence[str], weights: str | None) -> None:
    """A number among the models is one of several values that were written apart."""
    absent = [word for word in models if not Path(word).exists()]
    if not absent:
        return
    from isomerge.data.columns import is_number

    stray = [word for word in absent if is_number(word.strip(","))]
    if not stray:
        return
    together = ",".join(word.strip(",") for word in ([weights] if weights else []) + stray)
    example = f"--weights {together}" if weights else "--weights 0.5,0.5"
    raise RequestError(
        f"'{stray[0]}' was read as a model. The values for several models are joined by commas, without spaces: write "
        f"{example}."
    )


def numbers(weights: str, count: int) -> list[float]:
    """The weights as numbers, one per model.

    >>> numbers("0.25, 0.75", 2)
    [0.25, 0.75]
    """
    try:
        found = [float(part) for part in weights.split(",")]
    except ValueError:
        raise RequestError(f"--weights cannot be '{weights}'. Write numbers with commas, as in 0.5,0.5.") from None
    if len(found) != count:
        said = "1 number" if len(found) == 1 else f"{len(found)} numbers"
        raise RequestError(f"--weights has {said} for {count} models. Write one for each, in order.")
    return found


def typed_options(method: str, given: dict[str, str]) -> dict[str, Any]:
    """The values as the method's options want them; a list where there are commas."""
    from isomerge.merging.data_methods import ALL_METHODS

    if method not in ALL_METHODS:
        raise RequestError(f"--method cannot be '{method}'. {did_you_mean(method, ALL_METHODS)}")
    known = {option.name: option for option in ALL_METHODS[method].options}
    old = getattr(ALL_METHODS[method], "old_options", {})
    found: dict[str, Any] = {}
    for key, text in ((old.get(key, key), text) for key, text in given.items()):
        if key not in known:
            flags = [f"--{name.replace('_', '-')}" for name in known]
            flag = "--" + key.replace("_", "-")
            raise RequestError(f"The method {method} has no option {flag}. {did_you_mean(flag, flags)}")
        values = [_value(key, part.strip(), known[key].kind) for part in text.split(",")]
        found[key] = values if "," in text else values[0]
    return found


def _value(key: str, text: str, kind: type) -> Any:
    flag = f"--{key.replace('_', '-')}"
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise RequestError(f"{flag} cannot be '{text}'. Write {flag} or --no-{key.replace('_', '-')}.")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(f"{flag} cannot be '{text}'. Write {what}, or one for each model with commas.") from None
