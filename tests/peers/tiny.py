"""Tiny stock models on disk: a base and three fine-tunes of it, and two vocabularies. Nothing here uses isomerge."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 41  # like no other size, so that no two axes can be confused unnoticed
# name -> (class, configuration). Three layers, so that a gradient has a middle.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32}),
    "bert": (
        "BertForSequenceClassification",
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "max_position_embeddings": 32,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 40,
            "num_layers": 3,
            "num_decoder_layers": 2,
            "num_heads": 3,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
}
MEMBERS = ("base", "a", "b", "c")


def write_family(family: str, folder: Path, vocabulary: int = VOCABULARY) -> None:
    """`base`, `a`, `b` and `c`: c leaves one matrix as the base has it, as a partly frozen fine-tune does."""
    for number, member in enumerate(MEMBERS):
        model = stock_model(family, vocabulary)
        generator = torch.Generator().manual_seed(10 + number)  # no two changes of one magnitude at any cut
        frozen = next(name for name, p in model.named_parameters() if p.dim() == 2 and ".1." in name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if number and not (member == "c" and name == frozen):
                    parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / member)
        write_tokenizer(folder / member, words(vocabulary))


def stock_model(family: str, vocabulary: int) -> Any:
    name, options = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options))
    with torch.no_grad():  # stock initial values have exact zeros and ones, which hide mistakes
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def words(count: int, start: int = 0) -> list[str]:
    """Three special tokens and words `w<start>`, `w<start + 1>`, …"""
    return ["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(start, start + count - 3)]


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """One token per line of its vocabulary, no merges: enough to be read, united and written by transformers."""
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, from as many safetensors files as there are."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    assert found, f"{folder} holds no tensor"
    return found


def vocabulary_of(folder: Path) -> dict[str, int]:
    return dict(transformers.AutoTokenizer.from_pretrained(folder).get_vocab())
