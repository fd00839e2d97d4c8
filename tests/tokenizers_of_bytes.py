"""Tiny tokenizers that know every byte: merges of bytes, and pieces with bytes to fall back on."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as token_models


def byte_level() -> Tokenizer:
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("m", "er")]
    vocab = {name: i for i, name in enumerate([*names, *(first + last for first, last in merges)])}
    tokenizer = Tokenizer(token_models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


def pieces() -> Tokenizer:
    """With bytes to fall back on, as sentencepiece's models are converted."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"<0x{byte:02X}>": byte + 4 for byte in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789,:'":
        vocab[letter] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("e", "r"), ("m", "er"), ("▁", "mer")]
    for first, last in merges:
        vocab[first + last] = len(vocab)
    tokenizer = Tokenizer(
        token_models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<pad>", "<s>", "</s>", "<unk>")])
    return tokenizer


def with_tokenizer(folder: Path, tokenizer: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )  # fmt: skip
    wrapped.save_pretrained(folder)
    return wrapped
