"""Axis patterns: what they mean on numbered tensors, and what they say when they are wrong."""

import pytest
import torch

from isomerge.errors import SpecificationError
from isomerge.symmetry.groups import Invertible, Permutation, Rotation, SignedPermutation
from isomerge.symmetry.patterns import Atom, Concatenation, Product, bind, parse
from isomerge.symmetry.transform import Transform, random_transform

SPACES = {
    "residual": Rotation(6),
    "head": Permutation(3),
    "qk": Invertible(2, per=("head",)),
    "vo": Invertible(2, per=("head",)),
    "ffn": Permutation(4),
}


def transform(seed=0):
    return random_transform(SPACES, seed)


def test_a_pattern_has_one_node_per_axis():
    rows, columns = parse("(head qk) residual'")
    assert rows == Product((Atom("head"), Atom("qk")))
    assert columns == Atom("residual", dual=True)
    assert parse("|residual|") == (Atom("residual", unsigned=True),)
    assert parse("[head qk | head vo']") == (
        Concatenation((Product((Atom("head"), Atom("qk"))), Product((Atom("head"), Atom("vo", dual=True))))),
    )
    assert parse("_vocab residual")[0].free


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(head qk residual'", r"'\)' is missing"),
        ("[head | qk", r"'\]' is missing"),
        ("head) residual", r"'\)' closes nothing"),
        ("head | residual", "a bar is only allowed between the parts"),
        ("() residual", "an empty bracket or part"),
        ("[head | ]", "an empty bracket or part"),
        ("head + residual", "cannot read it from column"),
        ("head*", "cannot read it from column 5"),
    ],
)
def test_a_broken_pattern_says_what_is_wrong_and_what_a_pattern_is(pattern, message):
    with pytest.raises(SpecificationError, match=message) as error:
        parse(pattern)
    assert pattern in str(error.value) and "marks the dual" in str(error.value)


def test_an_undeclared_space_is_an_error_that_shows_how_to_write_a_free_axis():
    with pytest.raises(SpecificationError, match=r"'vocab' is not declared \(write _vocab if it has none\)"):
        bind("vocab residual", (5, 6), SPACES)


def test_a_wrong_number_of_axes_names_the_tensor_and_both_counts():
    with pytest.raises(SpecificationError, match=r"layer\.weight of shape \(6,\).*2 axes, the tensor 1"):
        bind("ffn residual", (6,), SPACES, "layer.weight")


def test_a_wrong_length_names_the_axis_and_both_lengths():
    with pytest.raises(SpecificationError, match=r"axis 1 should have 6 entries and has 7"):
        bind("ffn residual'", (4, 7), SPACES, "layer.weight")


@pytest.mark.parametrize("pattern", ["head qk", "(qk head)", "qk"])
def test_a_nested_space_must_stand_behind_its_parent_on_the_same_axis(pattern):
    shape = {"head qk": (3, 2), "(qk head)": (6,), "qk": (2,)}[pattern]
    with pytest.raises(SpecificationError, match="'qk' is taken per 'head', which must stand before it"):
        bind(pattern, shape, SPACES)


def test_an_axis_without_a_space_takes_any_length_and_stays():
    for length in (1, 9):
        x = torch.randn(length, 6, dtype=torch.float64)
        layout = bind("_vocab residual", x.shape, SPACES)
        assert layout.spaces() == {"residual"}
        expected = x @ transform().elements["residual"].T
        torch.testing.assert_close(transform().act(x, layout), expected)


def test_concatenated_parts_lie_one_after_the_other():
    x = torch.randn(6 + 6 + 4, dtype=torch.float64)
    g = transform()
    order, qk, vo = g.elements["head"], g.elements["qk"], g.elements["vo"]
    moved = g.act(x, bind("[head qk | head vo' | ffn]", x.shape, SPACES))
    first, second, third = x[:6].reshape(3, 2), x[6:12].reshape(3, 2), x[12:]
    expected = [torch.stack([qk[h] @ first[order[h]] for h in range(3)]).flatten()]
    expected += [torch.stack([torch.linalg.inv(vo[h]).T @ second[order[h]] for h in range(3)]).flatten()]
    expected += [third[g.elements["ffn"]]]
    torch.testing.assert_close(moved, torch.cat(expected))


def test_parts_inside_a_head_move_with_it():
    x = torch.randn(3 * (2 + 2), dtype=torch.float64)
    g = transform()
    moved = g.act(x, bind("(head [qk | vo'])", x.shape, SPACES)).reshape(3, 4)
    for h in range(3):
        source = x.reshape(3, 4)[g.elements["head"][h]]
        dual = torch.linalg.inv(g.elements["vo"][h]).T
        torch.testing.assert_close(moved[h], torch.cat([g.elements["qk"][h] @ source[:2], dual @ source[2:]]))


def test_a_part_that_does_not_move_stays_bit_identical():
    x = torch.randn(6 + 4, dtype=torch.float64)
    moved = transform().only(["ffn"]).act(x, bind("[head qk | ffn]", x.shape, SPACES))
    assert torch.equal(moved[:6], x[:6]) and not torch.equal(moved[6:], x[6:])


def test_one_space_on_both_axes_acts_from_both_sides():
    x = torch.randn(6, 6, dtype=torch.float64)
    g = transform().elements["residual"]
    torch.testing.assert_close(transform().act(x, bind("residual residual'", x.shape, SPACES)), g @ x @ g.T)


def test_a_transposed_weight_moves_like_the_weight():
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = transform().act(x, bind("ffn residual'", x.shape, SPACES))
    turned = transform().act(x.T.contiguous(), bind("residual' ffn", (6, 4), SPACES))
    torch.testing.assert_close(turned, plain.T)


def test_a_convolution_moves_on_its_channels_at_every_pixel():
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    moved = transform().act(x, bind("residual _channels _height _width", x.shape, SPACES))
    for channel in range(3):
        for i in range(2):
            for j in range(2):
                expected = transform().elements["residual"] @ x[:, channel, i, j]
                torch.testing.assert_close(moved[:, channel, i, j], expected)


def test_an_unsigned_axis_ignores_signs():
    spaces = {"residual": SignedPermutation(3)}
    g = Transform(spaces, {"residual": torch.tensor([-3, 1, -2])})
    gains = torch.tensor([1.0, 2.0, 3.0])
    assert g.act(gains, bind("|residual|", (3,), spaces)).tolist() == [3, 1, 2]
    assert g.act(gains, bind("residual", (3,), spaces)).tolist() == [-3, 1, -2]


def test_the_input_is_never_written_to():
    x = torch.randn(4, 6, dtype=torch.float64)
    copy = x.clone()
    transform().act(x, bind("ffn residual'", x.shape, SPACES))
    assert torch.equal(x, copy)


def test_every_position_of_an_axis_belongs_to_exactly_one_segment():
    layout = bind("(head [qk | vo | qk'])", (18,), SPACES)
    positions = torch.cat([segment.index.flatten() for segment in layout.axes[0]])
    assert positions.sort().values.tolist() == list(range(18))
    assert [" ".join(map(str, segment.atoms)) for segment in layout.axes[0]] == ["head qk", "head vo", "head qk'"]


def test_take_and_put_are_inverse():
    x = torch.randn(5, 12, dtype=torch.float64)
    layout = bind("_ (head [qk | vo])", x.shape, SPACES)
    result = torch.zeros_like(x)
    for segment in layout.axes[1]:
        taken = segment.take(x, 1)
        assert taken.shape == (3, 2, 5)
        segment.put(result, 1, taken)
    assert torch.equal(result, x)


def test_the_axis_of_a_space_is_found_where_it_is_alone():
    layout = bind("(head qk) residual'", (6, 6), SPACES)
    assert layout.axis_of("residual") == layout.axis_of("residual", dual=True) == 1
    assert layout.axis_of("residual", dual=False) is None
    assert layout.axis_of("head") is None
