"""Which rows of an activation are data, by the masks that a batch gives."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from isomerge.data.base import Batch
from isomerge.running.padding import PaddingMask

IDS = torch.zeros(2, 3, dtype=torch.long)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def padding(batch: Batch, *, two_sided: bool = False) -> PaddingMask:
    return PaddingMask(batch, SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=two_sided)))


def test_each_side_of_a_model_has_its_own_mask() -> None:
    both = {"attention_mask": MASK, "decoder_attention_mask": 1 - MASK}
    mask = padding({"input_ids": IDS, **both}, two_sided=True)
    encoder, decoder = (mask.of_side(6, encoder=side) for side in (True, False))
    assert encoder is not None and encoder.tolist() == [True, True, False, True, False, False]
    assert decoder is not None and torch.equal(decoder, ~encoder)
    plain = padding({"input_ids": IDS, **both}).of_side(6, encoder=False)
    assert plain is not None and torch.equal(plain, encoder)


def test_without_a_mask_for_these_rows_all_of_them_are_data() -> None:
    assert padding({"input_ids": IDS}).of_side(6, encoder=True) is None
    assert padding({"input_ids": IDS, "attention_mask": MASK}).of_side(5, encoder=True) is None
    pairs = torch.ones(2, 1, 3, 1)
    assert padding({"input_ids": IDS, "attention_mask": pairs}).of_side(6, encoder=True) is None
