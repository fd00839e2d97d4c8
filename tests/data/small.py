"""Tiny real data, tiny real tokenizers and tiny real models, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from isomerge.checkpoint import Checkpoint, open_checkpoint

WORDS = [
    "the", "a", "cat", "dog", "bird", "sat", "ran", "slept", "on", "mat", "hill", "was", "good", "bad", "film", "very",
    "and", "not", "in", "rome", "paris", "lives", "anna", "bob",
]  # fmt: skip
LETTERS = list("bcdefghijklmnopqrstuvwxyz.,!?0123456789")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_WORDS = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in ["a", *LETTERS])]
PLAIN_WORDS = ["<pad>", "<unk>", "<s>", "</s>", *WORDS]

SENTENCES = [
    "the cat sat on the mat", "a dog ran", "the film was very good", "the film was bad and the dog slept",
    "anna lives in rome", "bob was in paris and anna was not", "a bird sat on a hill", "not good not bad",
    "the dog and the cat ran on the hill", "very very good film", "a bad bad dog", "the bird slept",
]  # fmt: skip


def bert_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(BERT_WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def plain_tokenizer(*, bos: bool = False, pad: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(PLAIN_WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    more = {"pad_token": "<pad>"} if pad else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **more
    )


def _save(folder: Path, model: Any, tokenizer: Any) -> Checkpoint:
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return open_checkpoint(folder)


def bert(
    folder: Path, kind: str, labels: Sequence[str] = (), *, seed: int = 0, positions: int = 48, **more: Any
) -> Checkpoint:
    """`kind`: "sequence", "token" or "masked"."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(BERT_WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=positions, initializer_range=0.3, pad_token_id=0, **more,
    )  # fmt: skip
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    made = {"sequence": BertForSequenceClassification, "token": BertForTokenClassification, "masked": BertForMaskedLM}
    return _save(folder, made[kind](config), bert_tokenizer())


def gpt2(folder: Path, *, seed: int = 0, positions: int = 24) -> Checkpoint:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(PLAIN_WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=positions, initializer_range=0.2,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return _save(folder, GPT2LMHeadModel(config), plain_tokenizer())


def gpt2_classifier(folder: Path, labels: Sequence[str]) -> Checkpoint:
    """Without a padding token, so that a batch of several lengths is refused by the stock class."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(PLAIN_WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=24, num_labels=len(labels),
        id2label=dict(enumerate(labels)), bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return _save(folder, GPT2ForSequenceClassification(config), plain_tokenizer(pad=False))


def llama(folder: Path, *, seed: int = 0, positions: int = 20, **more: Any) -> Checkpoint:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(PLAIN_WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=positions, initializer_range=0.3, bos_token_id=2, eos_token_id=3,
        tie_word_embeddings=False, **more,
    )  # fmt: skip
    return _save(folder, LlamaForCausalLM(config), plain_tokenizer(bos=True))


def t5(folder: Path) -> Checkpoint:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(PLAIN_WORDS), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    return _save(folder, T5ForConditionalGeneration(config), plain_tokenizer())


def vit(folder: Path, labels: Sequence[str], *, seed: int = 0, size: int = 8, channels: int = 1) -> Checkpoint:
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=size, patch_size=size // 2, num_channels=channels, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, initializer_range=0.3, id2label=dict(enumerate(labels)),
        label2id={name: number for number, name in enumerate(labels)},
    )  # fmt: skip
    return _save(folder, ViTForImageClassification(config), None)


DIGITS = ["zero", "one", "two"]


def digits(folder: Path, count: int = 36) -> list[tuple[np.ndarray, int]]:
    """Handwritten digits 0, 1, 2 of scikit-learn as `test/<class>/n.png`; returned in the order of the files' names."""
    from sklearn.datasets import load_digits

    data = load_digits(n_class=3)
    images = []
    for number in range(count):
        pixels, label = (data.images[number] * 15).astype(np.uint8), int(data.target[number])
        path = folder / "test" / DIGITS[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        images.append((pixels, label))
    return images
