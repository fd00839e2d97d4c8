"""Tiny bases and plans for the language experiments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import language

OLD = "microsoft/deberta-v3-xsmall"
WORDS = ["joy", "anger", "fear", "sadness", "paris", "anna", "acme", "in", "the", "sees", "a", "b", "c", "good", "bad"]
TINY = language.Plan(1, 4, 1e-3, 8, 3, 8, 8, 4, length=24)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def onward_tokenizer() -> Any:
    """As models that read from left to right have it: no separator, no class token, spaces belong to words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<end>"], initial_alphabet=alphabet)
    backend.train_from_iterator([f" {word}" for word in WORDS] * 9, trainer)
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", model_input_names=names)


def job(models: Path, data: Path | None, work: Path, corpus: str, *, base: int = 0, seed: int = 0) -> language.Job:
    path = language.base_path(language.BASES["reduced"][base], models)
    return language.Job(path, corpus, seed, TINY, data, work, "cpu")
