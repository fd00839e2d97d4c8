"""Flags that several verbs share, each declared once; groups of them are dataclasses, which `@verb` takes apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge import choices
from isomerge.errors import RequestError, did_you_mean


# --- values -----------------------------------------------------------------------------------------------------------
def one_of(flag: str, given: str, known: Iterable[str]) -> str:
    """`given` if it is known; otherwise an error that names the nearest known value.

    >>> one_of("--level", "full", choices.LEVELS)
    'full'
    """
    known = list(known)
    if given not in known:
        raise RequestError(f"{flag} cannot be '{given}'. {did_you_mean(given, known)}")
    return given


def offer(known: Iterable[str] | Callable[[], Mapping[str, str]]) -> Callable[[str], list[Any]]:
    """What a shell offers when TAB is pressed; values with a summary where `known` gives one.

    >>> offer(["grid", "together"])("t")
    ['together']
    """

    def complete(incomplete: str) -> list[Any]:
        values = known() if callable(known) else known
        starting = [value for value in values if value.startswith(incomplete)]
        return [(value, values[value]) for value in starting] if isinstance(values, Mapping) else starting

    return complete


def choice(flag: str, known: tuple[str, ...], help: str = "", *, argument: bool = False) -> Any:
    """An enumerated option or argument. Not click's Choice, which does not suggest the nearest value."""

    def check(given: str | None) -> str | None:
        return None if given is None else one_of(flag, given, known)

    make = typer.Argument if argument else typer.Option
    return make(metavar="|".join(known), autocompletion=offer(known), callback=check, help=help)


def readable(flag: str, reader: str) -> Callable[[typer.Context, str | None], str | None]:
    """A callback that refuses, before any work, what a reader of isomerge.checkpoint cannot understand."""

    def check(context: typer.Context, given: str | None) -> str | None:
        # Shell completion must not wait for torch, and refuses nothing.
        if given is not None and not context.resilient_parsing:
            from isomerge import checkpoint

            try:
                getattr(checkpoint, reader)(given)
            except RequestError as error:
                raise RequestError(f"{flag} cannot be '{given}'. {error}") from None
        return given

    return check


def _known_tokenizer(given: str | None) -> str | None:
    """Refuse, before any work, a word that is neither known nor a folder nor a hub id."""
    known = choices.TOKENIZERS
    if given is None or given in known or "/" in given or Path(re.split("[@+]", given)[0]).expanduser().exists():
        return given
    raise RequestError(f"--tokenizer cannot be '{given}': there is no such model. {did_you_mean(given, known)}")


def option(metavar: str, help: str, *names: str, min: float | None = None) -> Any:
    """An option with a value."""
    return typer.Option(*names, metavar=metavar, help=help, min=min)


def switch(name: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help)


# --- flags ------------------------------------------------------------------------------------------------------------
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a file, a URL or a hub id.")]
Out = Annotated[Path, option("OUT", "The folder to write.", "-o", "--out")]
Force = Annotated[bool, switch("--force", "Replace existing output.")]
Seed = Annotated[int, option("N", "Random seed.")]
Device = Annotated[str, option("NAME", "Where to compute: cpu, cuda, cuda:1, …")]
Threads = Annotated[
    int | None,
    option("N", "Units or tensors processed at once; all cores by default.", min=1),
]
Engine = Annotated[
    str, choice("--engine", choices.ENGINES, "Compute in threads of this process, or on the workers of a Ray cluster.")
]
Address = Annotated[
    str | None,
    option("HOST:PORT", "The Ray cluster to join; RAY_ADDRESS, or else one of this machine, by default."),
]
AlignMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        callback=readable("--max-memory", "parse_size"),
        help="Memory budget: as many workers as fit, at least one; no output check if the model does not fit.",
    ),
]
MergeMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        callback=readable("--max-memory", "parse_size"),
        help="Memory budget: start only as many workers as fit; fail if one does not.",
    ),
]
ShardSize = Annotated[
    str,
    typer.Option(metavar="SIZE", callback=readable("--shard-size", "parse_size"), help="The largest file to write."),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        autocompletion=offer(choices.DTYPES),
        callback=readable("--out-dtype", "parse_dtype"),
        help="Data type of the output (bfloat16, float16, float32, float64); the input's by default.",
    ),
]
Level = Annotated[
    str,
    choice(
        "--level",
        choices.LEVELS,
        "What may move: units and heads; FFN units and head rotations, as in the paper; every exact symmetry.",
    ),
]
Evidence = Annotated[
    str | None,
    choice(
        "--evidence",
        choices.EVIDENCE,
        "What decides the alignment; with --data, activations for the residual stream and weights elsewhere.",
    ),
]
Learn = Annotated[
    int | None,
    option("N", "Then learn the alignment for this many gradient steps on --data; needs no labels.", "--learn", min=1),
]
LearnTowards = Annotated[
    str | None,
    choice(
        "--learn-towards",
        choices.LEARN_TOWARDS,
        "What --learn compares the midpoint with: the predictions of the models, or the labels of --data.",
    ),
]
Data = Annotated[
    Path | None,
    option(
        "PATH", "A folder or archive of images in class folders; .txt, .jsonl, .csv, .tsv or CoNLL; a folder of those."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        autocompletion=offer(choices.TASKS),
        help=f"{', '.join(choices.TASKS)}; module:function for your own; lm-eval:NAME. "
        "By default it follows from the model's class.",
    ),
]
Limit = Annotated[int | None, option("N", "Use this many examples, drawn evenly over the data.", min=1)]
Models = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE.yml | A B …", help="A recipe, or models; a method's options are flags."),
]


# --- groups -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reading:
    """How data is read."""

    split: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            autocompletion=offer(choices.SPLITS),
            help="Which part to use, if the data has parts: train, validation or test.",
        ),
    ] = None
    text: Annotated[str | None, option("COL", "Column of the texts, by name or by position from 0; two as 'a,b'.")] = (
        None
    )
    label: Annotated[str | None, option("COL", "Column of the labels; several as 'a,b,c'.")] = None
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            autocompletion=offer(choices.DATA_KINDS),
            help=f"Format of the data, if it is not recognised: {', '.join(choices.DATA_KINDS)}.",
        ),
    ] = None
    limit: Limit = None


@dataclass(frozen=True)
class Running:
    """How models are run on data."""

    length: Annotated[int | None, option("N", "Longest text, in tokens; the model's limit by default.", min=2)] = None
    batch_size: Annotated[int | None, option("N", "Examples per batch.", min=1)] = None
    device: Device = "cpu"
    seed: Seed = 0


def data_source(path: Path | None, reading: Reading, running: Running) -> dict[str, Any] | None:
    """Data and how to read it, as the library takes both."""
    return None if path is None else {"path": str(path), **vars(reading), "length": running.length}


@dataclass(frozen=True)
class MergeFlags:
    """A merge of models that are named on the command line."""

    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=offer(choices.methods),
            help="Merge method, linear by default; see isomerge list methods.",
        ),
    ] = None
    weights: Annotated[
        str | None, option("LIST", "One number per model, as in 0.5,0.5; equal by default.", "--weights", "--weight")
    ] = None
    base: Annotated[str | None, option("MODEL", "The common ancestor; its config and side files are kept.")] = None
    align: Annotated[bool, switch("--align", "Align the models before merging.")] = False
    level: Annotated[str | None, choice("--level", choices.LEVELS, "What may move when aligning; full by default.")] = (
        None
    )
    layer_scale: Annotated[
        str | None,
        choice("--layer-scale", choices.LAYER_SCALES, "Scale each model's change in each layer before merging."),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="union|base|MODEL|rows",
            autocompletion=offer(choices.TOKENIZERS),
            callback=_known_tokenizer,
            help="Match tokens by text: keep those of all models (union), of the base, or of MODEL. With rows, merge "
            "row by row although token ids differ.",
        ),
    ] = None

    @property
    def same_ids(self) -> bool:
        """Whether models that number their tokens differently are refused."""
        return self.tokenizer != choices.ROWS


@dataclass(frozen=True)
class DataFlags:
    """Data that a merge runs the models on, and what for."""

    data: Annotated[
        list[Path] | None,
        option(
            "PATH",
            "Images or texts to run the models on; give it once for all models, or once per model, in order.",
            "--data",
        ),
    ] = None
    evidence: Evidence = None
    learn: Learn = None
    learn_towards: LearnTowards = None
    fisher: Annotated[
        str | None,
        choice(
            "--fisher",
            choices.FISHER_KINDS,
            "Labels for Fisher information: drawn from the model's predictions (true), or those of --data.",
        ),
    ] = None
    repair: Annotated[
        bool, switch("--repair", "After merging, rescale units to the parents' activation statistics.")
    ] = False
