"""The words that users choose from, and the names of the files that mark a run: all that the command line needs to know
before torch is loaded.

Each set is declared once, as a type for annotations and as a tuple for checks. The merge methods are not declared here:
they are read from the JSON Schema of recipes, which is generated from them.

>>> LEVELS
('permutation', 'rotation', 'full')
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

# Alignment.
Level = Literal["permutation", "rotation", "full"]
Part = Literal["attention", "ffn", "residual"]
Many = Literal["anchor", "universe", "cycle"]
Evidence = Literal["weights", "activations", "mix"]
Measure = Literal["covariance", "correlation", "information", "l2"]
Site = Literal["pre", "post"]
OrderSolver = Literal["assignment", "sinkhorn", "annealing", "graph"]
LearnTowards = Literal["predictions", "labels"]
LEVELS: tuple[str, ...] = get_args(Level)
PARTS: tuple[str, ...] = get_args(Part)
MANY: tuple[str, ...] = get_args(Many)
EVIDENCE: tuple[str, ...] = get_args(Evidence)
MEASURES: tuple[str, ...] = get_args(Measure)
SITES: tuple[str, ...] = get_args(Site)
ORDER_SOLVERS: tuple[str, ...] = get_args(OrderSolver)
LEARN_TOWARDS: tuple[str, ...] = get_args(LearnTowards)

# Data and what is measured on it.
DataKind = Literal["images", "texts", "lines", "documents", "table", "tokens", "corpus"]
FisherKind = Literal["true", "empirical"]
DATA_KINDS: tuple[str, ...] = get_args(DataKind)
FISHER_KINDS: tuple[str, ...] = get_args(FisherKind)
SPLITS = ("train", "validation", "test")
TASKS = ("image", "sequence", "token", "regression", "causal-lm", "masked-lm", "seq2seq")
CURVES = ("bezier", "chain", "autoneb", "simplex", "subspace", "geodesic")
Goals = Literal["auto", "mean", "own", "expert"]
GOALS: tuple[str, ...] = get_args(Goals)
Correction = Literal["auto", "none", "features", "signs"]
CORRECTIONS: tuple[str, ...] = get_args(Correction)
"""How a change that was carried to another base is fitted to it on data."""
GateMode = Literal["hidden", "hidden_avg", "hidden_last", "cheap_embed", "data", "random", "uniform_random"]
GATE_MODES: tuple[str, ...] = get_args(GateMode)
PROMPTED_GATES = GATE_MODES[:4]
"""Those that make their rows of prompts."""
ToDense = Literal["average", "most_used", "by_use"]
TO_DENSE: tuple[str, ...] = get_args(ToDense)
NewTokenRows = Literal["omp", "subword", "stored", "mean", "zero"]
NEW_TOKEN_ROWS: tuple[str, ...] = get_args(NewTokenRows)
STATISTICS = ("gram", "activations", "units", "fisher")

# Models of clients.
FEDERATED_ALIGN = ("none", "global", "common")
FEDERATED_GUARDS = ("none", "clip", "median", "krum")
FEDERATED_STEPS = ("one", "fedexp")

# Models together.
COMBINATIONS = ("probability", "logit", "vote", "weighted", "stacked", "posterior")

# Merging, sweeping, writing and listing.
LayerScale = Literal["larv"]
LAYER_SCALES: tuple[str, ...] = get_args(LayerScale)
ROWS = "rows"
DEFAULT_RANK = 16
"""Of an extracted adapter, where neither rank nor energy is named."""
"""`tokenizer="rows"`: merge embedding tables row by row although token ids differ."""
TOKENIZERS = ("union", "base", ROWS)
SWEEP_MODES = ("grid", "together")
RANKINGS = ("loss", "metric")
FIND_BY = ("auto", "distance", "leep", "logme", "certainty")
ALGORITHMS = ("bayesian", "cma", "random")
ENGINES = ("threads", "ray")
DTYPES = ("bfloat16", "float16", "float32", "float64")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""How `convert` can store the matrices of a GGUF file."""
CATALOGUES = ("methods", "architectures", "solvers", "combinations")

# Files and folders by which a run recognises its own earlier work.
STAGING = ".isomerge-partial"
"""In an output folder: finished tensors of a merge that has not ended."""
POINTS = "points.jsonl"
"""In the folder of a sweep: the points measured so far."""
PROGRESS = "ISOMERGE_PROGRESS"
"""The variable that, set to "json", makes a verb print its progress as lines of JSON on stderr."""
MODEL = "model"
"""In the folder of a search: the folder of the best merge."""
DEMO_MARK = ".isomerge-demo"
"""In the folder of a demo: what the demo wrote, so that the next one may replace it."""


@cache
def methods() -> dict[str, str]:
    """Every merge method with its one-line summary, sorted by name.

    >>> methods()["linear"]
    'Weighted average: Σ w_k W_k, the weights divided by their sum.'
    """
    known = _schema()["properties"]["merge_method"]["oneOf"]
    return {method["const"]: method["description"] for method in known}


@dataclass(frozen=True)
class MethodOption:
    """An option of a merge method."""

    name: str
    kind: str
    """number, integer, boolean or string."""
    help: str
    each: bool
    """Every model has its own value."""
    required: bool
    default: Any

    @property
    def meaning(self) -> str:
        """Its help, whose value it is, and the default."""
        default = "required" if self.required else f"default: {str(self.default).lower()}"
        about = [*(["one value per model"] if self.each else []), *([default] if self.default is not None else [])]
        return f"{self.help} [{'; '.join(about)}]" if about else self.help


def method_options(method: str) -> list[MethodOption]:
    """The options of a merge method.

    >>> [option.name for option in method_options("slerp")]
    ['t']
    """
    known = _schema()["$defs"]
    each = {name for name, one in known[f"model-options-{method}"]["properties"].items() if "description" in one}
    return [
        MethodOption(name, _kind_of(one), one["description"], name in each, "default" not in one, one.get("default"))
        for name, one in known[f"options-{method}"]["properties"].items()
        if "description" in one  # others are accepted for mergekit's sake and have no effect
    ]


def _kind_of(option: dict[str, Any]) -> str:
    """Its type; a reference to one is named after it."""
    kinds = option.get("type") or option["$ref"].rpartition("setting-")[2].removesuffix("-or-null")
    return str(kinds if isinstance(kinds, str) else kinds[0])


@cache
def _schema() -> Any:
    schema = Path(__file__).parent / "merging" / "recipe" / "schema.json"
    return json.loads(schema.read_text(encoding="utf-8"))
