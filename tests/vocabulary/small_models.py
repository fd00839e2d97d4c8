"""Tiny real models with tiny real tokenizers, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.vocabulary import Vocabulary

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def word_tokenizer(words: Sequence[str], added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )  # fmt: skip
    if added:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer


def pair_tokenizer(letters: str, merges: Sequence[tuple[str, str]], added: Sequence[str] = ()) -> Any:
    """Byte-pair encoding with its merges."""
    tokens = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )  # fmt: skip
    if added:
        tokenizer.add_special_tokens({"pad_token": added[0]})
        tokenizer.add_tokens(list(added[1:]))
    return tokenizer


def save_model(
    folder: Path,
    tokenizer: Any,
    *,
    first: float | None = None,
    rows: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Checkpoint:
    """A language model whose row i is constant at `first` + i (its head: minus that), or random."""
    torch.manual_seed(seed)
    size = rows or len(tokenizer)
    settings = {
        "vocab_size": size, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False, **config,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings))
    if first is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_((first + torch.arange(size)).float()[:, None].expand(-1, 8))
            model.lm_head.weight.copy_(-model.model.embed_tokens.weight)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return open_checkpoint(folder)


def animals(tmp: Path) -> dict[str, Checkpoint]:
    """The three models that mergekit 0.1.5 was run on; its results are quoted in test_against_mergekit.py."""
    return {
        "A": save_model(tmp / "A", word_tokenizer(["<unk>", "<s>", "</s>", "cat", "dog", "sun"]), first=100),
        "B": save_model(
            tmp / "B", word_tokenizer(["</s>", "<s>", "dog", "<unk>", "bird", "cat", "moon"], ["<x>"]), first=200
        ),
        "C": save_model(
            tmp / "C", word_tokenizer(["<unk>", "<s>", "</s>", "moon", "bird", "tree"]), first=300, rows=10
        ),
    }


def sources(models: Mapping[str, Checkpoint], tensor: str = EMBEDDING) -> dict[str, TensorSource]:
    return {name: Stored(checkpoint, tensor) for name, checkpoint in models.items()}


def whole(source: TensorSource, step: int = 3) -> Tensor:
    """All rows, asked for in blocks as the engine does."""
    if len(source.info.shape) < 2:
        return source.rows(0, 1).clone()
    length = source.info.shape[0]
    return torch.cat([source.rows(i, min(i + step, length)).clone() for i in range(0, length, step)])


def tables(vocabulary: Vocabulary, models: Mapping[str, Checkpoint], tensor: str = EMBEDDING) -> dict[str, Tensor]:
    return {name: whole(vocabulary.source(name, sources(models, tensor))) for name in models}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
