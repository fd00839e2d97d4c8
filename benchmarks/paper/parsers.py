"""How each file of the language experiments is read: one function a format, each giving (input, name of the label).

A name of None, or one that the task does not share, means that the example is left out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Example = tuple[Any, Any]
"""A text, a pair of texts or a list of words; and a label, a number or a list of labels."""
EMOTIONS = ("anger", "fear", "joy", "sadness")
EKMAN = ("anger", "disgust", "fear", "joy", "sadness", "surprise")


# --- emotion: one label a text ----------------------------------------------------------------------------------------
def emoint(path: Path) -> Iterator[Example]:
    for line in _lines(path):
        _, text, emotion, _ = line.split("\t")
        yield text, emotion


def ssec(path: Path) -> Iterator[Example]:
    """Several emotions a tweet: those tweets that have exactly one of the shared ones."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["Text"], _only([name for name in EMOTIONS if row[name.capitalize()] != "---"])


def tec(path: Path) -> Iterator[Example]:
    for line in _lines(path):
        rest, _, emotion = line.rpartition("::")
        yield rest.split("\t", 1)[1].strip(), emotion.strip()


def isear(path: Path) -> Iterator[Example]:
    """41 columns divided by bars, without quoting; the text is the last but the empty ones."""
    header = next(_lines(path)).split("|")
    emotion, text = header.index("Field1"), header.index("SIT")
    for line in list(_lines(path))[1:]:
        cells = line.split("|")
        yield cells[text].replace("á", " ").strip(), cells[emotion]


def crowdflower(path: Path) -> Iterator[Example]:
    names = {"happiness": "joy", "worry": "fear", "hate": "anger", "anger": "anger", "sadness": "sadness"}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["content"], names.get(row["sentiment"])


def dailydialog(path: Path) -> Iterator[Example]:
    for line in list(_lines(path))[1:]:
        _, _, emotion, text = line.split("\t", 3)
        yield text, "joy" if emotion == "happiness" else emotion


def dair(path: Path) -> Iterator[Example]:
    for line in list(_lines(path))[1:]:
        text, _, emotion = line.rpartition(";")
        yield text, emotion


def goemotions(path: Path) -> Iterator[Example]:
    """27 emotions, of which the set's own table makes Ekman's six; texts with one of them."""
    groups = json.loads((path.parent / "ekman_mapping.json").read_text())
    fine = (path.parent / "emotions.txt").read_text().split()
    coarse = {name: group for group, names in groups.items() for name in names}
    for line in _lines(path):
        text, numbers, _ = line.split("\t")
        yield text, _only(sorted({coarse.get(fine[int(number)], "neutral") for number in numbers.split(",")}))


def affectivetext(path: Path) -> Iterator[Example]:
    """Headlines; three of the four emotions, and those headlines that have exactly one."""
    header, *rows = (line.split("\t", 4) for line in _lines(path))
    for row in rows:
        if row[0] == "test":
            yield row[4], _only([name for name, there in zip(header[1:4], row[1:4], strict=True) if there == "1"])


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def unified(path: Path, source: str) -> Iterator[Example]:
    """One set of the corpus that Bostan and Klinger's tool writes; texts with exactly one of Ekman's emotions."""
    for line in _lines(path):
        row = json.loads(line)
        if row["source"] == source:
            yield row["text"], _only([name for name in EKMAN if row["emotions"].get(name)])


# --- entities: one tag a word -----------------------------------------------------------------------------------------
KINDS = {
    "PER": "person per politician musicalartist researcher scientist writer",
    "LOC": "location loc gpe country place",
    "ORG": "organisation organization org corporation group university politicalparty band",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}


def conll(path: Path) -> Iterator[Example]:
    """A word and its tag a line, an empty line after each sentence; other kinds of entities count as none."""
    words: list[str] = []
    tags: list[str] = []
    for line in [*_lines(path, empty=True), ""]:
        cells = line.split()
        if len(cells) >= 2:
            words.append(cells[0])
            tags.append(cells[-1])
        elif words:
            if words != ["-DOCSTART-"]:
                yield words, shared_tags(tags)
            words, tags = [], []


def shared_tags(tags: Sequence[str]) -> list[str]:
    """Tags of the shared kinds, each entity beginning with B-, also where a file begins them with I-.

    >>> shared_tags(["I-PER", "I-PER", "O", "I-LOC", "B-song"])
    ['B-PER', 'I-PER', 'O', 'B-LOC', 'O']
    """
    found, before = [], "O"
    for tag in tags:
        mark, _, name = tag.partition("-")
        kind = KIND_OF.get(name.lower())
        begins = mark == "B" or name != before.partition("-")[2]
        found.append("O" if kind is None else ("B-" if begins else "I-") + kind)
        before = tag
    return found


# --- GLUE -------------------------------------------------------------------------------------------------------------
def cola(path: Path) -> Iterator[Example]:
    for line in _lines(path):
        _, label, _, text = line.split("\t")
        yield text, label


def stsb(path: Path) -> Iterator[Example]:
    for line in _lines(path):
        cells = line.split("\t")
        if cells[0] != "index":
            yield (cells[7], cells[8]), float(cells[9])


def _lines(path: Path, *, empty: bool = False) -> Iterator[str]:
    # Not splitlines: it would cut at the odd separators that tweets contain.
    lines = (line.rstrip("\r") for line in path.read_text(encoding="utf-8").split("\n"))
    return (line for line in lines if line.strip() or empty)


# --- rows of the hub --------------------------------------------------------------------------------------------------
CONLL_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")
ONTONOTES_TAGS = (
    "O",
    *(
        mark + kind
        for kind in (
            "PERSON", "NORP", "FAC", "ORG", "GPE", "LOC", "PRODUCT", "DATE", "TIME", "PERCENT", "MONEY", "QUANTITY",
            "ORDINAL", "CARDINAL", "EVENT", "WORK_OF_ART", "LAW", "LANGUAGE",
        )
        for mark in ("B-", "I-")
    ),
)  # fmt: skip


def conll_rows(rows: Iterable[Any]) -> Iterator[Example]:
    for row in rows:
        yield row["tokens"], shared_tags([CONLL_TAGS[number] for number in row["ner_tags"]])


def ontonotes_rows(rows: Iterable[Any], genre: str) -> Iterator[Example]:
    """Sentences of the documents of one genre, which their names begin with (bc/cctv/…)."""
    for row in rows:
        if row["document_id"].split("/")[0] == genre:
            for sentence in row["sentences"]:
                yield sentence["words"], shared_tags([ONTONOTES_TAGS[number] for number in sentence["named_entities"]])


def cola_rows(rows: Iterable[Any]) -> Iterator[Example]:
    return ((row["sentence"], str(row["label"])) for row in rows)


def stsb_rows(rows: Iterable[Any]) -> Iterator[Example]:
    return (((row["sentence1"], row["sentence2"]), float(row["label"])) for row in rows)
