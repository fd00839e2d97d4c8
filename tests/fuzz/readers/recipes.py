"""Recipes and model cards."""

from __future__ import annotations

from pathlib import Path

from fuzz import mutators as m
from fuzz.readers.registry import SMALL, reader, stored

RECIPES = (
    """merge_method: ties
base_model: a
models:
  - model: b
    parameters: {weight: 0.5, density: [0.1, 0.9]}
  - model: c@main+d
    parameters:
      weight:
        - filter: mlp
          value: 0.3
        - value: 1
parameters: {normalize: true}
dtype: bfloat16
tokenizer:
  source: union
  tokens:
    <s>: {source: b, force: true}
    x: {source: {kind: zero}}
align: {level: rotation, layers: "0-4"}
seed: 3
""",
    """name: one
merge_method: linear
models: &list
  - {model: a, parameters: {weight: 1.0}}
  - {model: b, parameters: {weight: 0.5}}
---
merge_method: slerp
base_model: one
models: [{model: one}, {model: c}]
parameters: {t: [0, 0.5, 1]}
""",
    """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 4]}]
  - sources: [{model: b, layer_range: [2, 6]}]
""",
    """merge_method: regmean
models: [{model: a, data: x.txt}, {model: b, data: {path: y.csv, limit: 5}}]
calibrate: {limit: 10, only: q_proj}
repair: {only: mlp}
data: z.txt
""",
)


@reader("recipe", lambda: [{"recipe.yml": text.encode()} for text in RECIPES], {"recipe.yml": m.mutate_yaml})
def read_recipe(folder: Path) -> None:
    from isomerge.merging.recipe.load import load_recipe

    for recipe in load_recipe(folder / "recipe.yml"):
        recipe.to_yaml()


CARD = b"---\nbase_model: [a/b]\ntags: &t [x, y]\nlicense: mit\n---\n# A model\n"


@reader("card", lambda: [{"README.md": CARD, "model.safetensors": stored(SMALL)}], {"README.md": m.mutate_yaml_head})
def read_card(folder: Path) -> None:
    from isomerge.checking.headers import stated_base
    from isomerge.checkpoint import open_checkpoint
    from isomerge.reporting.card import card_data

    checkpoint = open_checkpoint(folder)
    stated_base([checkpoint])
    card_data(checkpoint)
