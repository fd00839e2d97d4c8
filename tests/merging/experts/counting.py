"""Dense models that count: one base that has seen both skills a little, and a fine-tune for each."""

from __future__ import annotations

import functools
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from models import scratch, word_tokenizer

WORDS, LENGTH, SPECIAL = 12, 16, 3
LETTERS = string.ascii_letters[: 2 * WORDS]
VOCABULARY = ["<unk>", "<s>", "</s>", *LETTERS]
CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
}


def ids(skill: int, count: int, seed: int) -> Tensor:
    """Every skill has letters of its own, and counts through them with a step that the text shows."""
    draw = torch.Generator().manual_seed(seed + 1000 * skill)
    start, step = (torch.randint(1, 5, (count, 1), generator=draw) for _ in range(2))
    return SPECIAL + skill * WORDS + (start + step * torch.arange(LENGTH)) % WORDS


def texts(skill: int, count: int, seed: int) -> list[str]:
    return [" ".join(VOCABULARY[token] for token in row) for row in ids(skill, count, seed).tolist()]


def text_file(folder: Path, skill: int, count: int = 24, seed: int = 7) -> Path:
    file = folder / f"skill-{skill}.txt"
    file.write_text("\n".join(texts(skill, count, seed)) + "\n")
    return file


def _config(family: str, **more: Any) -> Any:
    return CLASSES[family].config_class(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=None, initializer_range=0.2,
        **({"head_dim": 4} if family != "qwen2" else {}), **more,
    )  # fmt: skip


def _trained(model: Any, skills: tuple[int, ...], steps: int, rate: float) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        batch = torch.cat([ids(skill, 16, step) for skill in skills])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model


@functools.cache
def family(name: str = "llama", **more: Any) -> dict[str, Path]:
    """The folders of `base`, and of the fine-tunes `0` and `1`, one for each skill; in float32, with gains that are
    not 1."""
    place = scratch() / f"counting-{name}{''.join(map(str, more.items()))}"
    torch.manual_seed(0)
    base = CLASSES[name](_config(name, **more))
    with torch.no_grad():
        for parameter_name, parameter in base.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    _trained(base, (0, 1), 40, 1e-2)
    start = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    folders = {"base": base}
    for skill in (0, 1):
        tuned = CLASSES[name](_config(name, **more))
        tuned.load_state_dict(start)
        folders[str(skill)] = _trained(tuned, (skill,), 25, 3e-3)
    for member, model in folders.items():
        model.save_pretrained(place / member)
        word_tokenizer(VOCABULARY).save_pretrained(place / member)
    return {member: place / member for member in folders}


def recipe(models: dict[str, Path], gate: str = "hidden", chosen: int = 1, **more: Any) -> dict[str, Any]:
    """As for mergekit-moe: prompts are texts of the skills."""
    experts = [
        {"source_model": str(models[str(skill)]), "positive_prompts": texts(skill, 6, 1)} for skill in (0, 1)
    ]  # fmt: skip
    return {
        "base_model": str(models["base"]), "gate_mode": gate, "experts_per_token": chosen, "experts": experts, **more,
    }  # fmt: skip
