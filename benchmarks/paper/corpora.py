"""The data sets of the language experiments, each read into (input, target) pairs on the labels its task shares.

A user's `--data` folder holds `emotion/`, `ner/` and `glue/`, one folder per set as its authors publish it; a set that
is not there is refused with the paths that were looked for. Sets of the original scale come from the hub, but for the
emotions, which are not there. Targets are numbers of labels; of tags, one per word; of STS-B, the score itself.

    read("tec", "train", Path("data"))  →  [("a text", 2), …]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import parsers
from parsers import EKMAN, EMOTIONS, Example
from runner import Run

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
LABELS: dict[str, tuple[str, ...]] = {
    "emotion": EMOTIONS, "emotion-6": EKMAN, "ner": TAGS, "CoLA": ("0", "1"), "STS-B": (),
}  # fmt: skip
UNIFIED = "unified/unified-dataset.jsonl"


@dataclass(frozen=True)
class Hub:
    """A data set of the hub; `splits` are its own names of ours."""

    name: str
    config: str | None
    splits: Mapping[str, str]
    revision: str | None = None


@dataclass(frozen=True)
class Corpus:
    """One set: files under the data folder by split, or rows of the hub; `parse` reads one file, or the rows."""

    name: str
    task: str
    parse: Callable[[Any], Iterator[Example]]
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hub: Hub | None = None
    beside: Sequence[str] = ()
    """Files that `parse` reads as well."""
    cut: bool = False
    """All is in one file: every fifth example, after a shuffle, is for testing."""

    def found(self, split: str, data: Path | None) -> Iterator[Example]:
        if self.hub is not None:
            yield from self.parse(_from_hub(self.hub, split))
        for file in self.files.get(split, ()):
            assert data is not None, "require() comes first"
            yield from self.parse(data / file)


def _from_hub(hub: Hub, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SystemExit(f"Reading {hub.name} from the hub: install isomerge[eval], which brings datasets.") from error
    return datasets.load_dataset(hub.name, hub.config, split=hub.splits[split], revision=hub.revision)


def _emotion(name: str, parse: Any, train: Sequence[str], test: Sequence[str]) -> Corpus:
    return Corpus(name, "emotion", parse, {"train": train, "test": test})


def _cut(name: str, task: str, parse: Any, file: str) -> Corpus:
    return Corpus(name, task, parse, {"train": [file], "test": [file]}, cut=True)


def _ner(name: str, train: Sequence[str], test: Sequence[str]) -> Corpus:
    return Corpus(name, "ner", parsers.conll, {"train": train, "test": test})


def _emoint(*ends: str) -> list[str]:
    return [f"emotion/emoint/{emotion}{end}" for emotion in EMOTIONS for end in ends]


_CROSSNER = [
    _ner(f"crossner-{domain}", [f"ner/crossner/{domain}/{part}.txt" for part in ("train", "dev")],
         [f"ner/crossner/{domain}/test.txt"])
    for domain in ("ai", "literature", "music", "politics", "science")
]  # fmt: skip
_HERE = [
    _emotion("emoint", parsers.emoint, _emoint("-ratings-0to1.train.txt", "-gold.dev.txt"), _emoint("-gold.test.txt")),
    _emotion("ssec", parsers.ssec, ["emotion/ssec/train.csv"], ["emotion/ssec/test.csv"]),
    _cut("tec", "emotion", parsers.tec, "emotion/tec/Jan9-2012-tweets-clean.txt"),
    _cut("isear", "emotion", parsers.isear, "emotion/isear/isear.csv"),
    _cut("crowdflower", "emotion", parsers.crowdflower, "emotion/crowdflower/text_emotion.csv"),
    _emotion("dailydialog", parsers.dailydialog, [], ["emotion/dailydialog/test.tsv"]),
    Corpus("goemotions", "emotion", parsers.goemotions, {"test": ["emotion/goemotions/test.tsv"]},
           beside=["emotion/goemotions/ekman_mapping.json", "emotion/goemotions/emotions.txt"]),
    _emotion("dair-emotion", parsers.dair, [], ["emotion/dair-emotion/test.txt"]),
    _emotion("affectivetext", parsers.affectivetext, [], ["emotion/affectivetext-SE0714/affectivetext.tsv"]),
    *_CROSSNER,
    _ner("btc", [f"ner/btc/{section}.conll" for section in "abeg"], ["ner/btc/f.conll"]),
    _ner("wnut17", ["ner/wnut17/train.conll"], ["ner/wnut17/test.conll"]),
    _ner("gum", ["ner/gum/train.conll"], ["ner/gum/test.conll"]),
    _ner("wikigold", [], ["ner/wikigold/wikigold.conll.txt"]),
    Corpus("CoLA", "CoLA", parsers.cola,
           {"train": ["glue/CoLA/train.tsv", "glue/CoLA/val.tsv"], "test": ["glue/CoLA/dev.tsv"]}),
    Corpus("STS-B", "STS-B", parsers.stsb,
           {"train": ["glue/STS-B/train.tsv", "glue/STS-B/dev.tsv"], "test": ["glue/STS-B/test.tsv"]}),
]  # fmt: skip
_GLUE = {"train": "train", "test": "validation"}  # the labels of the real test sets are not public
_PARQUET = "refs/convert/parquet"  # the scripts that these two were published as are no longer run
_ORIGINAL = [
    *(
        _cut(f"unified-{source}", "emotion-6", partial(parsers.unified, source=source), UNIFIED)
        for source in ("emoint", "ssec", "electoraltweets", "grounded_emotions", "affectivetext",
                       "dailydialog", "crowdflower", "tec", "tales-emotion", "isear")
    ),
    *(
        Corpus(f"ontonotes-{genre}", "ner", partial(parsers.ontonotes_rows, genre=genre),
               hub=Hub("ontonotes/conll2012_ontonotesv5", "english_v4", {"train": "train", "test": "test"}, _PARQUET))
        for genre in ("bc", "bn", "mz", "nw", "tc", "wb")
    ),
    Corpus("conll2003", "ner", parsers.conll_rows, hub=Hub("eriktks/conll2003", None, {"test": "test"}, _PARQUET)),
    Corpus("glue-cola", "CoLA", parsers.cola_rows, hub=Hub("nyu-mll/glue", "cola", _GLUE)),
    Corpus("glue-stsb", "STS-B", parsers.stsb_rows, hub=Hub("nyu-mll/glue", "stsb", _GLUE)),
]  # fmt: skip
CORPORA = {corpus.name: corpus for corpus in (*_HERE, *_ORIGINAL)}


def prepare(run: Run, names: Sequence[str]) -> None:
    """Refuse what is missing; in a dry run, say what would be read and downloaded."""
    if not run.dry:
        require(names, run.data)
        return
    for corpus in (CORPORA[name] for name in names):
        files = ", ".join(dict.fromkeys(file for part in corpus.files.values() for file in part))
        hub = corpus.hub and f"{corpus.hub.name} {corpus.hub.config or ''}".strip()
        where = f"download {hub} from the hub" if hub else f"read from {run.data or '--data DIR'}: {files}"
        run.say(f"{corpus.name}: would {where}")


def require(names: Sequence[str], data: Path | None) -> None:
    """Refuse, before anything is trained, if a file of these sets is missing; all of them are named."""
    chosen = [CORPORA[name] for name in names]
    wanted = [file for corpus in chosen for files in (*corpus.files.values(), corpus.beside) for file in files]
    if not wanted:
        return
    if data is None:
        raise SystemExit(
            "Reading the language data: no folder was named. Give --data DIR, a folder that holds "
            f"{', '.join(sorted({file.rpartition('/')[0] for file in wanted}))}, each set as its authors publish it."
        )
    if missing := [file for file in dict.fromkeys(wanted) if not (data / file).is_file()]:
        raise SystemExit(
            f"Reading the language data in {data}: {len(missing)} files are missing ({', '.join(missing[:6])}"
            f"{', …' if len(missing) > 6 else ''}). Put each set under the folder its path names, as its authors "
            "publish it; benchmarks/paper/README.md says where they come from."
        )


def read(name: str, split: str, data: Path | None, limit: int | None = None) -> list[Example]:
    """The examples of a set with one of the shared labels, in an order drawn once; at most `limit` of them."""
    corpus = CORPORA[name]
    labels = LABELS[corpus.task]
    found: list[Example] = []
    for given, target in corpus.found(split, data):
        if corpus.task == "ner":
            found.append((given, [labels.index(tag) for tag in target]))
        elif not labels:
            found.append((given, target))
        elif target in labels:
            found.append((given, labels.index(target)))
    random.Random(0).shuffle(found)
    if corpus.cut:
        fifth = len(found) // 5
        found = found[:fifth] if split == "test" else found[fifth:]
    return found[:limit]
