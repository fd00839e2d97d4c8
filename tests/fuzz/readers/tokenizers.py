"""The files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz import mutators as m
from fuzz.readers.registry import SMALL, Seed, reader, stored


def _tokenizers() -> list[Seed]:
    added = [{"id": 4, "content": "<s>", "special": True, "single_word": False}]
    words = {"a": 0, "b": 1, "c": 2, "d": 3}
    table = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": words, "merges": ["a b"]}}
    unigram = {"added_tokens": added, "model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}", "model_max_length": 10**30,
              "added_tokens_decoder": {"4": {"content": "<s>"}}, "bos_token": "<s>"}  # fmt: skip
    weights = {"model.safetensors": stored(SMALL), "config.json": b'{"vocab_size": 5}'}
    generation = {"generation_config.json": b'{"eos_token_id": [4, 2], "bos_token_id": 1}'}
    return [
        {"tokenizer.json": json.dumps(table).encode(), "tokenizer_config.json": json.dumps(config).encode(), **weights},
        {"tokenizer.json": json.dumps(unigram).encode(), **generation, **weights},
        {"vocab.json": json.dumps(words).encode(), "added_tokens.json": b'{"<s>": 4}', "merges.txt": b"a b", **weights},
        {"vocab.txt": b"a\nb\nc\n", **weights},
        {"vocab.json": json.dumps({**words, "<unk>": 4}).encode(), **weights},
    ]


@reader("tokenizer", _tokenizers, {
    "tokenizer.json": m.mutate_json, "tokenizer_config.json": m.mutate_json, "vocab.json": m.mutate_json,
    "added_tokens.json": m.mutate_json, "vocab.txt": m.mutate_lines, "generation_config.json": m.mutate_json,
})  # fmt: skip
def read_tokenizer(folder: Path) -> None:
    from isomerge.checking.tokenizers import compare_tokenizers
    from isomerge.checkpoint import open_checkpoint
    from isomerge.evaluation.tokens import special_token_problems, tokenizer_problems
    from isomerge.merging.vocabulary.files import other_ids

    checkpoint = open_checkpoint(folder)
    tokenizer_problems(folder, 5)
    special_token_problems(folder, checkpoint.config, 5)
    other_ids([checkpoint, checkpoint])
    compare_tokenizers([checkpoint, checkpoint])
