"""Running text: chunks of the context length for language models, lines for all others."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isomerge.checkpoint.base import Checkpoint
from isomerge.data.archives import Spool
from isomerge.data.base import Batch, Content, Data, Wanted
from isomerge.data.encode import Encoded, Encoder, collate, masked
from isomerge.data.examples import Example
from isomerge.data.tables import read_lines
from isomerge.data.task_heads import task_of
from isomerge.data.texts import TextData
from isomerge.data.tokenizer import special_ends
from isomerge.errors import RequestError

LONGEST = 2048  # tokens of a chunk where the model could take more and no length was asked for
PIECE = 1 << 18  # characters tokenised at once, cut at line ends
LANGUAGE = ("causal-lm", "masked-lm", "seq2seq")


class Corpus(Data):
    """One or more files of plain text, read as one text."""

    kind = "corpus"

    def __init__(self, paths: Sequence[Path], name: str, *, tokenizer: Any = None, length: int | None = None) -> None:
        super().__init__()
        self.name, self.classes = name, None
        self._paths, self._tokenizer, self._length = paths, tokenizer, length
        self._lines = sum(len(read_lines(path)) for path in paths)
        self.size = self._lines
        self._tokens: tuple[Any, Spool] | None = None

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for path in self._paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def lines(self) -> list[Example]:
        """One example for each line that is not blank."""
        return [Example(line.strip()) for path in self._paths for line in read_lines(path) if line.strip()]

    def documents(self) -> list[Example]:
        """One example for each paragraph, or whole file where there are several."""
        texts = ["\n".join(read_lines(path)) for path in self._paths]
        if len(texts) == 1:
            texts = [part for part in texts[0].replace("\n \n", "\n\n").split("\n\n")]
        return [Example(text.strip()) for text in texts if text.strip()]

    def as_texts(self, checkpoint: Checkpoint) -> tuple[Encoder, list[str]]:
        """Stretches of as many tokens of this model as it takes at once."""
        if task_of(checkpoint.config) not in LANGUAGE:
            return TextData(self.lines(), self.name, tokenizer=self._tokenizer, length=self._length).as_texts(
                checkpoint
            )
        encoder = Encoder.of(checkpoint, self._tokenizer, self._length or LONGEST)
        body = max(2, encoder.limit - sum(map(len, special_ends(encoder.tokenizer))))
        stretches: list[str] = []
        for piece in (piece for path in self._paths for piece in _pieces(path)):
            tokens = encoder.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ends = [end for _, end in tokens["offset_mapping"]][body - 1 :: body]
            stretches += [piece[a:b] for a, b in itertools.pairwise([0, *ends, len(piece)]) if piece[a:b].strip()]
        return encoder, stretches

    def contents(self, limit: int | None = None, seed: int = 0) -> Iterator[Content]:
        return TextData(self.lines(), self.name).contents(self.limit if limit is None else limit, seed)

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        task = wanted.task or task_of(checkpoint.config)
        if task not in LANGUAGE:
            lines = TextData(self.lines(), self.name, tokenizer=self._tokenizer, length=self._length)
            yield from lines.read(checkpoint, wanted)
            for text in lines.notes:
                self.note(text)
            return
        encoder = Encoder.of(checkpoint, self._tokenizer, self._length)
        if self._length is None and encoder.limit > LONGEST:
            self.note(f"chunks of {LONGEST} tokens, though the model takes {encoder.limit}")
            encoder.limit = LONGEST
        before, after = special_ends(encoder.tokenizer)
        after = after if task == "masked-lm" else []
        body = encoder.limit - len(before) - len(after)
        if body < 2:
            raise RequestError(f"Cutting {self.name} into chunks of {encoder.limit} tokens: that is too short.")
        tokens = self._tokenised(encoder.tokenizer)
        count = -(-tokens.nbytes // (4 * body))
        if count > 1 and tokens.nbytes // 4 % body == 1:
            count -= 1  # a last chunk of one token has nothing to predict
        for group in wanted.order(count):
            chunks = [_chunk(tokens, int(n), body, before, after) for n in group]
            encoded = [
                _prepared(ids, len(before), len(after), int(n), task, wanted.labels, encoder, wanted.seed)
                for n, ids in zip(group, chunks, strict=True)
            ]
            yield {key: value.to(wanted.device) for key, value in collate(encoded, encoder, task).items()}

    def _tokenised(self, tokenizer: Any) -> Spool:
        """All tokens as int32, kept for the tokenizer that was used last."""
        key = (getattr(tokenizer, "name_or_path", ""), len(tokenizer))
        if self._tokens is None or self._tokens[0] != key:
            spool = Spool()
            for path in self._paths:
                for piece in _pieces(path):
                    ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
                    spool.append(np.asarray(ids, np.int32).tobytes())
            if not spool.nbytes:
                raise RequestError(f"Tokenising {self.name}: the tokenizer gives not one token.")
            self._tokens = (key, spool)
        return self._tokens[1]


def _chunk(tokens: Spool, number: int, body: int, before: list[int], after: list[int]) -> list[int]:
    content = tokens.slice(4 * body * number, min(4 * body * (number + 1), tokens.nbytes))
    return [*before, *np.frombuffer(content, np.int32).tolist(), *after]


def _prepared(
    ids: list[int], before: int, after: int, number: int, task: str, labels: bool, encoder: Encoder, seed: int
) -> Encoded:
    special = [1] * before + [0] * (len(ids) - before - after) + [1] * after
    encoded = Encoded(ids, [0] * len(ids), special)
    if task == "seq2seq":  # read the first half, say the second
        half = max(1, len(ids) // 2)
        encoded = Encoded(ids[:half], [0] * half, special[:half], target=ids[half:] or ids)
        encoded.labels = encoded.target if labels else None
    elif labels and task == "masked-lm":
        encoded.ids, encoded.labels = masked(ids, special, encoder.tokenizer, seed, number)
    elif labels:
        encoded.labels = list(ids)
    return encoded


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        while lines := file.readlines(PIECE):
            yield "".join(lines)
