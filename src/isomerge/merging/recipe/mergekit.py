"""What mergekit has: the names of its merge methods and their options, as of 0.1.5."""

from __future__ import annotations

_TASK_VECTORS = ("weight", "density", "normalize", "rescale", "lambda", "int8_mask")
MERGEKIT: dict[str, tuple[str, ...]] = {
    "arcee_fusion": (),
    "breadcrumbs": (*_TASK_VECTORS, "gamma"),
    "breadcrumbs_ties": (*_TASK_VECTORS, "gamma"),
    "dare_linear": _TASK_VECTORS,
    "dare_ties": _TASK_VECTORS,
    "della": (*_TASK_VECTORS, "epsilon"),
    "della_linear": (*_TASK_VECTORS, "epsilon"),
    "karcher": ("max_iter", "tol"),
    "linear": ("weight", "normalize"),
    "model_stock": ("filter_wise",),
    "multislerp": ("weight", "normalize_weights", "eps"),
    "nearswap": ("t",),
    "nuslerp": ("weight", "nuslerp_row_wise", "nuslerp_flatten"),
    "passthrough": ("scale",),
    "ram": ("epsilon",),
    "ramplus_tl": ("r", "alpha", "epsilon"),
    "sce": ("select_topk", "int8_mask"),
    "slerp": ("t",),
    "task_arithmetic": _TASK_VECTORS,
    "ties": _TASK_VECTORS,
}
DEMANDED = ("weight", "t")
"""Options that have a default here and none in mergekit."""
WITHOUT_EFFECT = ("int8_mask",)
"""It only saves memory in mergekit: accepted also where the method does not have it."""
