"""Groups against dense numpy matrices, which know nothing of our encodings."""

import numpy as np
import pytest
import torch

from isomerge.errors import SpecificationError
from isomerge.symmetry.groups import (
    GROUPS,
    Invertible,
    Permutation,
    Rotary,
    Rotation,
    RotationFixingOnes,
    Scale,
    SignedPermutation,
    SignedScale,
    Signs,
    Trivial,
)

ALL = [
    Permutation(6),
    SignedPermutation(6),
    Rotation(6),
    RotationFixingOnes(6),
    Invertible(6),
    Scale(6),
    SignedScale(6),
    Signs(6),
    Trivial(6),
    Rotary(6),
    Rotary(6, layout="interleaved"),
    Rotary(6, phase="sign", scale=False),
    Rotary(6, phase="none"),
    Rotary(6, scale=False),
]
every_group = pytest.mark.parametrize("group", ALL, ids=lambda g: f"{g.name}-{vars(g)}".replace("()", ""))
BATCHES = [(), (3,), (2, 3)]


def dense(group, element) -> np.ndarray:
    """The matrix of one element, written down from the table in the documentation."""
    n, matrix = group.size, np.zeros((group.size, group.size))
    e = element.numpy()
    if isinstance(group, Trivial):
        return np.eye(n)
    if isinstance(group, Permutation):
        matrix[np.arange(n), e] = 1
    elif isinstance(group, SignedPermutation):
        matrix[np.arange(n), np.abs(e) - 1] = np.sign(e)
    elif isinstance(group, Rotary):
        pairs = [(j, j + n // 2) if group.layout == "half" else (2 * j, 2 * j + 1) for j in range(n // 2)]
        for (a, b), c in zip(pairs, e, strict=True):
            matrix[np.ix_([a, b], [a, b])] = [[c.real, -c.imag], [c.imag, c.real]]
    elif isinstance(group, SignedScale):
        matrix = np.diag(e)
    else:
        matrix = e
    return matrix


def draw(group, batch=(), seed=0):
    return group.random(batch, torch.Generator().manual_seed(seed))


@every_group
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_the_action_is_the_matrix_and_its_dual_the_inverse_transpose(group, batch):
    element = draw(group, batch)
    x = torch.randn(*batch, group.size, 4, dtype=torch.float64)
    moved, dual = group.act(element, x), group.act(element, x, dual=True)
    for index in np.ndindex(*batch):
        matrix = dense(group, element[index])
        np.testing.assert_allclose(moved[index], matrix @ x[index].numpy(), atol=1e-13)
        np.testing.assert_allclose(dual[index], np.linalg.inv(matrix).T @ x[index].numpy(), atol=1e-12)


@every_group
def test_composition_and_inverse_are_those_of_matrices(group):
    first, second = draw(group, (3,), 1), draw(group, (3,), 2)
    for i in range(3):
        one, inverse = dense(group, first[i]), np.linalg.inv(dense(group, first[i]))
        np.testing.assert_allclose(
            dense(group, group.compose(second, first)[i]), dense(group, second[i]) @ one, atol=1e-13
        )
        np.testing.assert_allclose(dense(group, group.inverse(first)[i]), inverse, atol=1e-12)
        np.testing.assert_allclose(dense(group, group.dual(first)[i]), inverse.T, atol=1e-12)


@every_group
def test_pairing_a_vector_with_a_dual_vector_never_changes(group):
    element = draw(group)
    x, y = torch.randn(2, group.size, 1, dtype=torch.float64)
    before, after = (x * y).sum(), (group.act(element, x) * group.act(element, y, dual=True)).sum()
    assert abs(after - before) <= 1e-12


@every_group
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_random_elements_products_and_inverses_stay_in_the_group(group, batch):
    first, second = draw(group, batch, 1), draw(group, batch, 2)
    assert group.identity(batch).shape == first.shape and group.identity(batch).dtype == first.dtype
    made = group.compose(second, first), group.inverse(first), group.dual(first)
    assert all(group.contains(element) for element in (group.identity(batch), first, *made))


@every_group
def test_the_identity_moves_nothing_and_is_recognised(group):
    x = torch.randn(6, 4, dtype=torch.float64)
    assert torch.equal(group.act(group.identity(), x), x)
    assert group.is_identity(group.identity())
    assert isinstance(group, Trivial) or not group.is_identity(draw(group))


@every_group
def test_the_same_seed_draws_the_same_element(group):
    assert torch.equal(draw(group, (2,), 5), draw(group, (2,), 5))


@pytest.mark.parametrize(
    ("group", "element"),
    [
        (Permutation(3), torch.tensor([0, 0, 2])),
        (Permutation(3), torch.tensor([0, 1, 3])),
        (Permutation(3), torch.eye(3)),
        (SignedPermutation(3), torch.tensor([1, -1, 2])),
        (SignedPermutation(3), torch.tensor([0, 1, 2])),
        (Rotation(2), torch.tensor([[2.0, 0], [0, 1]])),
        (RotationFixingOnes(2), torch.tensor([[1.0, 0], [0, -1]])),
        (Invertible(2), torch.tensor([[1.0, 1], [1, 1]])),
        (Invertible(2), torch.tensor([[1.0, float("nan")], [0, 1]])),
        (Scale(2), torch.tensor([1.0, -1])),
        (SignedScale(2), torch.tensor([1.0, 0])),
        (Rotary(4), torch.tensor([1.0, 0], dtype=torch.complex128)),
        (Rotary(4, scale=False), torch.tensor([1.0, 2], dtype=torch.complex128)),
        (Rotary(4, phase="sign"), torch.tensor([1.0, 1j], dtype=torch.complex128)),
        (Rotary(4, phase="none"), torch.tensor([1.0, -1], dtype=torch.complex128)),
    ],
)
def test_what_lies_outside_a_group_is_not_taken_for_a_member(group, element):
    assert not group.contains(element)


def tangent_dimension(group) -> int:
    """The dimension of the solutions of the linear conditions on a generator, by rank."""
    n = group.size
    basis = np.eye(n * n).reshape(n * n, n, n)
    conditions = {
        "rotation": [lambda g: g + g.T],
        "rotation fixing 1": [lambda g: g + g.T, lambda g: g @ np.ones((n, 1))],
        "invertible": [],
        "scale": [lambda g: g - np.diag(np.diag(g))],
        "signed scale": [lambda g: g - np.diag(np.diag(g))],
    }[group.name]
    rows = [np.concatenate([c(g).ravel() for c in conditions] or [np.zeros(1)]) for g in basis]
    return n * n - np.linalg.matrix_rank(np.array(rows))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", [Rotation, RotationFixingOnes, Invertible, Scale, SignedScale])
def test_the_dimension_is_that_of_the_tangent_space(kind, size):
    assert kind(size).dimension == tangent_dimension(kind(size))


def test_discrete_groups_have_no_dimension_and_rotary_counts_phases_and_scales():
    assert Permutation(7).dimension == SignedPermutation(7).dimension == Trivial(7).dimension == 0
    assert Rotary(8).dimension == 8
    assert all(g.dimension == 4 for g in (Rotary(8, scale=False), Rotary(8, phase="sign"), Rotary(8, phase="none")))
    assert Rotary(8, phase="sign", scale=False).dimension == 0


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_elements_commute_with_every_rotary_position(layout):
    group = Rotary(6, layout=layout)
    matrix = dense(group, draw(group))
    for position in (1.0, 7.0):
        turn = dense(group, torch.polar(torch.ones(3).double(), position * torch.tensor([1.0, 0.1, 0.01]).double()))
        np.testing.assert_allclose(matrix @ turn, turn @ matrix, atol=1e-13)


def test_rotations_fixing_ones_commute_with_centring():
    matrix = draw(RotationFixingOnes(6)).numpy()
    centring = np.eye(6) - np.ones((6, 6)) / 6
    np.testing.assert_allclose(matrix @ centring, centring @ matrix, atol=1e-13)


def test_random_rotations_include_reflections_and_every_direction():
    drawn = Rotation(4).random((400,), torch.Generator().manual_seed(0))
    signs = torch.linalg.det(drawn).sign()
    assert 100 < int((signs > 0).sum()) < 300
    assert drawn.mean(0).abs().max() < 0.15, "a uniform distribution has mean zero"


def test_an_unsigned_axis_moves_with_the_units_but_keeps_its_signs():
    group, element = SignedPermutation(3), torch.tensor([-2, 3, -1])
    gains = torch.tensor([[1.0], [2.0], [3.0]])
    assert group.act(element, gains, unsigned=True).flatten().tolist() == [2, 3, 1]
    assert group.act(element, gains).flatten().tolist() == [-2, 3, -1]


def test_a_rotation_takes_a_folded_gain_and_refuses_another():
    element = draw(Rotation(3))
    assert torch.equal(Rotation(3).act(element, torch.ones(3, 1), unsigned=True), torch.ones(3, 1))
    with pytest.raises(SpecificationError, match="Fold the gain"):
        Rotation(3).act(element, torch.tensor([[1.0], [2.0], [3.0]]), unsigned=True)


def test_a_group_can_be_restricted_to_a_smaller_one_on_the_same_space():
    group = Invertible(4, per=("head.0",))
    assert group.restricted(Rotation) == Rotation(4, per=("head.0",))
    assert group.restricted(None) == Trivial(4, per=("head.0",))
    assert Invertible(4, per="head.0") == group


def test_every_group_is_found_by_its_name():
    declared = {group for group in GROUPS.values() if group.__module__.startswith("isomerge.")}  # docs declare more
    assert {type(g) for g in ALL} == declared
    assert all(GROUPS[g.name] is type(g) for g in ALL)
