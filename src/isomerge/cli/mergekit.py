"""mergekit's programs: every flag of theirs (mergekit 0.1.5) in the words of isomerge, or why it is not needed here.

`mergekit-yaml CONFIG OUT …` is `isomerge mergekit-yaml CONFIG OUT …`, which is `isomerge merge CONFIG -o OUT …`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge.cli.flags import Force
from isomerge.cli.output import Voice
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


# --- what a flag is ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Flag:
    """One flag of mergekit. What is given as it is by default there needs no word here."""

    name: str
    """As in --name. A switch is also --no-name."""
    words: Callable[[Any], Sequence[str]] | Sequence[str] = ()
    """The same in the words of the verb that does the work."""
    help: str = ""
    needless: str = ""
    """Why it may be given and changes nothing."""
    refused: str = ""
    """Why it is not obeyed although the result would be another, and what to do instead."""
    metavar: str | None = None
    kind: Any = bool
    default: Any = False
    short: str | None = None
    alone: bool = False
    """A switch without --no-name, or whose only name is short."""
    always: bool = False
    """Its default is another one here."""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """As the parser wants it."""
        names = f"--{self.name}" if self.kind is not bool or self.alone else f"--{self.name}/--no-{self.name}"
        spelled = [self.short] if self.short and self.alone else [names, *([self.short] if self.short else [])]
        meaning = self.help or (f"Not needed: {self.needless}." if self.needless else f"Refused: {self.refused}.")
        settings = typer.Option(*spelled, metavar=self.metavar, help=meaning, count=self.name == "verbosity")
        kind = self.kind | None if self.default is None else self.kind
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, settings]
        )

    def translated(self, value: Any) -> tuple[Sequence[str], str | None]:
        """The words for isomerge, and what to say about it."""
        if value in (self.default, []) and not self.always:  # some parsers give [] for a list that is not there
            return (), None
        long = f"--no-{self.name}" if value is False else f"--{self.name}"
        written = self.short if self.short and self.alone else long
        if self.refused:
            raise RequestError(f"{written} cannot be obeyed: {self.refused}.")
        if self.needless:
            return (), f"{written} is not needed: {self.needless}."
        return self.words(value) if callable(self.words) else self.words, None


def value_of(flag: str) -> Callable[[Any], list[str]]:
    return lambda value: [flag, str(value)]


def in_bytes(size: str) -> list[str]:
    """mergekit's help calls them parameters; its writer counts bytes.

    >>> in_bytes("5B"), in_bytes("100k")
    (['--shard-size', '5000000000'], ['--shard-size', '100000'])
    """
    found = re.fullmatch(r"(\d+)([kmb]?)", size.strip().lower())
    if not found:
        raise RequestError(f"--out-shard-size cannot be '{size}'. Write a whole number, with K, M or B, as in 5B.")
    return ["--shard-size", str(int(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]])]


def approximation(name: str) -> str:
    """mergekit's other ways to make rows are not here."""
    if name not in ("omp", "subword", "mean", "zero"):
        raise RequestError(
            f"--approximation-method cannot be '{name}' here: rows are made by omp, subword, mean or zero. Choose one "
            "of them, or use mergekit."
        )
    return name


def on_device(name: str) -> list[str]:
    if name == "auto":
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    return ["--device", name]


def downloads_to(folder: str) -> list[str]:
    """Not a flag of any verb: an environment variable, which a library may have read already."""
    from huggingface_hub import constants

    os.environ["HF_HUB_CACHE"] = constants.HF_HUB_CACHE = folder
    return []


def targets(included: Sequence[str] | None, excluded: Sequence[str] | None) -> list[str]:
    """mergekit looks for its patterns anywhere in a layer's name; here one pattern fits the whole name.

    >>> targets(["q_proj", "mlp"], ["lm_head"])
    ['--targets', '^(?!.*(?:lm_head))(?=.*(?:q_proj|mlp)).*']
    """
    if not (included or excluded):
        return []
    never = f"(?!.*(?:{'|'.join(excluded)}))" if excluded else ""
    return ["--targets", f"^{never}(?=.*(?:{'|'.join(included or ())})).*"]


# --- the flags --------------------------------------------------------------------------------------------------------
ON_A_DEVICE = "memory is bounded on every device, and one device is used"
COMMON = (
    Flag("random-seed", value_of("--seed"), "Seed of methods that draw random numbers.", metavar="N", kind=int,
         default=None),
    Flag("cuda", ("--device", "cuda"), "Compute on the GPU."),
    Flag("gpu-rich", ("--device", "cuda"), "Compute on the GPU.", alone=True),
    Flag("device", on_device, "Where to compute: cpu, cuda, cuda:1, auto.", metavar="NAME", kind=str, default=None),
    Flag("num-threads", value_of("--threads"), "Tensors processed at once.", metavar="N", kind=int, default=None,
         short="-j"),
    Flag("out-shard-size", in_bytes, "The largest file, in bytes: 5B is 5 GB, as mergekit counts.", metavar="SIZE",
         kind=str, default=None),
    Flag("copy-tokenizer", ("--no-copy-tokenizer",), "Copy the tokenizer of the base or the first model.",
         default=True),
    Flag("write-model-card", ("--no-report",), "Write a model card and a report.", default=True),
    Flag("transformers-cache", downloads_to, "Where downloads are stored, as with HF_HUB_CACHE.", metavar="DIR",
         kind=str, default=None),
    Flag("lora-merge-cache", needless="adapters are applied while their model is read, and nothing is stored",
         metavar="DIR", kind=str, default=None),
    Flag("lora-merge-dtype", needless="adapters are applied in float32, and rounded once, when the result is written",
         metavar="DTYPE", kind=str, default=None),
    Flag("allow-crimes", needless="models of one architecture merge without it; those of different ones are refused, "
         "with what differs"),
    Flag("lazy-unpickle", needless="a pickle is mapped into memory, and not loaded whole"),
    Flag("clone-tensors", needless="a layer may always be used several times"),
    Flag("low-cpu-memory", needless=ON_A_DEVICE),
    Flag("read-to-gpu", needless=ON_A_DEVICE),
    Flag("multi-gpu", needless=ON_A_DEVICE),
    Flag("async-write", needless="tensors are always written while others are computed"),
    Flag("write-threads", needless="every thread writes what it has computed", metavar="N", kind=int, default=1),
    Flag("verbosity", needless="notes and progress are always shown", kind=int, default=0, short="-v",
         alone=True),
    Flag("safe-serialization", refused="pickles are never written. Convert the safetensors of the result if you must",
         default=True),
    Flag("unsafe-truncate-embeddings", refused="rows that tokens have are not thrown away. Write tokenizer: "
         "{source: base} or {source: union} into the recipe, which match tokens by their text"),
    Flag("no-quiet", needless="output is shown unless --quiet is given", alone=True),
    Flag("no-trust-remote-code", needless="code that comes with a model is not run unless asked for", alone=True),
)  # fmt: skip
MULTI = (
    Flag("intermediate-dir", needless="models in between are computed where they are used, and are not written",
         metavar="DIR", kind=str, default=None, short="-I"),
    Flag("lazy", needless="nothing in between is written", default=True),
)  # fmt: skip
EXTRACT = (
    Flag("max-rank", value_of("--rank"), "Largest rank of a layer.", metavar="N", kind=int, default=128,
         always=True),
    Flag("include-regex", (), "Only layers in whose name this is found.", metavar="PATTERN", kind=list[str],
         default=None, short="-i"),
    Flag("exclude-regex", (), "No layers in whose name this is found.", metavar="PATTERN", kind=list[str],
         default=None, short="-e"),
    Flag("embed-lora", needless="a changed embedding always gets factors, like other layers"),
    Flag("distribute-scale", needless="only the product of the two factors counts", default=True),
    Flag("save-module", refused="only layers without a matrix are stored whole. Leave it out", metavar="NAME",
         kind=list[str], default=None),
    Flag("sv-epsilon", refused="the rank is chosen by the share that it keeps. Use isomerge extract with --energy",
         metavar="X", kind=float, default=0.0),
    Flag("skip-undecomposable", refused="changed norms are stored whole. Name the layers with --include-regex",
         alone=True),
)  # fmt: skip
MOE = (
    Flag("load-in-4bit", needless="prompts are run in the dtype that the base is stored in", alone=True),
    Flag("load-in-8bit", needless="prompts are run in the dtype that the base is stored in", alone=True),
    Flag("i-understand-this-is-not-useful-without-training",
         needless="copies of one model are built with a note", alone=True),
)  # fmt: skip
SURGERY = (
    Flag("k", value_of("--k"), "Shared tokens that a row is made of at most.", metavar="N", kind=int, default=64,
         short="-k"),
    Flag("approximation-method", lambda value: ["--method", approximation(value)],
         "omp, subword, mean or zero.", metavar="NAME", kind=str, default="omp", short="-a"),
    Flag("subword-method", refused="pieces of a text are averaged. Leave it out", metavar="NAME", kind=str,
         default="mean", short="-s"),
    Flag("weight-scheme", needless="omp finds its coefficients by least squares", metavar="NAME", kind=str,
         default="distance_proportional", short="-w"),
    Flag("cosine-similarity", needless="omp looks for no nearest neighbours", short="-c/-nc"),
    Flag("batch-size", needless="tokens are processed in batches that fit", metavar="N", kind=int, default=512),
    Flag("prefix-match", refused="tokens are matched by their whole text. Leave it out", metavar="WHERE", kind=str,
         default="no", short="-pm"),
    Flag("byte-match", needless="tokens of bytes are matched by their text", metavar="WHERE", kind=str, default="no",
         short="-bm"),
    Flag("magikarp", refused="all shared tokens are used. Leave it out"),
    Flag("new-vocab-noise", refused="no noise is added. Leave it out", metavar="X", kind=float, default=None,
         short="-nvn"),
    Flag("new-vocab-scale", refused="rows are not scaled. Leave it out", metavar="X", kind=float, default=None,
         short="-nvs"),
)  # fmt: skip
ONLY_MERGES = {"random-seed", "cuda", "gpu-rich", "device", "num-threads", "out-shard-size", "copy-tokenizer",
               "write-model-card"}  # fmt: skip
OF_SURGERY = SURGERY + tuple(
    replace(flag, needless="nothing random is drawn, and the tokenizer is always the donor's", help="", words=())
    if flag.name in {"random-seed", "copy-tokenizer"} else flag
    for flag in COMMON
)  # fmt: skip
OF_EXTRACT = EXTRACT + tuple(
    replace(flag, needless="an adapter is small, and extracting it has no such choice", help="")
    if flag.name in ONLY_MERGES else flag
    for flag in COMMON
)  # fmt: skip

ELSEWHERE = {
    "mergekit-pytorch": "Name the weight files themselves: isomerge merge a.safetensors b.safetensors -o OUT",
    "mergekit-evolve": "Coefficients are found by isomerge search RECIPE.yml --data PATH",
    "mergekit-mega": "Recipes of several documents are merged by isomerge mergekit-multi CONFIG --out-path OUT",
    "mergekit-layershuffle": "Write the layers as slices of a passthrough recipe: isomerge merge RECIPE.yml -o OUT",
    "mergekit-legacy": "Name models and method: isomerge merge A B --method METHOD -o OUT",
    "bakllama": "Write the layers as slices of a passthrough recipe: isomerge merge RECIPE.yml -o OUT",
}
"""mergekit's other programs, and what does their work here."""


# --- the verbs --------------------------------------------------------------------------------------------------------
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A recipe.")]


def hand_over(context: typer.Context, words: list[str], flags: Sequence[Flag], given: Any, voice: Voice) -> None:
    """Run the verb that does the work; the first word is its name."""
    notes = []
    for flag in flags:
        more, note = flag.translated(given[flag.key])
        words += more
        notes += [note] if note else []
    words += [f"--{name.replace('_', '-')}" for name, wanted in vars(voice).items() if wanted]
    if not voice.is_silent:
        print("".join(f"note: {note}\n" for note in notes), end="", file=sys.stderr)
    application: Any = context.parent and context.parent.command
    name, *rest = words
    command = application.commands[name]
    with command.make_context(name, rest, parent=context.parent) as inner:
        command.invoke(inner)


@verb(
    "Run mergekit-yaml's command line: the same arguments and flags.",
    "isomerge mergekit-yaml recipe.yml merged --copy-tokenizer --lazy-unpickle",
    more=[flag.parameter() for flag in COMMON],
)
def mergekit_yaml(
    context: typer.Context,
    config: Config,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    *,
    force: Force = False,
    voice: Voice,
    **given: Any,
) -> None:
    """Run mergekit-yaml's command line, as it is: isomerge merge CONFIG -o OUT in mergekit's words.

    Flags that are not needed here are accepted with a note; those that would give another result and cannot be obeyed
    are errors. Also installed as mergekit-yaml.
    """
    hand_over(context, ["merge", config, "-o", str(out), *_forced(force)], COMMON, given, voice)


@verb(
    "Run mergekit-multi's command line: a recipe of several documents.",
    "isomerge mergekit-multi recipe.yml --out-path merged --intermediate-dir between",
    more=[flag.parameter() for flag in (*MULTI, *COMMON)],
)
def mergekit_multi(
    context: typer.Context,
    config: Config,
    *,
    out_path: Annotated[Path, typer.Option(metavar="OUT", help="The folder to write.")],
    force: Force = False,
    voice: Voice,
    **given: Any,
) -> None:
    """Run mergekit-multi's command line, as it is: isomerge merge CONFIG -o OUT, whose recipe has several documents.

    The document without a name, or the last, is the result. Also installed as mergekit-multi.
    """
    hand_over(context, ["merge", config, "-o", str(out_path), *_forced(force)], (*MULTI, *COMMON), given, voice)


@verb(
    "Run mergekit-moe's command line: a mixture of experts.",
    "isomerge mergekit-moe recipe.yml mixture --copy-tokenizer",
    more=[flag.parameter() for flag in (*MOE, *COMMON)],
)
def mergekit_moe(
    context: typer.Context,
    config: Config,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    *,
    force: Force = False,
    voice: Voice,
    **given: Any,
) -> None:
    """Run mergekit-moe's command line, as it is: isomerge moe CONFIG -o OUT in mergekit's words.

    Also installed as mergekit-moe.
    """
    hand_over(context, ["moe", config, "-o", str(out), *_forced(force)], (*MOE, *COMMON), given, voice)


@verb(
    "Run mergekit-tokensurgeon's command line: another tokenizer for a model.",
    "isomerge mergekit-tokensurgeon model-a model-b drafting --k 64",
    more=[flag.parameter() for flag in OF_SURGERY],
)
def mergekit_tokensurgeon(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    donor: Annotated[str, typer.Argument(metavar="DONOR", help="The model whose tokenizer the result gets.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    *,
    force: Force = False,
    voice: Voice,
    **given: Any,
) -> None:
    """Run mergekit-tokensurgeon's command line, as it is: isomerge transplant MODEL --tokenizer DONOR -o OUT in
    mergekit's words. Also installed as mergekit-tokensurgeon.
    """
    words = ["transplant", model, "--tokenizer", donor, "-o", str(out), *_forced(force)]
    hand_over(context, words, OF_SURGERY, given, voice)


@verb(
    "Run mergekit-extract-lora's command line.",
    "isomerge mergekit-extract-lora --model finetuned --base-model base --out-path adapter --max-rank 16",
    more=[flag.parameter() for flag in OF_EXTRACT],
)
def mergekit_extract_lora(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Option(metavar="MODEL", help="The fine-tuned model.")],
    base_model: Annotated[str, typer.Option(metavar="MODEL", help="The model that was fine-tuned.")],
    out_path: Annotated[Path, typer.Option(metavar="OUT", help="The folder to write.")],
    force: Force = False,
    voice: Voice,
    **given: Any,
) -> None:
    """Run mergekit-extract-lora's command line, as it is: isomerge extract BASE FINETUNED -o OUT in mergekit's words.

    Embeddings that changed get factors, as with --embed-lora there. Also installed as mergekit-extract-lora.
    """
    words = ["extract", base_model, model, "-o", str(out_path), *_forced(force)]
    words += targets(given["include_regex"], given["exclude_regex"])
    hand_over(context, words, OF_EXTRACT, given, voice)


def _forced(force: bool) -> list[str]:
    return ["--force"] if force else []
