"""What recipes can say, whatever the method: places of values, slices, modules, dtypes, whole examples."""

from __future__ import annotations

from peers.recipes import PAIR, recipe, weighted

# How values are found: in which place, for which tensor, in which layer. On the decoder-only family.
PARAMETERS: dict[str, str] = {
    "a gradient of weights": recipe(
        "linear", {"a": {"weight": [1.0, 0.5, 0.0]}, "b": {"weight": [0.0, 0.5, 1.0]}}
    ),
    "a gradient of two values over three layers": recipe("linear", {"a": {"weight": [0.2, 0.9]}, "b": {"weight": 0.3}}),
    "a gradient of five values over three layers": recipe(
        "slerp", PAIR, base="a", parameters={"t": [0, 0.5, 0.3, 0.7, 1]}
    ),
    "a gradient of one value": recipe("slerp", PAIR, base="a", parameters={"t": [0.3]}),
    "a gradient of densities": recipe("ties", weighted(1.0, 0.5, density=[1, 0.7, 0.1]), base="base"),
    "filters": recipe(
        "slerp",
        PAIR,
        base="a",
        parameters={"t": [{"filter": "self_attn", "value": 0.2}, {"filter": "mlp", "value": 0.8}, {"value": 0.5}]},
    ),
    "filters of gradients": recipe(
        "slerp",
        PAIR,
        base="a",
        parameters={
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
                {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
                {"value": 0.5},
            ]
        },
    ),
    "a filter with a star": recipe(
        "linear", {"a": {"weight": [{"filter": "mlp", "value": 0}, {"filter": "*", "value": 1}]}, "b": {"weight": 1}}
    ),
    "one filter without a list": recipe(
        "linear",
        {"a": {"weight": {"filter": "mlp", "value": 0.2}}, "b": {"weight": 0.5}},
        parameters={"weight": 1.0},
    ),
    "the first filter that fits": recipe(
        "linear",
        {"a": {"weight": [{"filter": "proj", "value": 0.1}, {"filter": "q_proj", "value": 0.9}, {"value": 0.5}]},
         "b": {"weight": 1.0}},
    ),
    "a model's filter falls back to the recipe": recipe(
        "ties",
        {"a": {"weight": [{"filter": "mlp", "value": 0.2}]}, "b": {"weight": 0.4}},
        base="base",
        parameters={"weight": 0.9, "density": 0.4},
    ),
    "a filter on normalize": recipe(
        "linear", weighted(0.7, 0.6), parameters={"normalize": [{"filter": "mlp", "value": False}, {"value": True}]}
    ),
    "normalize by layer": recipe("linear", weighted(0.7, 0.6), parameters={"normalize": [True, False, True]}),
    "lambda by layer": recipe("task_arithmetic", weighted(0.7, 0.6), base="base", parameters={"lambda": [0.1, 1.9]}),
    "the base in the list": recipe(
        "ties", {"base": {}, **weighted(0.7, 0.3, density=0.5)}, base="base", parameters={"normalize": True}
    ),
    "numbers written as text": recipe("linear", {"a": {"weight": "1e-1"}, "b": {"weight": "0.5"}}),
    "whole numbers": recipe("linear", {"a": {"weight": 1}, "b": {"weight": 3}}),
}  # fmt: skip

# Layers taken from here and there. The output may be deeper than any input.
SLICES: dict[str, str] = {
    "a deeper stack": """
slices:
  - sources: [{model: $a, layer_range: [0, 2]}]
  - sources: [{model: $b, layer_range: [1, 3]}]
merge_method: passthrough
""",
    "a repeated layer": """
slices:
  - sources: [{model: $a, layer_range: [0, 2]}]
  - sources: [{model: $a, layer_range: [1, 2]}]
  - sources: [{model: $a, layer_range: [1, 3]}]
merge_method: passthrough
""",
    "a shallower stack": """
slices:
  - sources: [{model: $a, layer_range: [0, 1]}]
  - sources: [{model: $b, layer_range: [2, 3]}]
merge_method: passthrough
""",
    "layers in another order": """
slices:
  - sources: [{model: $a, layer_range: [2, 3]}]
  - sources: [{model: $a, layer_range: [0, 2]}]
merge_method: passthrough
""",
    "a silenced copy": """
slices:
  - sources: [{model: $a, layer_range: [0, 3]}]
  - sources:
      - model: $a
        layer_range: [1, 3]
        parameters:
          scale:
            - {filter: o_proj, value: 0.0}
            - {filter: down_proj, value: 0.0}
            - {value: 1.0}
merge_method: passthrough
""",
    "a stack of arcs": """
slices:
  - sources:
      - {model: $a, layer_range: [0, 2]}
      - {model: $b, layer_range: [0, 2]}
    parameters: {t: [0.2, 0.6]}
  - sources:
      - {model: $a, layer_range: [1, 3]}
      - {model: $b, layer_range: [1, 3]}
merge_method: slerp
base_model: $a
parameters:
  t: [{filter: mlp, value: [1, 0]}, {value: 0.5}]
""",
    "layers of different depth": """
slices:
  - sources:
      - {model: $a, layer_range: [0, 2], parameters: {weight: 0.7}}
      - {model: $b, layer_range: [1, 3], parameters: {weight: 0.3}}
merge_method: linear
""",
    "a base of its own for one slice": """
slices:
  - sources:
      - {model: $a, layer_range: [0, 1]}
      - {model: $b, layer_range: [0, 1]}
  - sources:
      - {model: $a, layer_range: [1, 3]}
      - {model: $b, layer_range: [1, 3]}
    base_model: $b
merge_method: slerp
base_model: $a
parameters: {t: 0.3}
""",
    "ties with parameters in every place": """
slices:
  - sources:
      - {model: $base, layer_range: [0, 3]}
      - {model: $a, layer_range: [0, 3], parameters: {weight: [0.2, 0.8], density: 0.6}}
      - {model: $b, layer_range: [0, 3]}
    parameters: {weight: 0.4}
merge_method: ties
base_model: $base
parameters: {density: 0.3, weight: 5.0}
""",
}

# Parts of an encoder–decoder by name.
MODULES: dict[str, str] = {
    "another mixture for each part": """
modules:
  encoder:
    models:
      - {model: $a, parameters: {weight: 0.8}}
      - {model: $b, parameters: {weight: 0.2}}
  decoder:
    models:
      - {model: $a, parameters: {weight: [0.1, 0.9]}}
      - {model: $b, parameters: {weight: 0.5}}
  shared:
    models:
      - {model: $a}
      - {model: $b}
merge_method: linear
parameters: {weight: 1.0}
""",
    "a deeper encoder": """
modules:
  encoder:
    slices:
      - sources: [{model: $a, layer_range: [0, 2]}]
      - sources: [{model: $b, layer_range: [1, 3]}]
  decoder:
    slices:
      - sources: [{model: $a, layer_range: [0, 2]}]
  shared:
    models: [{model: $a}]
merge_method: passthrough
""",
    "parameters of a part": """
modules:
  encoder:
    models: [{model: $a}, {model: $b}]
    parameters: {t: 0.1}
  decoder:
    models: [{model: $a}, {model: $b}]
    parameters: {t: [0.2, 0.9]}
  shared:
    models: [{model: $a}, {model: $b}]
merge_method: slerp
base_model: $a
parameters: {t: 0.5}
""",
}

DTYPES: dict[str, str] = {
    "computed and written in bfloat16": recipe("linear", weighted(0.7, 0.3), dtype="bfloat16"),
    "computed and written in float16": recipe("linear", weighted(0.7, 0.3), dtype="float16"),
    "written in bfloat16": recipe("ties", weighted(0.7, 0.3, density=0.5), base="base", out_dtype="bfloat16"),
    "computed in float32, written in float16": recipe(
        "slerp", PAIR, base="a", parameters={"t": 0.3}, dtype="float32", out_dtype="float16"
    ),
    "computed and written in float64": recipe("linear", weighted(0.7, 0.3), dtype="float64"),
}

# Written after what the documentation's and the examples folder's recipes do, for tiny models.
EXAMPLES: dict[str, str] = {
    "bio-merge": """
models:
  - model: $a
    parameters:
      density: 0.5
      weight: 0.5
  - model: $b
    parameters:
      density: 0.5
      weight: 0.5
merge_method: ties
base_model: $base
parameters:
  normalize: false
  int8_mask: true
dtype: float32
""",
    "gradient-slerp": """
slices:
  - sources:
      - model: $a
        layer_range: [0, 3]
      - model: $b
        layer_range: [0, 3]
merge_method: slerp
base_model: $a
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # the rest
dtype: float32
""",
    "linear": """
models:
  - model: $a
    parameters:
      weight: 1.0
  - model: $b
    parameters:
      weight: 0.3
  - model: $c
    parameters:
      weight: 0.5
merge_method: linear
dtype: float32
""",
    "orcamini-platy-44layer": """
slices:
  - sources:
    - model: $a
      layer_range: [0, 2]
  - sources:
    - model: $b
      layer_range: [1, 3]
merge_method: passthrough
dtype: float32
""",
    "ties": """
models:
  - model: $a
    parameters:
      density: [1, 0.7, 0.1] # by layer
      weight: 1.0
  - model: $b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # by layer
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
dtype: float32
""",
    "arcee_fusion": """
models:
  - model: $a
  - model: $b
merge_method: arcee_fusion
base_model: $a
dtype: float32
""",
    "model_stock": """
models:
  - model: $a
  - model: $b
  - model: $c
merge_method: model_stock
base_model: $base
dtype: float32
""",
    "dare_ties with everything kept": """
models:
  - model: $base
    # the base needs no parameters
  - model: $a
    parameters:
      density: 1.0
      weight: 0.4
  - model: $b
    parameters:
      density: 1.0
      weight: 0.3
merge_method: dare_ties
base_model: $base
parameters:
  int8_mask: true
dtype: float32
""",
    "nuslerp": """
models:
  - model: $a
    parameters: {weight: 0.6}
  - model: $b
    parameters: {weight: 0.4}
merge_method: nuslerp
dtype: float32
""",
    "tokenizer_source": """
models:
  - model: $a
    parameters: {weight: 1.0}
  - model: $b
    parameters: {weight: 1.0}
merge_method: linear
tokenizer_source: base
base_model: $a
dtype: float32
""",
}

# Several documents: the named ones first, the last one is the result (mergekit-multi; `mega` of old).
MANY: dict[str, str] = {
    "mega": """
name: gradient-slerp
slices:
  - sources:
      - {model: $a, layer_range: [0, 3]}
      - {model: $b, layer_range: [0, 3]}
merge_method: slerp
base_model: $a
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - value: 0.5
dtype: float32
---
models:
  - model: gradient-slerp
    parameters:
      density: [1, 0.7, 0.1]
      weight: 1.0
  - model: $c
    parameters:
      density: 0.33
      weight:
        - {filter: mlp, value: 0.5}
        - value: 0
merge_method: ties
base_model: $base
parameters: {normalize: true, int8_mask: true}
dtype: float32
""",
    "the result first": """
models: [{model: mean}, {model: $a}]
merge_method: slerp
base_model: $a
parameters: {t: 0.4}
---
name: mean
models: [{model: $b, parameters: {weight: 1}}, {model: $c, parameters: {weight: 2}}]
merge_method: linear
""",
    "one after another": """
name: first
models: [{model: $a, parameters: {weight: 1}}, {model: $b, parameters: {weight: 1}}]
merge_method: linear
---
name: second
models: [{model: first, parameters: {weight: 1}}, {model: $c, parameters: {weight: 1}}]
merge_method: linear
---
models: [{model: second}, {model: $a}]
merge_method: slerp
base_model: $a
parameters: {t: 0.4}
""",
}
