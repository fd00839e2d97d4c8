"""Does every token have a row in the embedding table? From the files beside the weights, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.tokenizer_file import read_tokenizer
from isomerge.json_files import JsonError, read_json

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "decoder_start_token_id")
# Formats whose vocabulary is not in plain JSON or text: that there is one can be told, its size cannot.
OPAQUE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "tekken.json")


def vocabulary_rows(config: Mapping[str, Any]) -> int | None:
    """The length of the embedding table that config.json promises; None for models that read no tokens.

    >>> vocabulary_rows({"text_config": {"vocab_size": 32}})
    32
    """
    return next((part["vocab_size"] for part in _parts(config) if isinstance(part.get("vocab_size"), int)), None)


def special_token_problems(folder: Path, config: Mapping[str, Any], rows: int) -> list[str]:
    """Special tokens of config.json and generation_config.json that have no row."""
    problems = []
    generation = _json(folder / "generation_config.json")
    described = [("config.json", part) for part in _parts(config) if part is config or "vocab_size" in part]
    for file, values in (*described, ("generation_config.json", generation if isinstance(generation, dict) else {})):
        for key in SPECIAL:
            given = values.get(key)
            ids = given if isinstance(given, list) else [given]
            # A negative number is how some models write "none".
            beyond = [number for number in ids if type(number) is int and number >= rows]
            problems += [f"{file} has {key} {number}" for number in beyond]
    return problems


def tokenizer_problems(folder: Path, rows: int) -> tuple[bool | None, str]:
    """Whether every token that the tokenizer can give has a row, with what was found; None where there is none."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    broken: list[str] = []
    beyond: dict[int, str] = {}
    largest = -1
    for token, number in _tokens(folder, files, broken):
        largest = max(largest, number)
        if number >= rows:
            beyond.setdefault(number, token)
    opaque = sorted(files.intersection(OPAQUE))
    if broken:
        return False, f"{name_some(broken)} cannot be read"
    if beyond:
        names = [beyond[number] for number in sorted(beyond)]
        return False, (
            f"the tokenizer gives ids up to {largest} and the embedding has {rows} rows: none for {name_some(names)}"
        )
    if largest >= 0:
        return True, f"the tokenizer gives ids up to {largest}, the embedding has {rows} rows"
    if opaque:
        return None, f"there is a {opaque[0]}, whose size is not read here"
    if "tokenizer_config.json" in files:
        return False, "there is a tokenizer_config.json but no vocabulary beside it"
    return None, "there is no tokenizer beside the weights"


def _tokens(folder: Path, files: set[str], broken: list[str]) -> Iterator[tuple[str, int]]:
    """Every (token, id) that the files beside the weights name."""
    if "tokenizer.json" in files:
        try:
            yield from read_tokenizer(folder / "tokenizer.json").numbers()
        except (OSError, JsonError):
            broken.append("tokenizer.json")
    for name in sorted({"vocab.json", "added_tokens.json"} & files):
        table = _json(folder / name)
        if not isinstance(table, dict):
            broken.append(name)
        yield from _numbered(table if isinstance(table, dict) else {})
    if "vocab.txt" in files:
        with (folder / "vocab.txt").open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from ((line.rstrip("\r\n"), number) for number, line in enumerate(lines))


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config itself and those of its parts: models of several towers describe the text's in its own table."""
    return [config, *(config[key] for key in sorted(config) if isinstance(config[key], dict))]


def _numbered(vocabulary: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    return ((token, number) for token, number in vocabulary.items() if type(number) is int)


def _json(path: Path) -> Any:
    """The content of a JSON file: {} where there is none, None where it is broken."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
