"""One recipe per method, as YAML text with $base, $a, $b and $c where the models' folders go."""

from __future__ import annotations

from typing import Any

import yaml


def recipe(method: str, models: dict[str, dict[str, Any]], *, base: str | None = None, **rest: Any) -> str:
    """`models` maps a member's name to its parameters; what is in `rest` stands at the top of the recipe."""
    listed = [{"model": f"${name}", **({"parameters": p} if p else {})} for name, p in models.items()]
    body: dict[str, Any] = {"merge_method": method, "models": listed}
    if base:
        body["base_model"] = f"${base}"
    return str(yaml.safe_dump({**body, **rest}, sort_keys=False))


def weighted(*weights: float, **shared: Any) -> dict[str, dict[str, Any]]:
    return {name: {"weight": w, **shared} for name, w in zip("abc", weights, strict=False)}


BARE: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
PAIR: dict[str, dict[str, Any]] = {"a": {}, "b": {}}

# Every method mergekit has, with the options that change its result. Those that draw random masks keep everything
# here; test_random_masks.py looks at what they drop.
METHODS: dict[str, str] = {
    "linear": recipe("linear", weighted(0.7, 0.3, 0.5)),
    "linear, not normalized": recipe("linear", weighted(0.7, 0.3, 0.5), parameters={"normalize": False}),
    "linear, base among the models": recipe("linear", {"base": {"weight": 1.0}, "a": {"weight": 0.5}}, base="base"),
    "linear, base added": recipe("linear", {"a": {"weight": 0.5}}, base="base", parameters={"weight": 2.0}),
    "linear, a weight of zero": recipe("linear", weighted(0.7, 0.0, 0.5)),
    "linear, a negative weight": recipe("linear", weighted(1.5, -0.5)),
    "slerp": recipe("slerp", PAIR, base="a", parameters={"t": 0.3}),
    "slerp, base second": recipe("slerp", PAIR, base="b", parameters={"t": 0.3}),
    "slerp, at an end": recipe("slerp", PAIR, base="a", parameters={"t": 1.0}),
    "nuslerp": recipe("nuslerp", weighted(0.3, 0.7)),
    "nuslerp, base": recipe("nuslerp", weighted(0.3, 0.7), base="base"),
    "nuslerp, columns": recipe("nuslerp", weighted(0.3, 0.7), parameters={"nuslerp_flatten": False}),
    "nuslerp, rows": recipe(
        "nuslerp",
        weighted(0.3, 0.7),
        base="base",
        parameters={"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "multislerp": recipe("multislerp", weighted(0.2, 0.3, 0.5)),
    "multislerp, base": recipe("multislerp", weighted(0.2, 0.3, 0.5), base="base"),
    "multislerp, not normalized": recipe(
        "multislerp", weighted(0.2, 0.3, 0.4), parameters={"normalize_weights": False}
    ),
    "karcher": recipe("karcher", BARE),
    "karcher, two models": recipe("karcher", PAIR),
    "karcher, few steps": recipe("karcher", BARE, parameters={"max_iter": 2, "tol": 1e-3}),
    "task_arithmetic": recipe("task_arithmetic", weighted(0.7, 0.3, 0.5), base="base"),
    "task_arithmetic, normalized": recipe(
        "task_arithmetic", weighted(0.7, 0.3), base="base", parameters={"normalize": True, "lambda": 0.8}
    ),
    "ties": recipe("ties", weighted(0.7, 0.3, 0.5, density=0.5), base="base"),
    "ties, other options": recipe(
        "ties",
        weighted(0.7, 0.3, 0.5, density=0.2),
        base="base",
        parameters={"normalize": False, "lambda": 0.7, "int8_mask": True, "rescale": True},
    ),
    "ties, everything kept": recipe("ties", weighted(1.0, 1.0), base="base"),
    "ties, hardly anything kept": recipe("ties", weighted(1.0, 1.0, density=0.01), base="base"),
    "dare_ties": recipe("dare_ties", weighted(0.7, 0.3, 0.5, density=1.0), base="base"),
    "dare_linear": recipe("dare_linear", weighted(0.7, 0.3, 0.5, density=1.0), base="base"),
    "breadcrumbs": recipe("breadcrumbs", weighted(0.7, 0.3, 0.5, density=0.7, gamma=0.1), base="base"),
    "breadcrumbs, default gamma": recipe("breadcrumbs", weighted(0.7, 0.3, density=0.9), base="base"),
    "breadcrumbs, more gamma than room": recipe("breadcrumbs", weighted(0.7, 0.3, density=0.9, gamma=0.3), base="base"),
    "breadcrumbs_ties": recipe("breadcrumbs_ties", weighted(0.7, 0.3, 0.5, density=0.7, gamma=0.1), base="base"),
    "della": recipe("della", weighted(0.7, 0.3, 0.5, density=1.0), base="base"),
    "della_linear": recipe("della_linear", weighted(0.7, 0.3, 0.5, density=1.0), base="base"),
    "sce": recipe("sce", BARE, base="base", parameters={"select_topk": 0.5}),
    "sce, everything": recipe("sce", BARE, base="base"),
    "ram": recipe("ram", BARE, base="base"),
    "ram, other options": recipe("ram", BARE, base="base", parameters={"epsilon": 0.01}),
    "ramplus_tl": recipe("ramplus_tl", BARE, base="base"),
    "ramplus_tl, other options": recipe(
        "ramplus_tl", BARE, base="base", parameters={"r": 0.2, "alpha": 0.4, "epsilon": 0.01}
    ),
    "model_stock": recipe("model_stock", PAIR, base="base"),
    "model_stock, three models": recipe("model_stock", BARE, base="base"),
    "model_stock, rows": recipe("model_stock", BARE, base="base", parameters={"filter_wise": True}),
    "nearswap": recipe("nearswap", {"a": {}}, base="base", parameters={"t": 0.01}),
    "arcee_fusion": recipe("arcee_fusion", {"a": {}}, base="base"),
    "passthrough": recipe("passthrough", {"a": {}}),
    "passthrough, scaled": recipe("passthrough", {"a": {"scale": [{"filter": "0", "value": 0.5}, {"value": 1.5}]}}),
}
