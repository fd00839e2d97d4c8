"""The words that users choose from, and the names of the files that mark a run: all that the command line needs to know
before torch is loaded.

Each set is declared once, as a type for annotations and as a tuple for checks. The merge methods are not declared here:
they are read from the JSON Schema of recipes, which is generated from them.

>>> LEVELS
('permutation', 'rotation', 'full')
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal, get_args

# Alignment.
Level = Literal["permutation", "rotation", "full"]
Part = Literal["attention", "ffn", "residual"]
Many = Literal["anchor", "universe"]
Evidence = Literal["weights", "activations", "mix"]
Measure = Literal["covariance", "correlation", "l2"]
Site = Literal["pre", "post"]
LEVELS: tuple[str, ...] = get_args(Level)
PARTS: tuple[str, ...] = get_args(Part)
MANY: tuple[str, ...] = get_args(Many)
EVIDENCE: tuple[str, ...] = get_args(Evidence)
MEASURES: tuple[str, ...] = get_args(Measure)
SITES: tuple[str, ...] = get_args(Site)

# Data and what is measured on it.
DataKind = Literal["images", "texts", "lines", "documents", "table", "tokens", "corpus"]
FisherKind = Literal["true", "empirical"]
DATA_KINDS: tuple[str, ...] = get_args(DataKind)
FISHER_KINDS: tuple[str, ...] = get_args(FisherKind)
SPLITS = ("train", "validation", "test")
TASKS = ("image", "sequence", "token", "regression", "causal-lm", "masked-lm", "seq2seq")
STATISTICS = ("gram", "activations", "units", "fisher")

# Merging, sweeping, writing and listing.
ROWS = "rows"
DEFAULT_RANK = 16
"""Of an extracted adapter, where neither rank nor energy is named."""
"""`tokenizer="rows"`: merge embedding tables row by row although token ids differ."""
TOKENIZERS = ("union", "base", ROWS)
SWEEP_MODES = ("grid", "together")
RANKINGS = ("loss", "metric")
DTYPES = ("bfloat16", "float16", "float32", "float64")
CATALOGUES = ("methods", "architectures", "solvers")

# Files and folders by which a run recognises its own earlier work.
STAGING = ".isomerge-partial"
"""In an output folder: finished tensors of a merge that has not ended."""
POINTS = "points.jsonl"
"""In the folder of a sweep: the points measured so far."""
DEMO_MARK = ".isomerge-demo"
"""In the folder of a demo: what the demo wrote, so that the next one may replace it."""


@cache
def methods() -> dict[str, str]:
    """Every merge method with its one-line summary, sorted by name.

    >>> methods()["linear"]
    'Weighted average: Σ w_k W_k, the weights divided by their sum.'
    """
    schema = Path(__file__).parent / "merging" / "recipe" / "schema.json"
    known = json.loads(schema.read_text(encoding="utf-8"))["properties"]["merge_method"]["oneOf"]
    return {method["const"]: method["description"] for method in known}
