"""Requests that cannot be met say why, and all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

import models as tiny
from isomerge.errors import RequestError
from transport.pairs import batches, carried, fuse, model


@pytest.mark.parametrize(("options", "words"), [
    ({"cost": "activation"}, ["'activation' is not a cost", "Did you mean 'activations'?"]),
    ({"cost": "activations"}, ["needs data", "cost='weights'"]),
    ({"solver": "emdd"}, ["'emdd' is not a solver", "Did you mean 'emd'?"]),
    ({"mass": "even", "regularisation": 0}, ["not a kind of mass", "must be a positive number"]),
    ({"residual": "average"}, ["policy for the residual stream", "Did you mean 'averaging'?"]),
    ({"heads": "acros", "site": "middle"}, ["Did you mean 'across'?", "not a place in a feed-forward"]),
    ({"only": "feed"}, ["only cannot be 'feed'"]),
    ({"weights": [1, 2, 3]}, ["3 values for 2 models"]),
    ({"weights": [1, -1]}, ["positive sum"]),
    ({"device": "nowhere"}, ["device 'nowhere'"]),
], ids=str)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        fuse([model("vit"), model("vit", 1)], **options)
    assert all(word in str(caught.value) for word in words), caught.value


def refused(source: Any, anchor: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        carried(source, anchor, **options)
    return str(caught.value)


def test_other_depths_architectures_and_heads_are_refused() -> None:
    anchor = model("bert", 0, 32, 48)
    assert "the models differ in the number of layers" in refused(model("bert", num_hidden_layers=3), anchor)
    message = refused(model("vit"), anchor)
    assert "of type 'bert'" in message and "of type 'vit'" in message
    heads = tiny.model("bert", 1, hidden_size=32, num_attention_heads=8, intermediate_size=48)
    message = refused(heads, anchor)
    assert "'head.0' has 8 and 4 units: numbers of heads" in message and "'head.1'" in message


def test_what_stays_must_have_the_same_width() -> None:
    narrow, wide = model("bert", 0, 32, 48), model("bert", 1, 48, 64)
    for options in ({"only": "ffn"}, {"residual": "identity"}):
        assert "'residual' has 48 and 32 units and stays as it is" in refused(wide, narrow, **options)


def test_rotary_heads_of_another_width_are_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    narrow, wide = tiny.model("llama", 0, **sizes, head_dim=8), tiny.model("llama", 1, **sizes, head_dim=12)
    assert "'qk.0' has 12 and 8 units and stays as it is" in refused(wide, narrow)


def test_another_vocabulary_is_refused() -> None:
    assert "31 and 29 vocab" in refused(model("bert", 1, vocab_size=31), model("bert"))


def test_units_do_not_go_across_heads_that_share_them() -> None:
    assert "heads='matched'" in refused(model("llama", 1), model("llama"), heads="across")


def test_an_aligned_start_needs_equal_widths() -> None:
    assert "different width" in refused(model("bert", 1, 48, 64), model("bert", 0, 32, 48), align=True)


def test_data_that_ends_at_once_is_refused() -> None:
    assert "not one batch" in refused(model("vit", 1), model("vit"), data=batches(model("vit"), count=0))
