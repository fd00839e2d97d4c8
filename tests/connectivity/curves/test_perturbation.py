"""Noise and attacks on pixels and on token embeddings, beside the same done by hand with the stock class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from isomerge.connectivity.curves.perturbation import Perturbation
from isomerge.errors import RequestError
from models import llama, vit
from samples import DIGITS


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, torch.Tensor]:
    folder = tmp_path_factory.mktemp("vit")
    vit(folder, DIGITS)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    size = model.config.image_size
    return model, torch.randn(6, 1, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_noise_on_pixels_has_the_size_that_was_asked_for(image: tuple[Any, torch.Tensor]) -> None:
    model, pixels = image
    noisy = Perturbation("noise", 0.5, seed=3)
    drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(3))
    expected = model(pixel_values=pixels + 0.5 * pixels.std() * drawn).logits
    assert torch.allclose(noisy.of(model)(pixel_values=pixels).logits, expected, atol=1e-6)
    assert torch.allclose(noisy.of(model)(pixel_values=pixels).logits, expected, atol=1e-6), "from the start again"


@torch.no_grad()
def test_noise_on_tokens_is_on_their_embeddings(tmp_path: Path) -> None:
    llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(10).reshape(2, 5)
    embedded = model.get_input_embeddings()(ids)
    drawn = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1))
    expected = model(inputs_embeds=embedded + 0.3 * embedded.std() * drawn).logits
    got = Perturbation("noise", 0.3, seed=1).of(model)(input_ids=ids).logits
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.equal(model(input_ids=ids).logits, model(inputs_embeds=embedded).logits), "no hook stays"


def test_an_attack_goes_up_the_gradient_of_the_likeliest_class(image: tuple[Any, torch.Tensor]) -> None:
    model, pixels = image
    watched = pixels.clone().requires_grad_()
    clean = model(pixel_values=watched).logits
    chosen = clean.argmax(-1)
    (gradient,) = torch.autograd.grad(F.cross_entropy(clean, chosen), watched)
    with torch.no_grad():
        expected = model(pixel_values=pixels + 0.2 * pixels.std() * gradient.sign()).logits
        got = Perturbation("attack", 0.2, seed=0).of(model)(pixel_values=pixels).logits
    assert torch.allclose(got, expected, atol=1e-6)
    assert F.cross_entropy(got, chosen) > F.cross_entropy(clean, chosen)


def test_numbers_have_no_likeliest_class_to_attack(image: tuple[Any, torch.Tensor]) -> None:
    model, pixels = image
    with pytest.raises(RequestError, match="no scores of classes"):
        Perturbation("attack", 0.2, seed=0).run(model, {"pixel_values": pixels}, lambda batch: model.vit(**batch))
