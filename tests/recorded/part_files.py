"""Vocabularies and adapters: what is more than weights in the folder of a model."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from recorded.doors import isomerge, said
from recorded.models import model, noise_into, scratch, tuned
from recorded.part_align import Results
from recorded.part_other import ROW, fresh, written

WORDS = {
    "A": (["<unk>", "<s>", "</s>", "cat", "dog", "sun"], [], None),
    "B": (["</s>", "<s>", "dog", "<unk>", "bird", "cat", "moon"], ["<x>"], None),
    "C": (["<unk>", "<s>", "</s>", "moon", "bird", "tree"], [], 10),
    "D": (["<unk>", "<s>", "</s>", "cat", "sun", "dog"], [], None),
}


def results() -> Results:
    yield from vocabularies()
    yield from adapters()


# --- vocabularies -----------------------------------------------------------------------------------------------------
@cache
def speaker(name: str) -> str:
    """A language model with a tokenizer of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words, added, rows = WORDS[name]
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    if added:
        tokenizer.add_tokens([transformers.AddedToken(token, special=True, normalized=False) for token in added])
    torch.manual_seed(ord(name))
    config = transformers.LlamaConfig(
        vocab_size=rows or len(tokenizer), hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    noise_into(made, ord(name))
    made.save_pretrained(scratch() / name)
    tokenizer.save_pretrained(scratch() / name)
    return str(scratch() / name)


def vocabularies() -> Results:
    yield "vocabulary/union", lambda: spoken(tokenizer="union")
    yield "vocabulary/base", lambda: spoken(tokenizer="base", base=speaker("A"))
    yield "vocabulary/model", lambda: spoken(tokenizer=speaker("B"))
    yield "vocabulary/padded", lambda: spoken(tokenizer={"source": "union", "pad_to_multiple_of": 16})
    yield (
        "vocabulary/tokens",
        lambda: spoken(
            tokenizer={
                "source": "union",
                "tokens": {
                    "cat": {"source": speaker("B"), "force": True},
                    "moon": {"source": {"kind": "zero"}},
                    "tree": {"source": {"kind": "model_token", "model": speaker("A"), "token": "sun"}},
                    "bird": {"source": {"kind": "model_token", "model": speaker("C"), "token_id": 4}, "force": True},
                },
            }
        ),
    )
    # No ties: of a token that the base has not, it gets the mean, from which two models differ by opposite numbers, and
    # rounding elects the sign.
    yield (
        "vocabulary/base and union",
        lambda: spoken(tokenizer="union", method="task_arithmetic", base=speaker("A"), weights=[0.4, 0.9]),
    )
    yield "vocabulary/aligned", lambda: spoken(tokenizer="union", align=True)
    yield (
        "vocabulary/rows",
        lambda: isomerge.merge([speaker("A"), speaker("D")], tokenizer="rows", weights=[1, 2], threads=1).state_dict(),
    )


def spoken(**options: Any) -> dict[str, Any]:
    """The tables, and the ids that the written tokenizer gives."""
    models = [speaker(name) for name in ("BC" if "base" in options else "ABC")]
    found = isomerge.merge(models, threads=1, **options)
    out = fresh()
    found.save(out)
    tokens = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    return {"tensors": written(out), "tokens": tokens, "vocab_size": found.config["vocab_size"]}


# --- adapters ---------------------------------------------------------------------------------------------------------
@cache
def adapter(name: str) -> str:
    from peft import LoraConfig, get_peft_model

    config = {
        "one": lambda: LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj", "embed_tokens"]),
        "two": lambda: LoraConfig(
            r=2, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 4}
        ),
        "dora": lambda: LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"]),
    }[name]()
    torch.manual_seed(len(name))
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model(ROW)), config)
        with torch.no_grad():
            for label, parameter in made.named_parameters():
                if parameter.requires_grad:
                    drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn.abs() + 0.5 if "magnitude" in label else drawn)
        made.save_pretrained(scratch() / f"adapter-{name}")
    return str(scratch() / f"adapter-{name}")


def adapters() -> Results:
    for name in ("one", "two", "dora"):
        yield f"adapter/applied/{name}", lambda n=name: applied(n)
    yield (
        "adapter/into models",
        lambda: isomerge.merge(
            [f"{model(ROW)}+{adapter('one')}", f"{model(ROW)}+{adapter('dora')}"],
            method="ties",
            base=model(ROW),
            threads=1,
        ).state_dict(),
    )
    for method in ("linear", "ties", "task_arithmetic", "dare_linear", "karcher"):
        yield f"adapter/merged/{method}", lambda m=method: adapters_merged("--method", m)
    yield "adapter/merged/weights", lambda: adapters_merged("--weights", "0.3,0.7", "--rank", "7")
    yield "adapter/extracted/rank", lambda: extracted("--rank", "2")
    yield "adapter/extracted/energy", lambda: extracted("--energy", "0.7")
    yield "adapter/extracted/targets", lambda: extracted("--rank", "3", "--targets", "q_proj|down_proj")


def applied(name: str) -> dict[str, Any]:
    out = fresh()
    said("merge", f"{model(ROW)}+{adapter(name)}", "-o", out, "--threads", "1")
    return written(out)


def products(folder: Path) -> dict[str, Any]:
    """Updates and not factors: a factor may have either sign, and what it does is the product."""
    stored = written(folder)
    found: dict[str, Any] = {"shapes": {name: list(tensor.shape) for name, tensor in stored.items()}}
    for name, tensor in stored.items():
        if ".lora_A" in name or "lora_embedding_A" in name:
            other = stored[name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")]
            found[name] = other.double() @ tensor.double()
        elif "lora" not in name:
            found[name] = tensor
    return found


def adapters_merged(*flags: str) -> dict[str, Any]:
    out = fresh()
    record = said("merge", adapter("one"), adapter("two"), "-o", out, *flags)
    return {"updates": products(out), "error": record["relative_error"]}


def extracted(*flags: str) -> dict[str, Any]:
    out = fresh()
    record = said("extract", model(ROW), tuned(ROW, 1)[0], "-o", out, *flags)
    return {"updates": products(out), "error": record["relative_error"]}
