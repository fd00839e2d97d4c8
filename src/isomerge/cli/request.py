"""What merge, plan and sweep are asked for: a recipe, or models with a method and its options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isomerge.addresses import is_url
from isomerge.choices import method_options
from isomerge.cli.errors import see_help
from isomerge.cli.flags import DataFlags, MergeFlags, Reading
from isomerge.cli.interruption import announce_output
from isomerge.errors import RequestError, did_you_mean, nearest

if TYPE_CHECKING:
    from isomerge.checkpoint.upload import Upload
    from isomerge.merging.recipe import Recipe

WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


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
        if len(self.models) == 1 and "," in self.models[0] and not Path(self.models[0]).expanduser().exists():
            names = " ".join(self.models[0].split(","))
            raise RequestError(
                f"'{self.models[0]}' was read as one model: models are separated by spaces. Write "
                f"{example.format(names)}."
            )
        # A second model was probably forgotten.
        if len(self.models) < 2 and not (merging.base or merging.method or self.is_adapted):
            raise RequestError(
                f"Merging needs a recipe or at least two models: {example.format('recipe.yml')}, or "
                f"{example.format('model-a model-b')}. For a single model name a method such as --method passthrough."
            )
        options = self.method_options(merging)
        if data.learn_towards is not None and data.learn is None:
            raise RequestError("--learn-towards has no effect without --learn. Add --learn N.")
        level = merging.level
        if level is not None and any(option.name == "level" for option in method_options(merging.method or "linear")):
            options["level"], level = level, None
        for flag, value in {"--level": level, "--evidence": data.evidence, "--learn": data.learn}.items():
            if value is not None and not merging.align:
                raise RequestError(f"{flag} has no effect without --align. Add --align, or leave {flag} out.")
        align: bool | dict[str, Any] = False
        if merging.align:
            asked = {"evidence": data.evidence, "learn": data.learn, "learn_towards": data.learn_towards}
            align = {"level": level or "full"} | {key: value for key, value in asked.items() if value}

        from isomerge.merging.recipe import recipe_of

        try:
            recipe = recipe_of(
                self.models, merging.method or "linear", base=merging.base, options=options, align=align,
                data=_data_of(data.data or (), reading), repair=data.repair, seed=seed or 0,
                layer_scale=merging.layer_scale,
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


def find_output(request: MergeRequest, out: Path | None, context: typer.Context) -> tuple[MergeRequest, Path]:
    """The folder to write: that of -o, or the word after a recipe, as in mergekit."""
    named = request.models
    first = replace(request, models=named[:1])
    if out is not None and (len(named) == 1 or first.recipe is None):
        return request, out
    if first.recipe is not None and len(named) == 2 and out is None:
        return first, Path(named[1])
    if first.recipe is not None and len(named) > 1:
        raise RequestError(
            f"A recipe names its models, and '{named[2 if out is None else 1]}' is one more word after {named[0]}. "
            f"Write isomerge merge {named[0]} -o OUT."
        )
    raise RequestError(f"Missing option '-o' / '--out'. {context.command.epilog}. {see_help(context.command, context)}")


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
        if key in ("output", "out_dir", "output_dir") and "--out" in flags:
            raise RequestError(f"No such option: {_flag(key)}. The folder to write is named with -o/--out.")
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
    """The values with the types of the method's options; a list where commas are, but in a text for all models."""
    from isomerge.merging.data_methods import ALL_METHODS

    if method not in ALL_METHODS:
        raise RequestError(f"--method cannot be '{method}'. {did_you_mean(method, ALL_METHODS)}")
    known = {option.name: option for option in ALL_METHODS[method].options}
    old = getattr(ALL_METHODS[method], "old_options", {})
    options: dict[str, Any] = {}
    for key, text in ((old.get(key, key), text) for key, text in given.items()):
        if key not in known:
            hint = did_you_mean(_flag(key), map(_flag, known))
            raise RequestError(f"The method {method} has no option {_flag(key)}. {hint}")
        kind, whole = known[key].kind, known[key].kind is str and not known[key].per_model
        values = [_value(key, part.strip(), kind) for part in ([text] if whole else text.split(","))]
        options[key] = values if len(values) > 1 else values[0]
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


def reserve_output(out: Path, inputs: Sequence[str], *, force: bool, by_url: bool = False) -> None:
    """Refuse, before any work, an output folder that is an input or that is occupied. `by_url`: an address will do."""
    from isomerge.checkpoint import refuse_overwrite
    from isomerge.checkpoint.staging import Staging

    refuse_overwrite(out, inputs)
    if by_url and is_url(out):
        from isomerge.checkpoint.upload import Upload

        upload = Upload(out, force=force)
        upload.require_free()
        announce_output(upload.folder)
        return
    Staging(out, force=force)  # refuses an occupied folder, and touches nothing until it is entered
    announce_output(out)


@dataclass(frozen=True)
class Place:
    """Where a verb writes its model: the folder that was named, or one on its way to an address."""

    folder: Path
    upload: Upload | None = None

    def send(self, record: dict[str, Any], progress: Any) -> dict[str, Any]:
        """Bring the folder to its address, if it has one; the record with what was written under its final name."""
        if self.upload is None:
            return record
        self.upload.run(progress)
        return {key: _moved(value, self.upload) for key, value in record.items()}


def _moved(value: Any, upload: Upload) -> Any:
    if isinstance(value, (list, tuple)):
        return [_moved(one, upload) for one in value]
    return upload.shown(value) if isinstance(value, Path) and value.is_relative_to(upload.folder) else value


@contextmanager
def place_of(out: Path, *, force: bool) -> Iterator[Place]:
    """The place for `-o`, which goes away when it was only on the way."""
    if not is_url(out):
        yield Place(out)
        return
    from isomerge.checkpoint.upload import uploading

    with uploading(out, force=force) as upload:
        yield Place(upload.folder, upload)
