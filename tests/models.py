"""Every tiny model of the tests, saved as transformers saves it.

    model("llama", seed)           a random model of any family in MODELS, in a folder made once per process
    noisy(folder), variant(…)      a copy of one with noise, or with some tensors replaced
    bert(folder, "sequence", …)    models with a tokenizer that knows the sentences of samples.py
    save_model(folder, tokenizer)  a language model for a tokenizer of your own
    save_base("llama", folder)     a base for PEFT adapters
    write_family("llama", folder)  a base and three fine-tunes of it

Nothing here uses isomerge but `open_checkpoint`, which some of them return: what the tests compare with must not come
from the code they test.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as token_models
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerFast

from isomerge.checkpoint import Checkpoint, open_checkpoint
from precision import float64_throughout
from samples import WORDS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 29
BASE = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
TEXT = {**BASE, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 19}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False}
GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 7, "n_positions": 19, "vocab_size": VOCABULARY,
        "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip

# name -> (class, configuration); sizes differ so that no two axes can be confused unnoticed
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForTokenClassification", {**TEXT, "num_labels": 5}),
    "roberta": ("RobertaForTokenClassification", {**TEXT, "num_labels": 5}),
    "vit": ("ViTForImageClassification", {**BASE, "image_size": 8, "patch_size": 4, "num_labels": 5}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 3}),
    "neox": ("GPTNeoXForCausalLM", {**TEXT, "num_attention_heads": 2,
             "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "opt": ("OPTForCausalLM", {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 7,
            "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 19, "word_embed_proj_dim": 12,
            "tie_word_embeddings": False}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 7, "pad_token_id": 0,
                   "vocab_size": VOCABULARY, "max_position_embeddings": 19}),
    "deberta": ("DebertaV2ForTokenClassification", {**TEXT, "num_labels": 5, "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
                "position_buckets": 4, "position_biased_input": False, "type_vocab_size": 0}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 12, "d_kv": 4, "d_ff": 7, "num_layers": 2, "num_heads": 3,
           "pad_token_id": 0, "eos_token_id": 1, "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
           "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip

# Wide enough for statements about noise, which holds on average over many parameters.
_WIDE = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64}
WIDE: dict[str, dict[str, Any]] = {
    **{name: _WIDE for name in MODELS},
    **{name: {**_WIDE, "head_dim": 12} for name in ("llama", "qwen2", "qwen3", "gemma2", "olmo2", "mixtral")},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_inner": 64},
    "opt": {"hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "distilbert": {"dim": 48, "n_heads": 4, "hidden_dim": 64},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_heads": 4},
}


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """For `parametrize`: every name, all but `quick` marked slow."""
    import pytest  # what attacks the program makes models without it

    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


# --- models on disk ---------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="isomerge-align-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Path:
    """A folder with a random stock model; gains, biases and weights all away from their special values."""
    return _model(name, seed, dtype, json.dumps(changes, sort_keys=True))


@cache
def _model(name: str, seed: int, dtype: torch.dtype, changes: str) -> Path:
    class_name, config = MODELS[name]
    stock = getattr(transformers, class_name)
    torch.manual_seed(seed)
    made = stock._from_config(stock.config_class(**{**config, **json.loads(changes)}), dtype=torch.float64).eval()
    off_special_values(made, seed)
    folder = scratch() / hashlib.sha256(f"{name} {seed} {dtype} {changes}".encode()).hexdigest()[:16]
    made.to(dtype).save_pretrained(folder)
    return folder


def stock(name: str, seed: int = 0, **config: Any) -> Any:
    """A stock class with random weights, as transformers initialises it."""
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    return kind(kind.config_class(**config))


def off_special_values(made: Any, seed: int) -> Any:
    """Gains, biases and weights of a float64 model, all away from zero and one, which hide mistakes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5 * noise.tanh()
        for name, buffer in made.named_buffers():  # statistics of batches
            noise = torch.randn(buffer.shape, generator=generator, dtype=torch.float64).tanh()
            if name.endswith("running_mean"):
                buffer += noise
            elif name.endswith("running_var"):
                buffer *= noise.exp()
    return made


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, from one file or from several."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    assert found, f"{folder} holds no tensor"
    return found


def arrays(folder: Path | Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    found = tensors(folder) if isinstance(folder, Path) else folder
    return {name: tensor.to(torch.float64).numpy() for name, tensor in found.items()}


def variant(like: Path, changed: Mapping[str, Tensor], name: str, drop: tuple[str, ...] = (), **config: Any) -> Path:
    """A copy of a model's folder with some tensors replaced."""
    folder = scratch() / f"{like.name}-{name}"
    shutil.copytree(like, folder, dirs_exist_ok=True)
    found = {n: t for n, t in {**tensors(like), **changed}.items() if n not in drop}
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps({**read_config(folder), **config}))
    return folder


def noisy(like: Path, share: float = 0.01, seed: int = 7) -> Path:
    """The model with noise on every tensor, `share` of the tensor's own size."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in sorted(tensors(like).items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        changed[name] = (tensor + share * noise * tensor.double().square().mean().sqrt()).to(tensor.dtype)
    return variant(like, changed, f"noisy-{share}-{seed}")


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit (−0 is not 0 here)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool(torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)))


def mean(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float = 0.5) -> dict[str, Tensor]:
    assert first.keys() == second.keys(), set(first) ^ set(second)
    return {n: (1 - share) * first[n] + share * second[n] for n in first}


# --- what a model computes --------------------------------------------------------------------------------------------
def inputs(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if hasattr(config, "image_size"):
        shape = (3, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)}
    length = 9
    tokens = torch.randint(3, config.vocab_size, (3, length), generator=generator)
    mask = torch.ones_like(tokens)
    tokens[-1, -2:], mask[-1, -2:] = 0, 0
    found = {"input_ids": tokens, "attention_mask": mask}
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, config.vocab_size, (3, length - 2), generator=generator)
    return found


def logits(
    like: Path, weights: Mapping[str, Tensor] | None = None, *, dtype: torch.dtype = torch.float64, **config: Any
) -> Tensor:
    """Outputs of the stock class for a folder, or for other weights under that folder's config.

    No key may be missing, unexpected or of another shape.
    """
    settings = {**read_config(like), **config}
    stock = getattr(transformers, settings["architectures"][0])
    extra = {"experts_implementation": "eager"} if "num_local_experts" in settings else {}
    made = stock.config_class.from_dict(settings)
    source = (like, {}) if weights is None and not config else (None, {"state_dict": dict(weights or tensors(like))})
    loaded, info = stock.from_pretrained(
        source[0], config=made, dtype=dtype, output_loading_info=True, local_files_only=True, **source[1], **extra
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad(), float64_throughout():
        return loaded.eval()(**inputs(made, dtype)).logits.double()


def difference(first: Tensor, second: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((first - second).abs().max() / first.abs().max())


# --- models with a tokenizer for the sentences of samples.py ----------------------------------------------------------
LETTERS = list("bcdefghijklmnopqrstuvwxyz.,!?0123456789")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_WORDS = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in ["a", *LETTERS])]
PLAIN_WORDS = ["<pad>", "<unk>", "<s>", "</s>", *WORDS]
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"bos_token_id": 2, "eos_token_id": 3}


def bert_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(token_models.WordPiece({w: i for i, w in enumerate(BERT_WORDS)}, unk_token="[UNK]"))
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
    backend = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(PLAIN_WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    more = {"pad_token": "<pad>"} if pad else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **more
    )


def _save(folder: Path, made: Any, tokenizer: Any) -> Checkpoint:
    made.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return open_checkpoint(folder)


def _labelled(labels: Sequence[str]) -> dict[str, Any]:
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    return names if labels else {}


def bert(
    folder: Path, kind: str, labels: Sequence[str] = (), *, seed: int = 0, positions: int = 48, **more: Any
) -> Path:
    """`kind`: "sequence", "token" or "masked"."""
    name = {"sequence": "SequenceClassification", "token": "TokenClassification", "masked": "MaskedLM"}[kind]
    config = {**SMALL, "vocab_size": len(BERT_WORDS), "max_position_embeddings": positions, "initializer_range": 0.3,
              "pad_token_id": 0, **_labelled(labels), **more}  # fmt: skip
    return _save(folder, stock(f"BertFor{name}", seed, **config), bert_tokenizer())


def gpt2(folder: Path, *, seed: int = 0, positions: int = 24) -> Checkpoint:
    config = {"vocab_size": len(PLAIN_WORDS), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": positions,
              "initializer_range": 0.2, **ENDS}  # fmt: skip
    return _save(folder, stock("GPT2LMHeadModel", seed, **config), plain_tokenizer())


def gpt2_classifier(folder: Path, labels: Sequence[str]) -> Checkpoint:
    """Without a padding token, so that the stock class refuses a batch of several lengths."""
    config = {"vocab_size": len(PLAIN_WORDS), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24,
              "num_labels": len(labels), "id2label": dict(enumerate(labels)), **ENDS}  # fmt: skip
    return _save(folder, stock("GPT2ForSequenceClassification", **config), plain_tokenizer(pad=False))


def llama(folder: Path, *, seed: int = 0, positions: int = 20, **more: Any) -> Checkpoint:
    config = {**SMALL, "vocab_size": len(PLAIN_WORDS), "num_key_value_heads": 1, "max_position_embeddings": positions,
              "initializer_range": 0.3, "tie_word_embeddings": False, **ENDS, **more}  # fmt: skip
    return _save(folder, stock("LlamaForCausalLM", seed, **config), plain_tokenizer(bos=True))


def t5(folder: Path) -> Checkpoint:
    config = {"vocab_size": len(PLAIN_WORDS), "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
              "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}  # fmt: skip
    return _save(folder, stock("T5ForConditionalGeneration", **config), plain_tokenizer())


def vit(folder: Path, labels: Sequence[str], *, seed: int = 0, size: int = 8, channels: int = 1) -> Checkpoint:
    config = {**SMALL, "image_size": size, "patch_size": size // 2, "num_channels": channels,
              "initializer_range": 0.3, **_labelled(labels)}  # fmt: skip
    return _save(folder, stock("ViTForImageClassification", seed, **config), None)


def image_pair() -> list[str]:
    """Two image classifiers for the digits of samples.py, from different seeds."""
    return [str(model("vit", seed, torch.float32)) for seed in (0, 1)]


# --- language models for a tokenizer of the test's own ----------------------------------------------------------------
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNKNOWN_AND_ENDS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def word_tokenizer(words: Sequence[str], added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(token_models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **UNKNOWN_AND_ENDS)
    if added:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer


def pair_tokenizer(letters: str, merges: Sequence[tuple[str, str]], added: Sequence[str] = ()) -> Any:
    """Byte-pair encoding with its merges."""
    tokens = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(token_models.BPE({t: i for i, t in enumerate(tokens)}, list(merges), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **UNKNOWN_AND_ENDS)
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
    size = rows or len(tokenizer)
    settings = {
        "vocab_size": size, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False, **config,
    }  # fmt: skip
    made = stock("LlamaForCausalLM", seed, **settings)
    if first is not None:
        with torch.no_grad():
            made.model.embed_tokens.weight.copy_((first + torch.arange(size)).float()[:, None].expand(-1, 8))
            made.lm_head.weight.copy_(-made.model.embed_tokens.weight)
    made.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return open_checkpoint(folder)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- bases for adapters -----------------------------------------------------------------------------------------------
# Different in every dimension, so that a transposed factor cannot fit by accident; GPT-2 has square Conv1D weights.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "vocab_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 32}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "bert": ("BertForSequenceClassification", {**SMALL, "vocab_size": 40, "max_position_embeddings": 32,
             "num_labels": 3}),
    "vit": ("ViTForImageClassification", {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip


def save_base(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    name, config = BASES[kind]
    made = stock(name, **config, **more)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.to(dtype).save_pretrained(folder)
    return folder


# --- a base and three fine-tunes of it --------------------------------------------------------------------------------
FAMILY_VOCABULARY = 41  # like no other size, so that no two axes can be confused unnoticed
# name -> (class, configuration). Three layers, so that a gradient has a middle.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32}),
    "bert": ("BertForSequenceClassification", {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
             "intermediate_size": 40, "max_position_embeddings": 32}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 3,
           "num_decoder_layers": 2, "num_heads": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip
_STACK = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
# What people merge, for recipes as they publish them.
MERGED_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"deep {name.lower()}": (f"{name}ForCausalLM", _STACK) for name in ("Llama", "Mistral", "Qwen2")},
    "deep qwen3": ("Qwen3ForCausalLM", {**_STACK, "head_dim": 8}),
}
MEMBERS = ("base", "a", "b", "c")


def write_family(
    family: str, folder: Path, vocabulary: int = FAMILY_VOCABULARY, dtype: torch.dtype = torch.float32
) -> None:
    """`base`, `a`, `b` and `c`: c leaves one matrix as the base has it, as a partly frozen fine-tune does."""
    name, config = {**FAMILIES, **MERGED_FAMILIES}[family]
    for number, member in enumerate(MEMBERS):
        made = stock(name, vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config)
        generator = torch.Generator().manual_seed(10 + number)  # no two changes of one magnitude at any cut
        frozen = next(name for name, p in made.named_parameters() if p.dim() == 2 and ".1." in name)
        with torch.no_grad():
            for parameter in made.parameters():  # stock initial values have exact zeros and ones, which hide mistakes
                parameter += 0.02 * torch.randn_like(parameter)
            for weight, parameter in made.named_parameters():
                if number and not (member == "c" and weight == frozen):
                    parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        made.to(dtype).save_pretrained(folder / member)
        write_tokenizer(folder / member, words(vocabulary))


def words(count: int, start: int = 0) -> list[str]:
    """Three special tokens and words `w<start>`, `w<start + 1>`, …"""
    return ["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(start, start + count - 3)]


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """One token per line of its vocabulary, no merges: enough to be read, united and written by transformers."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(token_models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def vocabulary_of(folder: Path) -> dict[str, int]:
    return dict(transformers.AutoTokenizer.from_pretrained(folder).get_vocab())
