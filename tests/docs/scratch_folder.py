"""A scratch folder with everything the documents name: tiny models, adapters, data, and a hub that is a local cache."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from models import model as tiny_model
from models import scratch, stock, words, write_tokenizer
from samples import digits

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = (
    "model-a", "model-b", "model-c", "base", "finetuned", "run-1", "run-2", "run-3", "a", "b", "c", "maths", "code",
    "chat", "prose", "reviews", "tweets", "tuned", "new-base",
)  # fmt: skip
ALWAYS = ("model-a", "model-b", "model-c", "base")
ADAPTERS = ("adapter", "adapter-a", "adapter-b", "a-lora", "lora-a", "lora-b")
VOCABULARY = 41
LAYERS = {"text": 3, "deep": 32}  # the deepest stack in the documents has 32


@functools.cache
def text_model(number: int, kind: str = "text") -> Path:
    """A small decoder with a tokenizer. Number 0 is the base, every other one a fine-tune of it."""
    made = stock(
        "LlamaForCausalLM", hidden_size=8, num_hidden_layers=LAYERS[kind], num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, max_position_embeddings=64, vocab_size=VOCABULARY, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _fine_tuned(made, number, kind)


def deep_model(number: int) -> Path:
    return text_model(number, "deep")


@functools.cache
def sequence_model(number: int) -> Path:
    """A small classifier of texts."""
    made = stock(
        "BertForSequenceClassification", hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=14, num_labels=2, max_position_embeddings=32, vocab_size=VOCABULARY, pad_token_id=0,
    )  # fmt: skip
    return _fine_tuned(made, number, "sequence")


@functools.cache
def seeing_model(number: int) -> Path:
    """A small model of text and images, for what the documents say about modules."""
    text = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 41,
        "intermediate_size": 12,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 12, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    made = stock("LlavaForConditionalGeneration", text_config=text, vision_config=vision, image_token_index=40)
    return _fine_tuned(made, number, "seeing")


def _fine_tuned(model: Any, number: int, kind: str) -> Path:
    """The model with small changes by its number, on disk."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.002 if number else 0.0) * torch.randn(parameter.shape, generator=generator)
    folder = scratch() / f"{kind}-{number}"
    model.save_pretrained(folder)
    write_tokenizer(folder, [*words(VOCABULARY - 2), "<|im_start|>", "<|im_end|>"])
    return folder


def image_model(number: int) -> Path:
    """Image classifiers trained apart: each has its own random start."""
    return tiny_model("vit", number, torch.float32)


@functools.cache
def adapter(number: int) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(text_model(0))
    torch.manual_seed(100 + number)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder = scratch() / f"adapter-{number}"
    peft.get_peft_model(model, settings).save_pretrained(folder)
    return folder


KINDS: dict[str, Callable[[int], Path]] = {
    "image": image_model, "text": text_model, "deep": deep_model, "sequence": sequence_model, "seeing": seeing_model,
}  # fmt: skip


def set_stage(folder: Path, kind: str, text: str) -> None:
    """The models, adapters and data that a text names, models of one kind; and nothing that was there before."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    put_models(folder, kind, text)
    for number, name in enumerate(ADAPTERS):
        if names(text, name):
            shutil.copytree(adapter(number % 3), folder / name)
    if "images" in text:
        shutil.copytree(images(), folder / "images")
    for name in ("images.tar.xz", "cifar10.tar.xz"):
        if name in text:
            shutil.copy(archive(), folder / name)
    for number, name in enumerate(("task-a.csv", "task-b.csv", "reviews.csv", "tweets.csv")):
        rows = sentences(number)
        (folder / name).write_text("sentence,label\n" + "".join(f"{words},{label}\n" for words, label in rows))
    for number, name in enumerate(("dev.jsonl", "test.jsonl")):
        rows = sentences(10 + number)
        (folder / name).write_text("".join(json.dumps({"text": words, "label": n}) + "\n" for words, n in rows))
    (folder / "prompts.txt").write_text("w1 w2 w3\nw4 w5\n")
    (folder / "texts.txt").write_text(" ".join(f"w{n * 7 % 38}" for n in range(2000)))


def names(text: str, name: str) -> bool:
    """Whether a text names a model, and not a word that contains its name."""
    return re.search(rf"(?<![\w-]){name}(?![\w-])", text) is not None


def sentences(start: int) -> list[tuple[str, int]]:
    """Words that the tokenizers know, with a label."""
    return [(f"w{n % 30} w{n % 7} w{n % 11}", n % 2) for n in range(start, start + 40)]


def put_models(folder: Path, kind: str, text: str) -> None:
    """The models that a text names, and those that every recipe is completed by."""
    for number, name in enumerate(NAMES):
        if name in ALWAYS or names(text, name):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(KINDS[kind]({"base": 0}.get(name, 1 + number % 3)), folder / name)


@functools.cache
def images() -> Path:
    """Digits in the folders train, validation and test, and in each a folder per class."""
    folder = Path(tempfile.mkdtemp(prefix="images-", dir=scratch()))
    for part, first in (("train", 0), ("validation", 60), ("test", 120)):
        shutil.copytree(digits(first, 60), folder / part)
    return folder


@functools.cache
def archive() -> Path:
    file = scratch() / "images.tar.xz"
    with tarfile.open(file, "w:xz") as tar:
        tar.add(images(), "images")
    return file


def fill_hub(cache: Path, text: str) -> None:
    """Every `org/name` of a text as the hub's cache would hold it; behind a plus stands an adapter."""
    for number, (plus, name) in enumerate(sorted(set(re.findall(r"(\+?)\borg/([\w.-]+)", text)))):
        repo = cache / f"models--org--{name}"
        if repo.exists():
            continue
        snapshot = repo / "snapshots" / COMMIT
        behind_plus = plus or f"+org/{name}" in text
        shutil.copytree(
            adapter(number % 3) if behind_plus else text_model(0 if name == "base" else 1 + number % 3), snapshot
        )
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
        if behind_plus:  # a real one would name a hub id here
            settings = json.loads((snapshot / "adapter_config.json").read_text())
            (snapshot / "adapter_config.json").unlink()
            (snapshot / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
