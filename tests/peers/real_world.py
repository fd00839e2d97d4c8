"""Recipes and command lines as people publish them on the hub, with the names of tiny models in place of theirs.

The layers are those of models with four; whatever else a recipe says is what such recipes say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    family: str
    recipe: str
    flags: str
    dtype: str = "bfloat16"
    apart: float = 0.0
    """The share of weights that may be another choice than mergekit's: changes of equal magnitude at a cut."""
    layers: int = 4


PUBLISHED: dict[str, Published] = {
    "slerp of two Mistrals": Published(
        "deep mistral",
        """
slices:
  - sources:
      - model: $a
        layer_range: [0, 4]
      - model: $b
        layer_range: [0, 4]
merge_method: slerp
base_model: $a
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
""",
        "--copy-tokenizer --allow-crimes --out-shard-size 1B --lazy-unpickle",
    ),
    "slerp of two Qwen2 along the layers": Published(
        "deep qwen2",
        """
merge_method: slerp
base_model: $a
models:
  - model: $a
  - model: $b
parameters:
  t: [0, 0.5, 1, 0.5, 0]
dtype: bfloat16
tokenizer_source: base
""",
        "--trust-remote-code --lazy-unpickle",
    ),
    "slerp of two Qwen3": Published(
        "deep qwen3",
        """
models:
  - model: $a
  - model: $b
merge_method: slerp
base_model: $b
dtype: bfloat16
parameters:
  t:
    - filter: self_attn
      value: [0.1, 0.4, 0.6]
    - filter: mlp
      value: 0.35
    - value: 0.5
""",
        "--write-model-card --clone-tensors",
    ),
    "TIES of Mistrals": Published(
        "deep mistral",
        """
models:
  - model: $base
    # no parameters necessary for base model
  - model: $a
    parameters:
      density: 0.5
      weight: 0.5
  - model: $b
    parameters:
      density: 0.5
      weight: 0.3
merge_method: ties
base_model: $base
parameters:
  normalize: true
dtype: float16
""",
        "--copy-tokenizer --low-cpu-memory --out-shard-size 2B",
        dtype="float16",
        apart=0.01,
    ),
    "TIES with gradients of Llamas": Published(
        "deep llama",
        """
models:
  - model: $a
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: $b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: $c
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: $base
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
        "--no-write-model-card -v",
        dtype="float16",
        apart=0.01,
    ),
    "DARE-TIES": Published(
        "deep llama",
        """
models:
  - model: $base
    # No parameters necessary for base model
  - model: $a
    parameters:
      density: 0.53
      weight: 0.4
  - model: $b
    parameters:
      density: 0.53
      weight: 0.3
  - model: $c
    parameters:
      density: 0.53
      weight: 0.3
merge_method: dare_ties
base_model: $base
parameters:
  int8_mask: true
dtype: bfloat16
""",
        "--copy-tokenizer --lazy-unpickle --random-seed 42",
    ),
    "model stock": Published(
        "deep llama",
        """
models:
  - model: $a
  - model: $b
  - model: $c
merge_method: model_stock
base_model: $base
dtype: bfloat16
""",
        "--allow-crimes --no-lazy-unpickle",
    ),
    "a stack of two Llamas": Published(
        "deep llama",
        """
dtype: float16
merge_method: passthrough
slices:
- sources:
  - layer_range: [0, 2]
    model: $a
- sources:
  - layer_range: [1, 3]
    model: $b
- sources:
  - layer_range: [2, 4]
    model: $a
""",
        "--copy-tokenizer --no-safe-serialization --safe-serialization",
        dtype="float16",
        layers=6,
    ),
    "depth up-scaling": Published(
        "deep mistral",
        """
slices:
  - sources:
    - model: $base
      layer_range: [0, 3]
  - sources:
    - model: $base
      layer_range: [1, 4]
merge_method: passthrough
dtype: bfloat16
""",
        "--clone-tensors --async-write --write-threads 2",
        layers=6,
    ),
    "a LoRA in its model": Published(
        "deep llama",
        """
models:
  - model: $base+$adapter
merge_method: passthrough
dtype: bfloat16
""",
        "--lora-merge-cache $cache --lora-merge-dtype float32",
    ),
    "task arithmetic with a LoRA": Published(
        "deep llama",
        """
base_model: $base
dtype: bfloat16
merge_method: task_arithmetic
models:
  - model: $base
  - model: $a
    parameters:
      weight: 1.0
  - model: $b+$adapter
    parameters:
      weight: -0.5
""",
        "--lora-merge-cache $cache --lora-merge-dtype float32 --lazy-unpickle",
    ),
    "a union of tokenizers": Published(
        "deep llama",
        """
merge_method: linear
base_model: $a
models:
  - model: $a
    parameters: {weight: 0.6}
  - model: $larger
    parameters: {weight: 0.4}
tokenizer:
  source: union
  tokens:
    <|im_start|>:
      source: $larger
      force: true
dtype: bfloat16
""",
        "--copy-tokenizer --out-shard-size 500M",
    ),
}
