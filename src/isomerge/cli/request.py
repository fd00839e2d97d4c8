"""What merge, plan and sweep are asked for: a recipe, or models with a method and its options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isomerge.cli.flags import DataFlags, MergeFlags, Reading
from isomerge.cli.interruption import announce_output
from isomerge.errors import RequestError, did_you_mean, nearest

if TYPE_CHECKING:
    from isomerge.merging.recipe import Recipe

WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class MergeRequest:
    """The path of a recipe, or models and the method's options as they were written."""

    models: list[str]
    options: dict[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> Path | None:
        """The only argument, if it is a file that holds no weights."""
        if len(self.models) != 1:
            return None
        path = Path(self.models[0]).expanduser()
        is_recipe = path.suffix in {".yml", ".yaml"} or (path.is_file() and path.suffix not in WEIGHT_FILES)
        return path if is_recipe else None

    @property
    def are_adapters(self) -> bool:
        """Every model is the folder of an adapter: they are merged into one adapter."""
        folders = [Path(model).expanduser() for model in self.models]
        if not folders or not all((folder / "adapter_config.json").is_file() for folder in folders):
            return False
        from isomerge.adapters.adapter import is_adapter

        return all(map(is_adapter, folders))

    @property
    def is_adapted(self) -> bool:
        """The only model is base+adapter, which is already a merge."""
        from isomerge.merging.recipe import ModelReference

        try:
            return len(self.models) == 1 and ModelReference.parse(self.models[0]).adapter is not None
        except ValueError:
            return False

    def method_options(self, merging: MergeFlags) -> dict[str, Any]:
        """The method's options with their types, and the weights among them."""
        options = typed_options(merging.method or "linear", self.options)
        if merging.weights is not None:
            options["weight"] = numbers(merging.weights, len(self.models))
        return options

    def documents(
        self,
        merging: MergeFlags,
        reading: Reading | None = None,
        data: DataFlags | None = None,
        *,
        seed: int | None,
        example: str = "isomerge merge {} -o OUT",
    ) -> list[Recipe]:
        """The recipes to run: read from the file, or made from the flags. `example` shows how the verb is used."""
        reading, data = reading or Reading(), data or DataFlags()
        if self.recipe is not None:
            return self._recipe_file(self.recipe, merging, reading, data)
        _require_commas(self.models, merging.weights)
        # A second model was probably forgotten.
        if len(self.models) < 2 and not (merging.base or merging.method or self.is_adapted):
            raise RequestError(
                f"Merging needs a recipe or at least two models: {example.format('recipe.yml')}, or "
                f"{example.format('model-a model-b')}. For a single model name a method such as --method passthrough."
            )
        options = self.method_options(merging)
        for flag, value in {"--level": merging.level, "--evidence": data.evidence}.items():
            if value is not None and not merging.align:
                raise RequestError(f"{flag} has no effect without --align. Add --align, or leave {flag} out.")
        align: bool | dict[str, Any] = False
        if merging.align:
            align = {"level": merging.level or "full"} | ({"evidence": data.evidence} if data.evidence else {})

        from isomerge.merging.recipe import recipe_of

        try:
            recipe = recipe_of(
                self.models, merging.method or "linear", base=merging.base, options=options, align=align,
                data=_data_of(data.data or (), reading), repair=data.repair, seed=seed or 0,
                calibrate={"fisher": data.fisher} if data.fisher is not None else None,
                tokenizer=merging.tokenizer if merging.same_ids else None,
            )  # fmt: skip
        except RequestError as error:
            hinted = RequestError(f"{error}{_as_flags(error, merging)}")
            hinted.missing = error.missing
            raise hinted from error
        return [recipe]

    def _recipe_file(self, path: Path, merging: MergeFlags, reading: Reading, data: DataFlags) -> list[Recipe]:
        given = [f"--{key}" for key in self.options] + flags_given(merging, reading, data)
        if given:
            raise RequestError(
                f"{', '.join(given)} belongs in the recipe {path}. Write it there, or name the models on the command "
                "line instead."
            )
        from isomerge.merging.recipe import load_recipe

        return load_recipe(path)


def flags_given(*groups: MergeFlags | Reading | DataFlags) -> list[str]:
    """The flags of these groups that were given."""
    return [f"--{name}" for group in groups for name, value in vars(group).items() if value]


def _data_of(paths: Sequence[Path], reading: Reading) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Data as a recipe writes it."""
    settings = {key: value for key, value in vars(reading).items() if value is not None}
    if settings and not paths:
        raise RequestError(f"{', '.join(flags_given(reading))} has no effect without data. Add --data PATH.")
    entries = [{"path": str(path), **settings} for path in paths]
    return entries[0] if len(entries) == 1 else entries or None


def read_request(models: Sequence[str], context: typer.Context) -> MergeRequest:
    """The request of a verb: its models, and the method's options among the words that no flag has taken."""
    known = [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("-")]
    return split_words([*models, *context.args], known)


def split_words(arguments: Sequence[str], known: Sequence[str]) -> MergeRequest:
    """Separate the models from the options of methods; `known` are the verb's own flags.

    >>> split_words(["a", "b", "--density", "0.5", "--no-normalize"], [])
    MergeRequest(models=['a', 'b'], options={'density': '0.5', 'normalize': 'false'})
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
    return MergeRequest(models, options)


def _is_switch(key: str) -> bool:
    """Whether an option of this name is true or false, so that no value follows it."""
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
            near = nearest(_flag(key), [*flags, *map(_flag, known)])
            hint = f"Did you mean '{near}'?" if near else "See isomerge merge --help."
            raise RequestError(f"No such option: {_flag(key)}. {hint}")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _as_flags(error: RequestError, merging: MergeFlags) -> str:
    """The flags for the keys of a recipe that an error says are missing."""
    hint = ""
    if "base_model" in error.missing:
        hint += " On the command line, base_model is --base, as in isomerge merge B --base A."
        if merging.tokenizer == "base":
            hint += " Or name the model whose tokenizer to use, or union."
    if "data" in error.missing:
        hint += " On the command line, data is --data PATH; give it once per model if each has its own."
    return hint


def _require_commas(models: Sequence[str], weights: str | None) -> None:
    """A number among the models is one of several values that were not joined by commas."""
    absent = [word for word in models if not Path(word).exists()]
    if not absent:
        return
    from isomerge.data.tables import is_number

    stray = [word for word in absent if is_number(word.strip(","))]
    if not stray:
        return
    together = ",".join(word.strip(",") for word in ([weights] if weights else []) + stray)
    example = f"--weights {together}" if weights else "--weights 0.5,0.5"
    raise RequestError(
        f"'{stray[0]}' was read as a model. Join the values for several models by commas without spaces: {example}."
    )


def numbers(weights: str, count: int) -> list[float]:
    """The weights as numbers, one per model.

    >>> numbers("0.25, 0.75", 2)
    [0.25, 0.75]
    """
    try:
        values = [float(part) for part in weights.split(",")]
    except ValueError:
        raise RequestError(f"--weights cannot be '{weights}'. Write numbers with commas, as in 0.5,0.5.") from None
    if len(values) != count:
        noun = "number" if len(values) == 1 else "numbers"
        raise RequestError(f"--weights has {len(values)} {noun} for {count} models. Write one per model, in order.")
    return values


def typed_options(method: str, given: dict[str, str]) -> dict[str, Any]:
    """The values with the types of the method's options; a list where there are commas."""
    from isomerge.merging.data_methods import ALL_METHODS

    if method not in ALL_METHODS:
        raise RequestError(f"--method cannot be '{method}'. {did_you_mean(method, ALL_METHODS)}")
    known = {option.name: option.kind for option in ALL_METHODS[method].options}
    old = getattr(ALL_METHODS[method], "old_options", {})
    options: dict[str, Any] = {}
    for key, text in ((old.get(key, key), text) for key, text in given.items()):
        if key not in known:
            hint = did_you_mean(_flag(key), map(_flag, known))
            raise RequestError(f"The method {method} has no option {_flag(key)}. {hint}")
        values = [_value(key, part.strip(), known[key]) for part in text.split(",")]
        options[key] = values if "," in text else values[0]
    return options


def _value(key: str, text: str, kind: type) -> Any:
    flag = _flag(key)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise RequestError(f"{flag} cannot be '{text}'. Write {flag} or --no-{flag[2:]}.")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(f"{flag} cannot be '{text}'. Write {what}, or one per model with commas.") from None


def reserve_output(out: Path, inputs: Sequence[str], *, force: bool) -> None:
    """Refuse, before any work, an output folder that is an input or that is occupied."""
    from isomerge.checkpoint import refuse_overwrite
    from isomerge.checkpoint.staging import Staging

    refuse_overwrite(out, inputs)
    Staging(out, force=force)  # refuses an occupied folder, and touches nothing until it is entered
    announce_output(out)
