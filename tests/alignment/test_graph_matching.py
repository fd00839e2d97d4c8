"""The joint problem of all orders, against brute force, against scipy's FAQ on the whole graph, and on stock models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.optimize import quadratic_assignment
from torch import Tensor

import isomerge
from isomerge.alignment.evidence import Pair
from isomerge.alignment.graph_matching import stream_order
from isomerge.alignment.scope import Scope
from isomerge.alignment.units import Unit
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.symmetry.architecture import Architecture
from isomerge.symmetry.groups import Permutation
from isomerge.symmetry.patterns import bind
from isomerge.symmetry.transform import random_transform
from models import difference, logits, model, mostly_slow, tensors, variant
from samples import batches

PATTERNS = {
    "table": "_token residual", "in.0": "ffn.0 residual'", "bias.0": "ffn.0", "out.0": "residual ffn.0'",
    "in.1": "ffn.1 residual'", "out.1": "residual ffn.1'",
}  # fmt: skip
WIDTH, UNITS, TOKENS = 4, 3, 2
FAMILIES = ["vit", "bert", "gpt2", "llama"]


def small_pair(seed: int, width: int = WIDTH, units: int = UNITS, noise: float | None = None) -> dict[str, Any]:
    """Two feed-forwards on a stream: an anchor, and a source that is unrelated or a shuffled and noisy copy."""
    draw = np.random.default_rng(seed)
    sizes = {"_token": TOKENS, "residual": width, "ffn.0": units, "ffn.1": units}
    shapes = {n: [sizes[a.rstrip("'")] for a in p.split()] for n, p in PATTERNS.items()}
    a = {n: draw.standard_normal(s) for n, s in shapes.items()}
    b = {n: draw.standard_normal(s) for n, s in shapes.items()}
    if noise is not None:
        orders = {s: draw.permutation(size) for s, size in sizes.items() if s != "_token"}
        b = {n: moved(a[n], PATTERNS[n], orders) + noise * b[n] for n in a}
    return {"a": a, "b": b, "sizes": sizes}


def moved(array: np.ndarray, pattern: str, orders: dict[str, Any]) -> np.ndarray:
    for axis, name in enumerate(pattern.replace("'", "").split()):
        if name in orders:
            array = np.take(array, orders[name], axis)
    return array


def value(pair: dict[str, Any], orders: dict[str, Any]) -> float:
    return sum(float((moved(pair["b"][n], p, orders) * pair["a"][n]).sum()) for n, p in PATTERNS.items())


def completed(pair: dict[str, Any], stream: Any) -> dict[str, Any]:
    """The stream's order with the best order of each feed-forward beside it, by trying all."""
    orders = {"residual": stream}
    for name in ("ffn.0", "ffn.1"):
        every = itertools.permutations(range(pair["sizes"][name]))
        orders[name] = max(every, key=lambda p: value(pair, {**orders, name: list(p)}))
    return orders


def matched(pair: dict[str, Any]) -> list[int]:
    spaces = {n: Permutation(size) for n, size in pair["sizes"].items() if n != "_token"}
    layouts = {n: bind(p, pair["a"][n].shape, spaces) for n, p in PATTERNS.items()}
    source, anchor = ({n: torch.from_numpy(x) for n, x in pair[side].items()} for side in ("b", "a"))
    both = Pair(source.__getitem__, anchor.__getitem__, layouts, Architecture(spaces, PATTERNS))
    units = [Unit(n, spaces) for n in ("ffn.0", "ffn.1")]
    order: Tensor = stream_order(both, units, dict.fromkeys(PATTERNS, 1.0), lambda f, items, *_: list(map(f, items)))
    return order.tolist()


def faq(pair: dict[str, Any]) -> list[int]:
    """scipy on one graph of all units. What a unit has alone is an edge to nodes that stay; a large one names its
    space, so that units of different spaces are never matched."""
    sizes = {n: s for n, s in pair["sizes"].items() if n != "_token"}
    first = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    free, fixed = sum(sizes.values()), TOKENS + 1 + len(sizes)
    graphs = []
    for side in ("a", "b"):
        graph = np.zeros((free + fixed,) * 2)
        at = {n: slice(first[n], first[n] + s) for n, s in sizes.items()} | {"_token": slice(free, free + TOKENS)}
        for n, pattern in PATTERNS.items():
            axes = [at[x] for x in pattern.replace("'", "").split()]
            graph[axes[0], axes[1] if len(axes) > 1 else free + TOKENS] = (
                pair[side][n] if len(axes) > 1 else pair[side][n].ravel()
            )
        for k, n in enumerate(sizes):
            graph[at[n], free + TOKENS + 1 + k] = 1e3
        graphs.append(graph)
    seeds = np.stack([np.arange(free, free + fixed)] * 2, axis=1)
    start = scipy.linalg.block_diag(*(np.full((s, s), 1 / s) for s in sizes.values()))
    how = {"maximize": True, "partial_match": seeds, "P0": start, "tol": 1e-9, "maxiter": 200}
    found = quadratic_assignment(*graphs, method="faq", options=how)
    return [int(x) for x in found.col_ind[: sizes["residual"]]]


@pytest.mark.parametrize("seed", range(20))
def test_unrelated_graphs_are_matched_as_well_as_by_faq_and_never_better_than_the_best(seed: int) -> None:
    pair = small_pair(seed)
    best = max(value(pair, completed(pair, list(p))) for p in itertools.permutations(range(WIDTH)))
    mine, theirs = (value(pair, completed(pair, found)) for found in (matched(pair), faq(pair)))
    assert mine <= best + 1e-12
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_shuffled_noisy_copy_reaches_the_best_of_all_orders(seed: int) -> None:
    pair = small_pair(seed, noise=0.3)
    best = max((list(p) for p in itertools.permutations(range(WIDTH))), key=lambda p: value(pair, completed(pair, p)))
    assert matched(pair) == best


def test_edges_alone_find_a_stream_that_no_table_speaks_of() -> None:
    """With the tables gone, the sweep has nothing to start from; the biases of one feed-forward are enough here."""
    pair = small_pair(3, width=12, units=20, noise=0.0)
    for side in "ab":
        pair[side]["table"][:] = 0
    back = np.array(matched(pair))
    for n in ("in.0", "out.1"):
        axis = PATTERNS[n].replace("'", "").split().index("residual")
        left, right = (np.sort(x, 1 - axis) for x in (np.take(pair["b"][n], back, axis), pair["a"][n]))
        assert np.allclose(left, right)


# --- stock models -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("solver", ["graph", "sinkhorn", "annealing"])
@pytest.mark.parametrize("family", mostly_slow([*FAMILIES, "gemma2", "mixtral", "t5"], "vit"))
def test_the_function_never_changes_and_every_element_belongs_to_its_group(family: str, solver: str) -> None:
    source, anchor = model(family, 1), model(family, 0)
    alignment = isomerge.align(source, anchor, level="permutation", solver=solver)
    assert "residual" in alignment.transform.elements
    for space, element in alignment.transform.elements.items():
        assert alignment.transform.spaces[space].contains(element), space
    assert difference(logits(source), logits(source, alignment.state_dict())) <= 1e-10


@pytest.mark.parametrize("solver", ["graph", "sinkhorn", "annealing"])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "vit"))
def test_a_shuffled_model_is_recovered_bit_by_bit(family: str, solver: str) -> None:
    anchor = model(family, 0)
    bound = describe(open_checkpoint(anchor))
    shuffle = random_transform(Scope("permutation").restrict(bound.architecture).spaces, seed=5)
    moved_model = {n: shuffle.act(t, bound.layouts[n]) for n, t in tensors(anchor).items() if n in bound.layouts}
    source = variant(anchor, moved_model, f"shuffled-{solver}")
    found = isomerge.align(source, anchor, level="permutation", solver=solver).state_dict()
    assert all(torch.equal(found[n], t) for n, t in tensors(anchor).items())


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("vit", {"solver": "graph"}, ["residual", "would also rotate", "level='permutation'"]),
        ("vit", {"solver": "graph", "level": "permutation", "only": "ffn"}, ["residual stream, which does not move"]),
        ("vit", {"solver": "sinkhorn", "only": "residual"}, ["nothing that moves here changes its order"]),
        ("vit", {"solver": "graphs"}, ["Did you mean 'graph'?"]),
    ],
)
def test_a_solver_that_has_nothing_to_do_is_refused_with_the_reason(
    family: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        isomerge.align(model(family, 1), model(family, 0), **options)
    assert all(w in str(caught.value) for w in words) and "solver" in str(caught.value)


def test_graph_matching_takes_no_data() -> None:
    with pytest.raises(RequestError, match="it matches weights"):
        anchor = model("vit", 0)
        isomerge.align(model("vit", 1), anchor, level="permutation", solver="graph", data=batches(anchor))
