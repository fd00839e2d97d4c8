"""Merged LoRA adapters against the truth, Σ w_k ΔW_k as PEFT computes each: isomerge beside PEFT's own merge.

    python benchmarks/adapters.py [--json record.json]

Each case is two adapters of a tiny random Llama with all trainable tensors random. The numbers are
‖found − truth‖ / ‖truth‖ over all tensors of the model, where `found` is what the merged adapter makes of the base,
less the base. Merges that cut to a rank are given the sum of the ranks, so what is left is not the cut.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.adapters import merge_adapters

WEIGHTS = [0.6, 0.4]
EXACT = 1e-6
"""Below it, an error is rounding to float32."""
PEFT_WAYS = ("linear", "cat", "svd")
Q, V = "q_proj", "v_proj"
CASES: dict[str, list[dict[str, Any]]] = {
    "one rank": [{"r": 4}, {"r": 4}],
    "two ranks": [{"r": 4}, {"r": 2}],
    "two scales": [{"r": 4, "lora_alpha": 4}, {"r": 4, "lora_alpha": 16}],
    "rank-stabilised beside plain": [{"r": 4, "use_rslora": True}, {"r": 4}],
    "a scale for some layers": [{"r": 4, "alpha_pattern": {V: 32}}, {"r": 4}],
    "a rank for some layers": [{"r": 4, "rank_pattern": {V: 2}}, {"r": 4}],
    "other layers": [{"r": 4, "target_modules": [Q]}, {"r": 4, "target_modules": [V]}],
    "an embedding": [{"r": 4, "target_modules": [Q, "embed_tokens"]}, {"r": 4, "target_modules": [Q, "embed_tokens"]}],
    "DoRA": [{"r": 4, "use_dora": True}, {"r": 4, "use_dora": True}],
    "a bias in the update": [{"r": 4, "lora_bias": True}, {"r": 4, "lora_bias": True}],
    "trained biases": [{"r": 4, "bias": "lora_only"}, {"r": 4, "bias": "lora_only"}],
    "a module stored whole": [{"r": 4, "modules_to_save": ["lm_head"]}, {"r": 4, "modules_to_save": ["lm_head"]}],
}


def base_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(base: Path, config: LoraConfig, folder: Path, seed: int) -> Path:
    """An adapter folder as PEFT writes it, every trainable tensor random."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
            if "magnitude" in name:
                parameter.data.abs_().add_(0.5)
    model.save_pretrained(folder)
    return folder


def added(base: Path, model: Any) -> dict[str, Tensor]:
    """What a PEFT model's active adapter changes in the base, once it is merged into its weights."""
    before = LlamaForCausalLM.from_pretrained(base).double().state_dict()
    after = model.merge_and_unload().state_dict()
    return {name: after[name].double() - tensor for name, tensor in before.items()}


def loaded(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(base).double(), adapter, autocast_adapter_dtype=False
    ).double()


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    lost = sum(float((found[name] - truth[name]).square().sum()) for name in truth)
    return math.sqrt(lost / sum(float(tensor.square().sum()) for tensor in truth.values()))


def by_peft(base: Path, adapters: list[Path], way: str) -> dict[str, Tensor]:
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapters[0], adapter_name="a")
    model.load_adapter(adapters[1], adapter_name="b")
    more = {"svd_rank": 8} if way == "svd" else {}
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "merged", combination_type=way, **more)
    model.set_adapter("merged")
    return added(base, model.double())


def by_isomerge(base: Path, adapters: list[Path], out: Path) -> dict[str, Tensor]:
    opened = open_checkpoint(base)
    merge_adapters(adapters, out=out, options={"weight": WEIGHTS}, base=opened, rank=24)
    return added(base, loaded(base, out))


def measure(case: list[dict[str, Any]], folder: Path) -> dict[str, float | str]:
    base = folder / "base"
    base_model().save_pretrained(base)
    configs = [LoraConfig(**{"target_modules": [Q, V], **one}) for one in case]
    adapters = [trained(base, config, folder / f"adapter-{i}", seed=i + 1) for i, config in enumerate(configs)]
    each = [added(base, loaded(base, adapter)) for adapter in adapters]
    truth = {name: sum(w * one[name] for w, one in zip(WEIGHTS, each, strict=True)) for name in each[0]}
    row: dict[str, float | str] = {}
    for way in PEFT_WAYS:
        try:
            row[f"PEFT {way}"] = error(by_peft(base, adapters, way), truth)
        except Exception as refusal:  # PEFT refuses in many classes
            row[f"PEFT {way}"] = f"refused ({type(refusal).__name__})"
    try:
        row["isomerge"] = error(by_isomerge(base, adapters, folder / "merged"), truth)
    except RequestError as refusal:
        row["isomerge"] = f"refused: {refusal}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    rows = {}
    print("| two adapters | " + " | ".join([*(f"PEFT `{way}`" for way in PEFT_WAYS), "isomerge"]) + " |")
    print("|---|" + "---|" * (len(PEFT_WAYS) + 1))
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[name] = measure(case, Path(folder))
        print(f"| {name} | " + " | ".join(shown(value) for value in rows[name].values()) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "exact" if value < EXACT else f"{100 * value:.0f} %"


if __name__ == "__main__":
    main()
