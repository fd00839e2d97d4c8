"""`open_data`: one door for images, texts, tables, tagged sentences, `datasets` objects and ready batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isomerge.arguments import require_types, usable_path
from isomerge.checkpoint.local import broken_link
from isomerge.checkpoint.side_files import is_weight
from isomerge.checkpoint.stamp import Stamp
from isomerge.data.archives import ARCHIVE_SUFFIXES, names_below
from isomerge.data.base import Data, DataSource
from isomerge.data.corpus import Corpus
from isomerge.data.examples import (
    TAGGED_SUFFIXES,
    Example,
    ExamplesAndNotes,
    beside,
    from_records,
    from_table,
    looks_tagged,
    parallel_labels,
    read_tagged,
)
from isomerge.data.images import ImageData, is_image
from isomerge.data.options import DataOptions, split_source
from isomerge.data.python_objects import ReadyData, is_dataset, is_saved_dataset, load_saved_dataset, open_dataset
from isomerge.data.splits import pick_split, same_split, split_of_file
from isomerge.data.tables import SAMPLE_LINES, cut, find_delimiter, read_lines, read_records
from isomerge.data.texts import TextData
from isomerge.errors import RequestError, near_miss

TEXT_FILES = (".txt", ".csv", ".tsv", ".jsonl", ".json", ".tokens", ".text", ".raw", *TAGGED_SUFFIXES)
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
    source: DataSource,
    *,
    kind: str | None = None,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    length: int | None = None,
    limit: int | None = None,
    tokenizer: Any = None,
    prefer: str = "train",
) -> Data:
    """Open data by its headers, names and a look at its first lines.

    `source` is a folder or archive of images, a text file (.txt, .csv, .tsv, .jsonl, CoNLL), a folder of them, a
    `datasets` object or the folder it was saved to, or batches; a mapping holds a `path` and the options below, as in a
    recipe. `kind` names the format if it is not recognised. `text` and `label` name columns or positions from 0, two
    texts with a comma between. `length` shortens texts, `limit` is the number of examples to use; `tokenizer` is for
    models in memory. `prefer` is the part that is used when there are several and `split` names none.
    """
    require_types(prefer=(prefer, str), tokenizer=(tokenizer, str, os.PathLike, Callable, None))
    if isinstance(source, Data):
        return source
    options = DataOptions(split, text, label, kind, length, limit)
    if isinstance(source, Mapping) and not is_dataset(source):
        source, named = split_source(source)
        options = named.updated(vars(options))
    stamps = _stamps(source)  # before anything is read
    data = _opened(source, options, tokenizer, prefer)
    data.limit, data.stamps = options.limit, stamps
    return data


def _stamps(source: Any) -> dict[Path, Stamp | None]:
    if not isinstance(source, (str, os.PathLike)):
        return {}
    path = usable_path(source, "opening data")
    files = [path / name for name in names_below(path)] if path.is_dir() else [path] if path.is_file() else []
    return {file: Stamp.of(file) for file in files}


def _opened(source: Any, options: DataOptions, tokenizer: Any, prefer: str) -> Data:
    if isinstance(source, (str, os.PathLike)):
        source = usable_path(source, "opening data")
    if is_saved_dataset(source):
        source = load_saved_dataset(source)
    if is_dataset(source):
        return open_dataset(source, options, tokenizer, prefer)
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable) and not callable(source):
            raise RequestError(f"Opening data: a {type(source).__name__} is neither a path nor batches.")
        return ReadyData(source)
    path = Path(source)
    if path.is_file() and path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return ImageData(path, split=options.split, prefer=prefer)
    if path.is_dir() and options.kind in (None, "images") and _holds_images(path):
        return ImageData(path, split=options.split, prefer=prefer)
    files, notes = _text_files(path, options.split, prefer)
    if options.kind == "images":
        raise RequestError(
            f"While opening data {path}: there are no images in it. Name a folder or archive of images in class "
            "folders, or leave kind out.",
            keys=("kind",),
        )
    data = _open_texts(files, path, options, tokenizer, prefer)
    data.notes[:0] = notes
    return data


def _holds_images(path: Path) -> bool:
    return any(map(is_image, names_below(path)))


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
                f"folders and archives of images ({', '.join(ARCHIVE_SUFFIXES)}) and {', '.join(TEXT_FILES)}."
            )
        return [path], []
    if path.is_symlink() and not path.exists():
        raise RequestError(f"While opening data {path}: {broken_link(path)}. Repair the link, or name the file itself.")
    if not path.is_dir():
        if link := next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None):
            raise RequestError(_broken(path, link))
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = near_miss(path.name, near) if len(near) < 200 else ""
        hint = hint or (ELSEWHERE if _is_elsewhere(path) else "Check the path.")
        raise RequestError(f"While opening data {path}: there is no such file or folder. {hint}")
    inside = {p.name for p in path.iterdir()}
    if broken := [p for p in path.iterdir() if p.suffix.lower() in TEXT_FILES and p.is_symlink() and not p.exists()]:
        raise RequestError(_broken(path, min(broken)))
    if any(map(is_weight, inside)) and inside & {"config.json", "adapter_config.json"}:
        raise RequestError(f"While opening data {path}: {NOT_DATA}")
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in TEXT_FILES)
    files = [p for p in files if not p.name.lower().startswith(DESCRIPTIONS) and not parallel_labels(p)]
    if not files:
        raise RequestError(
            f"While opening data {path}: the folder holds neither images nor {', '.join(TEXT_FILES)}. Name the folder "
            "that does."
        )
    parts = [split_of_file(p.name) for p in files]
    if not any(parts):
        return files, []  # a column of the table may name the parts
    chosen, notes = pick_split(parts, split, prefer, str(path))
    return [p for p, part in zip(files, parts, strict=True) if part == chosen], notes


def _broken(path: Path, link: Path) -> str:
    """A part of the data that is not there is not left out in silence."""
    name = "" if link == path else f"{link}: "
    return f"While opening data {path}: {name}{broken_link(link)}. Repair the link, or name the data itself."


def _is_elsewhere(path: Path) -> bool:
    """Whether it reads as an address, or as the name of a data set on the hub."""
    return path.parts[0].endswith(":") or (len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists())


def _open_texts(files: Sequence[Path], path: Path, options: DataOptions, tokenizer: Any, prefer: str) -> Data:
    name = path.name if len(files) == 1 and files[0] == path else f"{path.name}/{files[0].name}"
    if len(files) > 1:
        name = f"{path.name} ({len(files)} files)"
    split, kind = options.split, options.kind
    if split and any(same_split(split) == split_of_file(p.name) for p in files):
        options = replace(options, split=None)  # the files themselves are the part
    examples: list[Example] = []
    notes: list[str] = []
    running: list[Path] = []
    for file in files:
        read = _examples(file, options, prefer)
        if read is None:
            running.append(file)
        else:
            examples += read[0]
            notes += [note for note in read[1] if note not in notes]
    if running and examples:
        raise RequestError(
            f"While opening data {path}: {running[0].name} is running text and other files are tables. Name one file."
        )
    if running:
        if options.split is not None:
            raise RequestError(
                f"While opening data {path}: running text has no part '{split}'. Leave split out, or name the file "
                "that holds this part.",
                keys=("split",),
            )
        corpus = Corpus(running, name, tokenizer=tokenizer, length=options.length)
        if kind not in ("texts", "lines", "documents"):
            return corpus
        examples = corpus.documents() if kind == "documents" else corpus.lines()
    data = TextData(examples, name, tokenizer=tokenizer, length=options.length)
    data.notes += notes
    return data


def _examples(path: Path, options: DataOptions, prefer: str) -> ExamplesAndNotes | None:
    """The examples of one file; None for running text."""
    kind, suffix = options.kind, path.suffix.lower()
    if suffix in (".jsonl", ".json"):
        return from_records(read_records(path), str(path), options, prefer)
    lines = read_lines(path)
    tagged = suffix in TAGGED_SUFFIXES or (kind is None and looks_tagged(lines[:SAMPLE_LINES]))
    labels = beside(path)
    by_tags = kind == "tokens" or (tagged and kind is None)
    if options.split is not None and (by_tags or (labels is not None and suffix == ".txt")):
        pick_split([], options.split, prefer, str(path))  # refuses: such files have no parts
    if by_tags:
        return read_tagged(lines, str(path)), []
    if kind in ("corpus", "lines", "documents"):
        return None
    if labels is not None and suffix == ".txt":
        return labels(lines)
    delimiter = _delimiter(lines, suffix, bool(options.text or options.label or kind == "table"))
    if delimiter is not None:
        return from_table(cut(lines, delimiter), str(path), options, prefer)
    if suffix in (".csv", ".tsv"):  # one column
        return from_table(cut(lines, "\0"), str(path), options, prefer)
    if options.label or options.text:
        message = f"While reading {path}: it is plain text without columns. Leave text and label out."
        raise RequestError(message, keys=("text", "label"))
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
