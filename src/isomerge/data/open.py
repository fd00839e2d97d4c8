"""`open_data`: one door for images, texts, tables, tagged sentences, `datasets` objects and ready batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from isomerge.checkpoint.side_files import is_weight
from isomerge.choices import DATA_KINDS
from isomerge.data import archives, conll
from isomerge.data.base import Batch, Data
from isomerge.data.corpus import Corpus
from isomerge.data.datasets import is_dataset, is_saved_dataset, load_saved_dataset, open_dataset
from isomerge.data.examples import Example
from isomerge.data.images import ImageData, is_image
from isomerge.data.parallel import beside, parallel_labels
from isomerge.data.ready import ReadyData
from isomerge.data.rows import Found, from_records, from_table
from isomerge.data.splits import pick_split, same_split, split_of_file
from isomerge.data.tables import SAMPLE, cut, find_delimiter, read_lines, read_records
from isomerge.data.texts import TextData
from isomerge.errors import RequestError, did_you_mean

TEXT_FILES = (".txt", ".csv", ".tsv", ".jsonl", ".json", ".tokens", ".text", ".raw", *conll.SUFFIXES)
DESCRIPTIONS = ("readme", "license", "sources", "mapping")
NOT_DATA = (
    "this is a model, and not data. Name the images or texts to run the model on: a folder or archive of images in "
    "class folders, .txt, .csv, .tsv, .jsonl or CoNLL."
)
ELSEWHERE = (
    "Data is not downloaded: name a file or folder on this machine. A data set of the hub is saved there in Python, "
    "with datasets.load_dataset(NAME).save_to_disk(FOLDER)."
)
HEADERS = {"text;label_name", "text;label", "sentence;label", "text;emotion"}  # tables by semicolons named .txt


def open_data(
    source: str | Path | Data | Iterable[Batch] | Callable[[], Iterable[Batch]],
    *,
    kind: str | None = None,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    length: int | None = None,
    tokenizer: Any = None,
    prefer: str = "train",
) -> Data:
    """Open data by its headers, names and a look at its first lines.

    `source` is a folder or archive of images, a text file (.txt, .csv, .tsv, .jsonl, CoNLL), a folder of them, a
    `datasets` object or the folder it was saved to, or batches. `kind` says what it is where that cannot be seen.
    `text` and `label` name columns or positions from 0, two texts with a comma between. `length` shortens texts;
    `tokenizer` is for models in memory.
    `prefer` is the part that is used when there are several and `split` names none.
    """
    if isinstance(source, Data):
        return source
    if kind is not None and kind not in DATA_KINDS:
        raise RequestError(f"Opening data: there is no kind '{kind}'. {did_you_mean(kind, DATA_KINDS)}")
    if length is not None and length < 2:
        raise RequestError(f"Opening data: texts of {length} tokens are too short to learn from. Use 2 or more.")
    if is_saved_dataset(source):
        source = load_saved_dataset(source)
    if is_dataset(source):
        return open_dataset(
            source, split=split, text=text, label=label, length=length, tokenizer=tokenizer, prefer=prefer
        )
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable) and not callable(source):
            raise RequestError(f"Opening data: a {type(source).__name__} is neither a path nor batches.")
        return ReadyData(source)
    path = Path(source).expanduser()
    if path.is_file() and path.name.lower().endswith(archives.SUFFIXES):
        return ImageData(path, split=split, prefer=prefer)
    if path.is_dir() and kind in (None, "images") and _holds_images(path):
        return ImageData(path, split=split, prefer=prefer)
    files, notes = _text_files(path, split, prefer)
    if kind == "images":
        raise RequestError(
            f"While opening data {path}: there are no images in it. Name a folder or archive of images in class "
            "folders, or leave --kind out."
        )
    data = _open_texts(files, path, kind, split, text, label, length, tokenizer, prefer)
    data.notes[:0] = notes
    return data


def _holds_images(path: Path) -> bool:
    return any(is_image(name) for _, _, names in os.walk(path, followlinks=True) for name in names)


def _text_files(path: Path, split: str | None, prefer: str) -> tuple[list[Path], list[str]]:
    """The files to read: the one that was named, or those of a folder that belong to one part."""
    if path.is_file():
        if is_image(path.name):
            raise RequestError(f"While opening {path}: one image is not a data set. Name the folder of class folders.")
        if is_weight(path.name):
            raise RequestError(f"While opening data {path}: {NOT_DATA}")
        if path.suffix.lower() not in TEXT_FILES:
            raise RequestError(
                f"While opening {path}: '{path.suffix or path.name}' is not a kind of data that is known. Known are "
                f"folders and archives of images ({', '.join(archives.SUFFIXES)}) and {', '.join(TEXT_FILES)}."
            )
        return [path], []
    if not path.is_dir():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) if near and len(near) < 200 else ""
        hint = hint if hint.startswith("Did you mean") else ""
        hint = hint or (ELSEWHERE if _is_elsewhere(path) else "Name a file or folder of yours there.")
        raise RequestError(f"While opening data {path}: there is no such file or folder. {hint}")
    inside = {p.name for p in path.iterdir()}
    if any(map(is_weight, inside)) and inside & {"config.json", "adapter_config.json"}:
        raise RequestError(f"While opening data {path}: {NOT_DATA}")
    found = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in TEXT_FILES)
    found = [p for p in found if not p.name.lower().startswith(DESCRIPTIONS) and not parallel_labels(p)]
    if not found:
        raise RequestError(
            f"While opening data {path}: the folder holds neither images nor {', '.join(TEXT_FILES)}. Name the folder "
            "that does."
        )
    parts = [split_of_file(p.name) for p in found]
    if not any(parts):
        return found, []  # a column of the table may name the parts
    chosen, notes = pick_split(parts, split, prefer, str(path))
    return [p for p, part in zip(found, parts, strict=True) if part == chosen], notes


def _is_elsewhere(path: Path) -> bool:
    """Whether it reads as an address, or as the name of a data set on the hub."""
    return path.parts[0].endswith(":") or (len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists())


def _open_texts(
    files: Sequence[Path],
    path: Path,
    kind: str | None,
    split: str | None,
    text: str | None,
    label: str | None,
    length: int | None,
    tokenizer: Any,
    prefer: str,
) -> Data:
    name = path.name if len(files) == 1 and files[0] == path else f"{path.name}/{files[0].name}"
    if len(files) > 1:
        name = f"{path.name} ({len(files)} files)"
    in_file = None if split and any(same_split(split) == split_of_file(p.name) for p in files) else split
    examples: list[Example] = []
    notes: list[str] = []
    running: list[Path] = []
    for file in files:
        found = _examples(file, kind, text, label, in_file, prefer)
        if found is None:
            running.append(file)
        else:
            examples += found[0]
            notes += [note for note in found[1] if note not in notes]
    if running and examples:
        raise RequestError(
            f"While opening data {path}: {running[0].name} is running text and other files are tables. Name one file."
        )
    if running:
        if in_file is not None:
            raise RequestError(
                f"While opening data {path}: running text has no part '{split}'. Leave --split out, or name the file "
                "that holds this part."
            )
        corpus = Corpus(running, name, tokenizer=tokenizer, length=length)
        if kind not in ("texts", "lines", "documents"):
            return corpus
        examples = corpus.documents() if kind == "documents" else corpus.lines()
    data = TextData(examples, name, tokenizer=tokenizer, length=length)
    data.notes += notes
    return data


def _examples(
    path: Path, kind: str | None, text: str | None, label: str | None, split: str | None, prefer: str
) -> Found | None:
    """The examples of one file; None for running text."""
    options: dict[str, Any] = {"text": text, "label": label, "split": split, "prefer": prefer}
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json"):
        return from_records(read_records(path), str(path), **options)
    lines = read_lines(path)
    tagged = suffix in conll.SUFFIXES or (kind is None and conll.looks_tagged(lines[:SAMPLE]))
    labels = beside(path)
    by_tags = kind == "tokens" or (tagged and kind is None)
    if split is not None and (by_tags or (labels is not None and suffix == ".txt")):
        pick_split([], split, prefer, str(path))  # refuses: such files have no parts
    if by_tags:
        return conll.read_tagged(lines, str(path)), []
    if kind in ("corpus", "lines", "documents"):
        return None
    if labels is not None and suffix == ".txt":
        return labels(lines)
    delimiter = _delimiter(lines, suffix, bool(text or label or kind == "table"))
    if delimiter is not None:
        return from_table(cut(lines, delimiter), str(path), **options)
    if suffix in (".csv", ".tsv"):  # one column
        return from_table(cut(lines, "\0"), str(path), **options)
    if label or text:
        raise RequestError(f"While reading {path}: it is plain text without columns, so --text and --label do not fit.")
    return None


def _delimiter(lines: Sequence[str], suffix: str, asked: bool) -> str | None:
    """Plain text has commas too, so a .txt is a table only by tabs, by a known header, or when columns are named."""
    if suffix == ".tsv":
        return find_delimiter(lines, "\t")
    if suffix == ".csv":
        return find_delimiter(lines)
    if lines[0].strip().casefold() in HEADERS:
        return ";"
    return find_delimiter(lines, "\t;|," if asked else "\t")
