"""tokenizer.json: the tokens that the `tokenizers` library writes there, with their ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from isomerge.json_files import checked, read_json


class AddedToken(BaseModel):
    content: str
    id: int = Field(ge=0)


def _scored(entry: list[str | float]) -> list[str | float]:
    if len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError("an entry is a token and its score")
    return entry


class StoredVocabulary(BaseModel):
    vocab: dict[str, int] | list[Annotated[list[str | float], AfterValidator(_scored)]] = {}
    """By token; or, of a unigram model, with scores in the order of the ids."""


class TokenizerFile(BaseModel):
    """As much of it as says which tokens there are."""

    model: StoredVocabulary = StoredVocabulary()
    added_tokens: list[AddedToken] = []

    def numbers(self) -> Iterator[tuple[str, int]]:
        """Every token with its id, added ones last."""
        vocab = self.model.vocab
        yield from vocab.items() if isinstance(vocab, dict) else ((str(entry[0]), n) for n, entry in enumerate(vocab))
        yield from ((token.content, token.id) for token in self.added_tokens)


def read_tokenizer(path: Path) -> TokenizerFile:
    """Raises OSError and JsonError."""
    content: Any = read_json(path)
    if isinstance(content, dict):  # null is how some say that there is none
        content = {key: value for key, value in content.items() if value is not None}
    return checked(TokenizerFile, content)
