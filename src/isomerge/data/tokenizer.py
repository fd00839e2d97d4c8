"""A model's own tokenizer, how many tokens the model can take, and a tokenizer for models of single letters."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.remote_code import needs_own_code, remote_code_allowed, tokenizer_settings
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import read_json
from isomerge.packages import require_version, why_not_imported

UNSET = 1 << 30  # tokenizers write "no limit" as a number larger than any context
WITHOUT_LIMIT = 512  # for models whose positions have no table and no stated end
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")


def tokenizer_for(checkpoint: Checkpoint, given: Any = None, *, words: bool = False) -> Any:
    """The tokenizer beside the weights, or the one given (itself, or its folder). `words`: texts come cut in words."""
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    folder = given or checkpoint.folder or _loaded_from(checkpoint)
    if folder is None:
        raise RequestError(
            f"Reading texts for {checkpoint.name}: a model in memory has no tokenizer beside it. Pass the model's "
            "folder, or open_data(…, tokenizer=…)."
        )
    try:
        require_version("transformers")
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RequestError(f"Reading texts: {why_not_imported('transformers', error)}.") from error
    more = {"add_prefix_space": True} if words else {}
    if checkpoint.revision is not None:
        checkpoint.side_files()  # of a hub model: fetches what lies beside the weights
    try:
        letters = letter_tokenizer(Path(folder))
        if letters is not None:
            return letters
        with quiet_transformers():
            found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=remote_code_allowed(), **more)
        if not _is_length(found.model_max_length):
            found.model_max_length = UNSET
        found("a")  # what its files have wrong shows here, and not among the data
        return found
    except Exception as error:  # any failure inside transformers means the same to the user
        what = f"Opening the tokenizer of {checkpoint.name} in {folder}"
        if refusal := needs_own_code(tokenizer_settings(Path(folder)), what):
            raise refusal from error
        if not has_tokenizer_files(Path(folder)):
            raise RequestError(
                f"Reading texts for {checkpoint.name}: there are no tokenizer files beside its weights. Copy "
                "tokenizer.json and tokenizer_config.json of the original model into the folder."
            ) from error
        cause = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"While opening the tokenizer of {checkpoint.name} in {folder}: {cause}. Copy tokenizer.json and "
            "tokenizer_config.json of the original model into the folder."
        ) from error


def has_tokenizer_files(folder: Path) -> bool:
    """Whether anything there is a vocabulary."""
    return any(part in path.name for path in folder.glob("*") for part in ("token", "vocab", ".model", ".spm"))


def _loaded_from(checkpoint: Checkpoint) -> str | None:
    """Where transformers loaded a module from, when that is a folder here."""
    where = checkpoint.config.get("_name_or_path")
    return where if isinstance(where, str) and where and Path(where).is_dir() else None


def context(config: Mapping[str, Any], tokenizer: Any) -> int:
    """The most tokens of one input.

    >>> class T: model_max_length = 10**30
    >>> context({"max_position_embeddings": 514, "pad_token_id": 1}, T)
    512
    """
    inner = config.get("text_config")
    stated = next((int(config[key]) for key in POSITIONS if _is_length(config.get(key))), None)
    if stated is None and isinstance(inner, Mapping):
        return context(inner, tokenizer)
    own: Any = getattr(tokenizer, "model_max_length", None)
    limit = int(own) if _is_length(own) else UNSET
    if stated is None:
        return limit if limit < UNSET else WITHOUT_LIMIT
    # Some count positions from behind the padding token, and size their table accordingly: 514 rows for 512 tokens.
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and stated % 8 and (stated - padding - 1) % 8 == 0 and stated - padding - 1 > 0:
        stated = stated - padding - 1
    return min(stated, limit)


def _is_length(value: Any) -> bool:
    """What files of strangers have there may be anything."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf


def special_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []


def padding_id(config: Mapping[str, Any], tokenizer: Any) -> int:
    """Any token will do where the attention mask hides it; the model's own where it has one."""
    candidates = (tokenizer.pad_token_id, config.get("pad_token_id"), tokenizer.eos_token_id, 0)
    return next(int(value) for value in candidates if isinstance(value, int) and value >= 0)


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
    named = {role: [name for name in names if name in vocabulary] for role, names in ROLES.items()}
    special = {role: known[0] for role, known in named.items() if known}
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
        table = read_json(folder / "vocab.json")
        return {str(token): int(number) for token, number in table.items()}
    if (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        return {token: number for number, token in enumerate(lines) if token}
    return {}
