"""Model folders and adapters."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import torch

from fuzz import mutators as m
from fuzz.readers.registry import SMALL, Seed, content_of, reader, stored


@reader(
    "safetensors", lambda: [{"model.safetensors": stored(SMALL, {"format": "pt"})}],
    {"model.safetensors": m.mutate_safetensors}, safetensors="model.safetensors",
)  # fmt: skip
def read_safetensors(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    opened = open_checkpoint(folder)
    for name in opened.tensors:
        opened.read(name)


def _pickled() -> list[Seed]:
    made = io.BytesIO()
    torch.save(SMALL, made)
    return [{"pytorch_model.bin": made.getvalue()}]


@reader("bin", _pickled, {"pytorch_model.bin": m.mutate_bytes})
def read_bin(folder: Path) -> None:
    read_safetensors(folder)


def _sharded() -> list[Seed]:
    names = sorted(SMALL)
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    index = {"metadata": {"total_size": 1}, "weight_map": {t: shard for shard, ts in shards.items() for t in ts}}
    files = {shard: stored({t: SMALL[t] for t in ts}, {"format": "pt"}) for shard, ts in shards.items()}
    modules = [{"idx": 0, "name": "0", "path": "1_Pooling", "type": "x"}]
    return [{**files, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b'{"model_type": "x"}',
             "modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": b"{}"}]  # fmt: skip


@reader("index", _sharded, {"model.safetensors.index.json": m.mutate_json, "modules.json": m.mutate_json})
def read_index(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    open_checkpoint(folder).side_files()


FAMILIES = ("llama", "bert", "gpt2", "t5", "vit", "neox", "deberta", "opt", "mixtral", "distilbert", "gemma2", "qwen3")


def _models() -> list[Seed]:
    from models import model

    return [content_of(model(name, 0, torch.float32)) for name in FAMILIES]


@reader("config", _models, {"config.json": m.mutate_json})
def read_config(folder: Path) -> None:
    """What every verb that knows architectures asks of a config.json."""
    from isomerge.architectures import describe
    from isomerge.checkpoint import open_checkpoint
    from isomerge.checkpoint.checks import require_floating
    from isomerge.data.task_heads import label_names, task_of
    from isomerge.evaluation.tokens import special_token_problems, vocabulary_rows
    from isomerge.merging.plan.model_parts import read_build
    from isomerge.merging.vocabulary.files import declared_rows

    checkpoint = open_checkpoint(folder)
    require_floating(checkpoint)
    task_of(checkpoint.config)
    label_names(checkpoint.config)
    declared_rows(checkpoint.config)
    special_token_problems(folder, checkpoint.config, vocabulary_rows(checkpoint.config) or 1)
    read_build(checkpoint)
    if checkpoint.config.get("model_type") in KNOWN:
        describe(checkpoint)


def _known() -> set[str]:
    from isomerge.architectures import FAMILIES as known

    return set(known)


KNOWN = _known()


RUN = ("llama", "bert", "gpt2", "vit", "mixtral", "t5")


def _runnable() -> list[Seed]:
    from models import model

    return [{**content_of(model(name, 0, torch.float32)), name: b""} for name in RUN]


@reader("run", _runnable, {"config.json": m.mutate_values})
def read_and_run(folder: Path) -> None:
    """What every verb that works on data makes of a config.json: its class, the names in it, and a forward pass."""
    import isomerge

    name = next(one for one in RUN if (folder / one).exists())
    isomerge.calibrate(folder, [_batch(name)], what=["gram"])


@cache
def _batch(name: str) -> dict[str, torch.Tensor]:
    """For the class of the good config."""
    if name == "vit":
        return {"pixel_values": torch.ones(2, 3, 8, 8)}
    ids = torch.arange(3, 11).reshape(2, 4)
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


def _pair() -> list[Seed]:
    from models import model

    return [with_few_tensors(content_of(model("llama", 0, torch.float32)))]


def with_few_tensors(content: Seed) -> Seed:
    """Quicker to merge, and no less of a config."""
    from safetensors.torch import load

    tensors = load(content["model.safetensors"])
    few = {name: tensors[name] for name in sorted(tensors)[:3]}
    return {**content, "model.safetensors": stored(few, {"format": "pt"})}


@cache
def second() -> Path:
    """The model that the damaged one is merged with."""
    from fuzz.worker import fill
    from models import model, scratch

    fill(scratch() / "second", with_few_tensors(content_of(model("llama", 1, torch.float32))))
    return scratch() / "second"


@reader("merge", _pair, {"config.json": m.mutate_json, "generation_config.json": m.mutate_json})
def read_merge(folder: Path) -> None:
    """A plain merge, which needs no architecture."""
    import isomerge

    isomerge.merge([folder, second()], threads=1).save(folder.with_name("merged"), force=True)


def _adapter() -> list[Seed]:
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {layer + "A.weight": torch.ones(2, 12), layer + "B.weight": torch.ones(16, 2)}
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
        "rank_pattern": {"layers.0.q_proj": 2}, "alpha_pattern": {"q_proj": 4}, "use_rslora": False,
        "modules_to_save": None, "base_model_name_or_path": "base", "fan_in_fan_out": False,
        "init_lora_weights": True, "use_dora": False,
    }  # fmt: skip
    return [{"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": stored(factors)}]


@reader(
    "adapter", _adapter, {"adapter_config.json": m.mutate_json, "adapter_model.safetensors": m.mutate_safetensors},
    safetensors="adapter_model.safetensors",
)  # fmt: skip
def read_adapter(folder: Path) -> None:
    from isomerge.adapters.adapter import open_adapter

    adapter = open_adapter(folder)
    for target in adapter.targets.values():
        adapter.factors(target)
