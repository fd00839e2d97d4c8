"""A tokenizer for models of single letters (amino acids, bases) that come with a bare list of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# How the roles of special tokens are written, first match wins.
ROLES = {
    "unk_token": ("<unk>", "[UNK]"), "pad_token": ("<pad>", "[PAD]"), "mask_token": ("<mask>", "[MASK]"),
    "bos_token": ("<s>", "<bos>"), "eos_token": ("</s>", "<eos>"), "cls_token": ("<cls>", "[CLS]", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>", "<eos>"),
}  # fmt: skip
OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "tokenizer.model", "spiece.model")


def letter_tokenizer(folder: Path) -> Any | None:
    """From a vocab.json or vocab.txt that stands alone and holds letters and special tokens only; else None."""
    if any((folder / name).is_file() for name in OTHER_FILES):
        return None
    vocabulary = _vocabulary(folder)
    special = {role: found for role, names in ROLES.items() if (found := _first(names, vocabulary)) is not None}
    if not vocabulary or any(len(token) > 1 for token in vocabulary.keys() - set(special.values())):
        return None
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk_token", "<unk>")))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    first, last = special.get("cls_token"), special.get("sep_token")
    if first and last:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _vocabulary(folder: Path) -> dict[str, int]:
    if (folder / "vocab.json").is_file():
        found = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        return {str(token): int(number) for token, number in found.items()}
    if (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        return {token: number for number, token in enumerate(lines) if token}
    return {}


def _first(names: tuple[str, ...], vocabulary: dict[str, int]) -> str | None:
    return next((name for name in names if name in vocabulary), None)
