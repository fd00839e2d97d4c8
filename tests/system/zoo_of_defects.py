"""One folder with sound models, spoiled ones, data and recipes, for mistakes that are met before anything is done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models import edit_json, model, noisy, save_model, word_tokenizer

WORDS = ["<unk>", "<s>", "</s>", "sun", "moon", "tree", "the", "cat"]
RECIPES = {
    "good.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\n",
    "slerp.yml": "merge_method: slerp\nbase_model: a\nmodels:\n- model: b\nparameters: {t: 0.5}\n",
    "empty.yml": "",
    "list.yml": "- a\n- b\n",
    "text.yml": "just some words\n",
    "no-method.yml": "models:\n- model: a\n- model: b\n",
    "no-models.yml": "merge_method: linear\n",
    "both.yml": "merge_method: linear\nmodels:\n- model: a\nslices:\n- sources:\n  - {model: a, layer_range: [0, 2]}\n",
    "typo.yml": "merge_method: linear\nmodels:\n- modle: a\n- model: b\n",
    "typo-option.yml": "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters: {densty: 0.5}\n",
    "word-weight.yml": "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: much}\n- model: b\n",
    "density.yml": "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters: {density: 2}\n",
    "dtype.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\ndtype: float12\n",
    "range.yml": "merge_method: passthrough\nslices:\n- sources:\n  - {model: a, layer_range: [0, 9]}\n",
    "reversed.yml": "merge_method: passthrough\nslices:\n- sources:\n  - {model: a, layer_range: [2, 1]}\n",
    "lengths.yml": "merge_method: linear\nslices:\n- sources:\n  - {model: a, layer_range: [0, 2]}\n"
    "  - {model: b, layer_range: [0, 1]}\n",
    "filter.yml": "merge_method: linear\nmodels:\n- model: a\n  parameters:\n    weight:\n"
    "    - {filter: self_atn, value: 1}\n    - value: 0.5\n- model: b\n",
    "gone.yml": "merge_method: linear\nmodels:\n- model: a\n- model: gone\n",
    "level.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\nalign: {level: rotate}\n",
    "align-key.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\nalign: {sweep: 3}\n",
    "tokenizer.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\ntokenizer: {source: unoin}\n",
    "template.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\nchat_template: chatlm\n",
    "twice.yml": "merge_method: linear\nmerge_method: ties\nmodels:\n- model: a\n- model: b\n",
    "colon.yml": "merge_method linear\nmodels:\n- model: a\n",
    "brace.yml": "merge_method: linear\nmodels: [{model: a}, {model: b}\n",
    "anchor.yml": "merge_method: linear\nmodels: *these\n",
    "base.yml": "merge_method: ties\nmodels:\n- model: a\n- model: b\n",
    "no-data.yml": "merge_method: regmean\nmodels:\n- model: a\n- model: b\n",
    "two.yml": "name: x\nmerge_method: linear\nmodels:\n- model: a\n- model: b\n---\nmerge_method: linear\n"
    "models:\n- model: x\n- model: b\n",
    "seed.yml": "merge_method: linear\nmodels:\n- model: a\n- model: b\nseed: many\n",
    "null.yml": "merge_method: linear\nmodels:\n- model: a\n- model:\n",
}  # fmt: skip


def write_zoo(here: Path) -> None:
    """Llama models `a` and `b` that fit, and all that does not."""
    first = model("llama", 0, torch.float32)
    shutil.copytree(first, here / "a")
    shutil.copytree(noisy(first, 0.05), here / "b")
    for name, kind, changes in (
        ("wide", "llama", {"hidden_size": 24}), ("deep", "llama", {"num_hidden_layers": 3}),
        ("heads", "llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}),
        ("vocabulary", "llama", {"vocab_size": 31}), ("bert", "bert", {}), ("vit", "vit", {}), ("t5", "t5", {}),
        ("half", "llama", {}),
    ):  # fmt: skip
        shutil.copytree(model(kind, 1, torch.float16 if name == "half" else torch.float32, **changes), here / name)
    for name, words in (("words", WORDS), ("moved", [*WORDS[:3], *reversed(WORDS[3:])])):
        save_model(here / name, word_tokenizer(words), seed=len(name))
    _spoil(here)
    _write_data(here)
    for name, text in RECIPES.items():
        (here / name).write_text(text)


def _spoil(here: Path) -> None:
    for name in ("truncated", "nan", "garbage", "no-weights", "no-config", "bad-config", "whole", "quantised", "index"):
        shutil.copytree(here / "b", here / name)
    weights = "model.safetensors"
    (here / "truncated" / weights).write_bytes((here / "b" / weights).read_bytes()[:5000])
    (here / "garbage" / weights).write_bytes(b"these are no weights at all")
    (here / "no-weights" / weights).unlink()
    (here / "no-config" / "config.json").unlink()
    (here / "bad-config" / "config.json").write_text("{not json")
    (here / "index" / weights).unlink()
    (here / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    state = load_file(here / "b" / weights)
    broken = {**state, "model.norm.weight": torch.full_like(state["model.norm.weight"], torch.nan)}
    save_file(broken, here / "nan" / weights, {"format": "pt"})
    whole = {**state, "model.norm.weight": state["model.norm.weight"].to(torch.int32)}
    save_file(whole, here / "whole" / weights, {"format": "pt"})
    edit_json(here / "quantised" / "config.json", quantization_config={"quant_method": "gptq"})
    (here / "nothing").mkdir()
    (here / "adapter").mkdir()
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "a",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    lora = {stem + "A.weight": torch.ones(2, 12), stem + "B.weight": torch.ones(16, 2)}
    save_file(lora, here / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("mine")


def _write_data(here: Path) -> None:
    from samples import write_digits

    write_digits(here / "digits", 6)
    files = {
        "x.txt": "the sun and the moon\n" * 30, "empty.txt": "", "x.csv": "text,label\nthe sun,1\n",
        "head.csv": "text,label\n", "ragged.csv": "text,label\nthe sun,1,2,3\n", "bad.jsonl": '{"text": "x"}\n{oops\n',
        "list.jsonl": "[1, 2]\n", "x.pdf": "%PDF-1.4", "x.conll": "the DT\nsun\n", "curve.json": "{}", "x.zip": "PK",
        "stats.safetensors": "no statistics", "transform.safetensors": "no transform",
    }  # fmt: skip
    for name, text in files.items():
        (here / name).write_text(text)
    (here / "folder-of-nothing").mkdir()
    (here / "dangling.txt").symlink_to("gone.txt")
