"""Tokenizers through transformers: loading one, dropping tokens that have no row, joining several."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import Checkpoint, first_line
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.errors import CheckpointError, IsomergeError
from isomerge.merging.vocabulary.files import declared_rows, has_tokenizer
from isomerge.merging.vocabulary.rules import ModelTokens

# What save_pretrained records about where it was loaded from: not part of the tokenizer, and not the same everywhere.
ABOUT_THE_MACHINE = ("is_local", "local_files_only", "name_or_path")


def no_tokenizer(name: str) -> str:
    return (
        f"{name} has no tokenizer files. Put its tokenizer.json and tokenizer_config.json there, or leave out "
        "tokenizer if all models share one vocabulary"
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer, as transformers' AutoTokenizer gives it."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise IsomergeError(
            f"While merging vocabularies: the tokenizer of {checkpoint.name} needs transformers, which is not "
            "installed. Install it with `pip install 'isomerge[hf]'`."
        ) from error
    if not has_tokenizer(checkpoint):
        raise CheckpointError(f"While merging vocabularies: {no_tokenizer(checkpoint.name)}.", keys=("tokenizer",))
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
    except Exception as error:  # every tokenizer class fails in its own way
        cause = first_line(error).rstrip(".")
        raise CheckpointError(
            f"While loading the tokenizer of {checkpoint.name} from {checkpoint.folder}: {cause}. "
            "Check that its tokenizer files are complete and load with transformers' AutoTokenizer."
        ) from error


def tokens_of(tokenizer: Any, rows: int) -> ModelTokens:
    """A tokenizer's vocabulary by id: the tokenizer itself hands it out in an order that changes from run to run."""
    by_id = sorted((id, token) for token, id in tokenizer.get_vocab().items())
    return ModelTokens({token: id for id, token in by_id}, rows)


def table_rows(checkpoint: Checkpoint, tokenizer: Any) -> int:
    """Rows of the vocabulary tables as config.json declares them; a config may leave out what its class defaults to."""
    rows = declared_rows(checkpoint.config)
    if rows is not None:
        return rows
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
        rows = getattr(config.get_text_config(), "vocab_size", None)
    except Exception:  # an architecture transformers does not know: its tokenizer is then the only witness
        rows = None
    return int(rows) if rows else max(tokenizer.get_vocab().values(), default=-1) + 1


def drop_tokens(tokenizer: Any, tokens: Iterable[str], name: str) -> Any:
    """The tokenizer without these tokens, which lie beyond the model's table."""
    gone = set(tokens)
    if not gone:
        return tokenizer
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        tokenizer.save_pretrained(folder)
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise CheckpointError(
                f"While merging vocabularies: the tokenizer of {name} has {len(gone)} tokens beyond the model's table "
                f"(such as {min(gone)!r}) and, being no fast tokenizer, cannot be cut to it. Resize the model's "
                "embeddings to its tokenizer, or convert the tokenizer to tokenizer.json, then run again."
            )
        path.write_text(json.dumps(_without(json.loads(path.read_text(encoding="utf-8")), gone)), encoding="utf-8")
        config = Path(folder, "tokenizer_config.json")
        config.write_text(json.dumps(_forget(json.loads(config.read_text(encoding="utf-8")), gone)), encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _without(content: dict[str, Any], gone: set[str]) -> dict[str, Any]:
    """tokenizer.json without some tokens, and without the merges that would make or use them."""
    model = content["model"]
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] not in gone]
    if isinstance(model["vocab"], list):
        model["vocab"] = [entry for entry in model["vocab"] if entry[0] not in gone]
    else:
        model["vocab"] = {token: id for token, id in model["vocab"].items() if token not in gone}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not gone & {*pair, "".join(pair)}]
    return content


def _forget(config: dict[str, Any], gone: set[str]) -> dict[str, Any]:
    """tokenizer_config.json without them: a special token it names would be added again on loading."""

    def kept(value: Any) -> bool:
        return (value.get("content") if isinstance(value, dict) else value) not in gone

    config = {key: value for key, value in config.items() if not key.endswith("_token") or kept(value)}
    for key, value in config.items():
        if key.endswith("special_tokens") and isinstance(value, list):
            config[key] = [token for token in value if kept(token)]
        elif key == "added_tokens_decoder":
            config[key] = {id: token for id, token in value.items() if kept(token)}
    return config


def add_union(tokenizer: Any, donor: str, others: Mapping[str, tuple[Any, ModelTokens]]) -> list[str]:
    """Append what the other models have: first their ordinary tokens, model by model and by id, then their added ones.

    A tokenizer has one set of merge rules, so another's ordinary tokens join as added tokens, matched as they stand.
    Those are returned.
    """
    settings: dict[str, Any] = {}
    for other, vocabulary in others.values():
        for id, token in sorted(other.added_tokens_decoder.items()):
            if id < vocabulary.rows:
                settings.setdefault(token.content, token)  # the first model's settings hold
    known = tokenizer.get_vocab()
    ordinary = {
        token: None
        for name, (_, vocabulary) in others.items()
        if name != donor
        for token in vocabulary.with_row
        if token not in known and token not in settings
    }
    tokenizer.add_tokens(list(ordinary))
    tokenizer.add_tokens(list(settings.values()))
    return list(ordinary)


def restore_specials(tokenizer: Any, original: Any) -> None:
    """Name again the special tokens that `drop_tokens` forgot, where another model brought them back."""
    vocabulary = tokenizer.get_vocab()
    for role, token in original.special_tokens_map.items():
        if isinstance(token, str) and token in vocabulary and getattr(tokenizer, role, None) is None:
            setattr(tokenizer, role, token)


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """transformers' own files, without what they say about this machine."""
    with quiet_transformers():
        written = [Path(name) for name in tokenizer.save_pretrained(str(folder))]
    for path in written:
        if path.name == "tokenizer_config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
            config = {key: value for key, value in config.items() if key not in ABOUT_THE_MACHINE}
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return sorted(path for path in written if path.is_file())
