"""Transforms of nested spaces: composition and inverse, against loops over units."""

import pytest
import torch

from isomerge.symmetry.groups import (
    Invertible,
    Permutation,
    Rotary,
    RotationFixingOnes,
    Scale,
    SignedPermutation,
    SignedScale,
)
from isomerge.symmetry.patterns import bind
from isomerge.symmetry.transform import Transform, batch_sizes, dimension, random_transform

ATTENTION = {
    "kv": Permutation(3),
    "query": Permutation(2, per=("kv",)),
    "qk": Rotary(4, per=("kv",)),
    "vo": Invertible(4, per=("kv",)),
    "residual": RotationFixingOnes(5),
}
EXPERTS = {
    "expert": Permutation(3),
    "ffn": Permutation(4, per=("expert",)),
    "up": SignedScale(1, per=("expert", "ffn")),
    "unit": Scale(2, per=("expert", "ffn")),
    "residual": SignedPermutation(5),
}
CASES = [
    (ATTENTION, "(kv query qk) residual'", (24, 5)),
    (ATTENTION, "(kv qk') residual'", (12, 5)),
    (ATTENTION, "residual (kv query vo')", (5, 24)),
    (ATTENTION, "[kv query qk | kv qk' | kv vo]", (48,)),
    (ATTENTION, "(kv [qk | qk' | vo])", (36,)),
    (EXPERTS, "expert residual'", (3, 5)),
    (EXPERTS, "(expert ffn) residual'", (12, 5)),
    (EXPERTS, "(expert ffn up) residual'", (12, 5)),
    (EXPERTS, "residual (expert ffn up')", (5, 12)),
    (EXPERTS, "(expert ffn unit) |residual|", (24, 5)),
]
every_case = pytest.mark.parametrize(("spaces", "pattern", "shape"), CASES, ids=lambda v: str(v)[:40])


@every_case
def test_two_transforms_in_turn_are_their_composition(spaces, pattern, shape):
    first, second = random_transform(spaces, 1), random_transform(spaces, 2)
    x, layout = torch.randn(shape, dtype=torch.float64), bind(pattern, shape, spaces)
    torch.testing.assert_close(first.then(second).act(x, layout), second.act(first.act(x, layout), layout))


@every_case
def test_the_inverse_undoes_from_either_side(spaces, pattern, shape):
    g = random_transform(spaces, 3)
    x, layout = torch.randn(shape, dtype=torch.float64), bind(pattern, shape, spaces)
    torch.testing.assert_close(g.inverse().act(g.act(x, layout), layout), x)
    torch.testing.assert_close(g.act(g.inverse().act(x, layout), layout), x)


@pytest.mark.parametrize("spaces", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_composition_is_associative_and_inverses_compose_backwards(spaces):
    f, g, h = (random_transform(spaces, seed) for seed in (1, 2, 3))
    left, right = f.then(g).then(h), f.then(g.then(h))
    backwards, forwards = f.then(g).inverse(), g.inverse().then(f.inverse())
    nothing = f.then(f.inverse())
    for space, group in spaces.items():
        torch.testing.assert_close(left.element(space), right.element(space))
        torch.testing.assert_close(backwards.element(space), forwards.element(space))
        torch.testing.assert_close(nothing.element(space), group.identity(batch_sizes(spaces, space)))


@pytest.mark.parametrize("spaces", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_transforms_of_some_spaces_compose_and_invert_too(spaces):
    for some in (["residual"], [s for s in spaces if not spaces[s].per], [s for s in spaces if spaces[s].per]):
        part, whole = random_transform(spaces, 4, some), random_transform(spaces, 5)
        for _, pattern, shape in (c for c in CASES if c[0] is spaces):
            x, layout = torch.randn(shape, dtype=torch.float64), bind(pattern, shape, spaces)
            torch.testing.assert_close(part.then(whole).act(x, layout), whole.act(part.act(x, layout), layout))
            torch.testing.assert_close(whole.then(part).act(x, layout), part.act(whole.act(x, layout), layout))
            torch.testing.assert_close(part.inverse().act(part.act(x, layout), layout), x)


def test_grouped_queries_move_as_a_loop_over_groups_and_queries_says():
    g = random_transform(ATTENTION, 6)
    kv, query, vo = (g.elements[s] for s in ("kv", "query", "vo"))
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    moved = g.act(x.flatten(), bind("(kv query vo)", (24,), ATTENTION)).reshape(3, 2, 4)
    for k in range(3):
        for q in range(2):
            torch.testing.assert_close(moved[k, q], vo[k] @ x[kv[k], query[k, q]])


def test_experts_units_and_scales_move_as_a_loop_over_three_levels_says():
    g = random_transform(EXPERTS, 7)
    expert, ffn, up = (g.elements[s] for s in ("expert", "ffn", "up"))
    x = torch.randn(3, 4, dtype=torch.float64)
    moved = g.act(x.flatten(), bind("(expert ffn up')", (12,), EXPERTS)).reshape(3, 4)
    for e in range(3):
        for unit in range(4):
            torch.testing.assert_close(moved[e, unit], x[expert[e], ffn[e, unit]] / up[e, unit, 0])


def test_a_gated_layer_computes_the_same_after_a_random_element():
    g = random_transform(EXPERTS, 8).only(["expert", "ffn", "up"])
    gate, up = torch.randn(2, 12, 5, dtype=torch.float64)
    down, x = torch.randn(5, 12, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def layer(gate, up, down):
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    moved = [
        g.act(weight, bind(pattern, weight.shape, EXPERTS))
        for weight, pattern in (
            (gate, "(expert ffn) _in"), (up, "(expert ffn up) _in"), (down, "_out (expert ffn up')"),
        )
    ]  # fmt: skip
    torch.testing.assert_close(layer(*moved), layer(gate, up, down))


def test_a_skipped_space_stays():
    g = random_transform(ATTENTION, 9)
    x, layout = torch.randn(24, 5, dtype=torch.float64), bind("(kv query qk) residual'", (24, 5), ATTENTION)
    kept = g.only(s for s in ATTENTION if s != "residual")
    assert torch.equal(g.act(x, layout, skip=["residual"]), kept.act(x, layout))


def test_identities_can_be_left_out():
    g = Transform(ATTENTION, {"kv": torch.tensor([1, 0, 2])})
    padded = Transform(ATTENTION, {**g.elements, "vo": ATTENTION["vo"].identity((3,))})
    assert set(padded.without_identities().elements) == {"kv"}
    assert padded.moves("vo") and not g.moves("vo")


def test_a_space_counts_one_element_per_unit_of_its_parents():
    assert batch_sizes(EXPERTS, "up") == (3, 4)
    assert dimension(EXPERTS, "up") == 12 and dimension(EXPERTS, "unit") == 24
    assert dimension(ATTENTION, "vo") == 3 * 16 and dimension(ATTENTION, "qk") == 3 * 4
    assert dimension(ATTENTION, "kv") == 0


def test_the_same_seed_draws_the_same_transform_whatever_the_order_of_the_spaces():
    first = random_transform(ATTENTION, 3)
    second = random_transform(dict(reversed(ATTENTION.items())), 3)
    assert all(torch.equal(first.elements[s], second.elements[s]) for s in ATTENTION)
