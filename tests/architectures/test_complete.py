"""Complete: nothing is missing from the specification.

Its groups and gauges together have exactly the dimension of the kernel of the Jacobian of a tiny stock model, measured
by automatic differentiation and a singular value decomposition, which know nothing of symmetries.
"""

from __future__ import annotations

import pytest
import torch

from architectures import tiny_decoders
from architectures.gauges import gauge_dimension, gauges, group_dimension
from architectures.row_models import implementations, model_class
from architectures.rows import Row
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.transform import dimension
from precision import float64_throughout

WIDTH, HEADS, UNITS, LAYERS, VOCABULARY, POSITIONS, LABELS = 8, 2, 5, 2, 11, 7, 3
INNER = WIDTH // HEADS
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": UNITS}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "num_labels": LABELS}
VIT = {**SIZES, "image_size": 4, "patch_size": 2, "num_channels": 1, "num_labels": LABELS, "layer_norm_eps": 0.1}
GPT2 = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_inner": UNITS, "n_positions": POSITIONS,
        "vocab_size": VOCABULARY, "layer_norm_epsilon": 0.1, "pad_token_id": 0}  # fmt: skip
LLAMA = {**TEXT, "num_key_value_heads": 1, "rms_norm_eps": 0.1, "tie_word_embeddings": False}
# Side by side with attention, the first feed-forward sees only tokens: few tokens would not excite all of it.
HALF = {"rope_theta": 50.0, "partial_rotary_factor": 0.5}
NEOX = {**TEXT, "layer_norm_eps": 0.1, "vocab_size": 41, "rope_parameters": HALF}
OPT = {**TEXT, "ffn_dim": UNITS}
BERT = {**TEXT, "layer_norm_eps": 0.1}
DINOV2 = {**VIT, "mlp_ratio": 1, "layerscale_value": 0.7, "use_mask_token": False}
STAGES = {"image_size": 8, "num_channels": 1, "patch_size": 2, "num_labels": LABELS}
SWIN = {**STAGES, "embed_dim": 4, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "mlp_ratio": 1.0}
CONVNEXT = {
    **STAGES,
    "image_size": 16,
    "num_stages": 2,
    "hidden_sizes": [4, 5],
    "depths": [1, 1],
    "layer_scale_init_value": 0.7,
}
RESNET = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [5, 6], "depths": [1, 1], "layer_type": "basic",
          "num_labels": LABELS}  # fmt: skip

# The first four with the total found when the mathematics was written; the others with none.
TINY = [
    (Row("vit", "ViTForImageClassification", VIT, "image"), 377),
    (Row("gpt2-untied", "GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}), 374),
    (Row("llama", "LlamaForCausalLM", LLAMA), 118),
    (Row("bert-token", "BertForTokenClassification", BERT), 333),
    (Row("vit-no-bias", "ViTForImageClassification", {**VIT, "qkv_bias": False}, "image"), None),
    (Row("vit-relu", "ViTForImageClassification", {**VIT, "hidden_act": "relu"}, "image"), None),
    (Row("gpt2-tied", "GPT2LMHeadModel", GPT2), None),
    (Row("gpt2-token", "GPT2ForTokenClassification", {**GPT2, "num_labels": LABELS}), None),
    (Row("bert-question", "BertForQuestionAnswering", {**BERT, "num_labels": 2}), None),
    (Row("opt-untied", "OPTForCausalLM", {**OPT, "tie_word_embeddings": False}), None),
    (Row("llama-biases", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2, "attention_bias": True}), None),
    (Row("qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": INNER}), None),
    (Row("neox", "GPTNeoXForCausalLM", NEOX), None),
    (Row("dinov2", "Dinov2ForImageClassification", DINOV2, "image"), None),
    (Row("swin", "SwinForImageClassification", SWIN, "image"), None),
    (Row("convnext", "ConvNextForImageClassification", CONVNEXT, "image"), None),
    (Row("resnet", "ResNetForImageClassification", RESNET, "image"), None),
    (Row("neox-sequential", "GPTNeoXForCausalLM", {**NEOX, "use_parallel_residual": False}), None),
    *((row, None) for row in tiny_decoders.ROWS),
]
tiny = pytest.mark.parametrize(
    ("row", "total"),
    [pytest.param(row, total, id=row.id, marks=[] if total else pytest.mark.slow) for row, total in TINY],
)


def build(row: Row):
    torch.manual_seed(3)  # with other seeds a ReLU unit may be always on, hence linear, which is one gauge more
    config = model_class(row).config_class(**row.config)
    model = model_class(row)._from_config(config, dtype=torch.float64, **implementations(row)).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # it hides a row of the table from differentiation, not from the model
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.1  # OPT has no option for it
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1  # nor have the norms inside latent attention
        if hasattr(module, "limit"):
            module.limit = 0.8  # so that units are clamped: where none is, a scale of theirs changes nothing
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_proj.bias")):
                parameter.zero_()  # a state that decays at once, or never, tells nothing
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            parameter += noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5 * noise.tanh()
        for _ in range(20 * any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())):
            model.train()(torch.randn(64, 1, 32, 32, dtype=torch.float64))  # a ReLU that is half on hides nothing
    return model.eval()


def example(row: Row, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if row.kind == "image":
        size = row.config.get("image_size", 32)
        return {"pixel_values": torch.randn(1, 1, size, size, generator=generator, dtype=torch.float64)}
    given = {"input_ids": torch.randint(0, row.config["vocab_size"], (1, POSITIONS), generator=generator)}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "OPT" in row.model:  # the first two rows of its table are out of reach of the usual numbering
        given["position_ids"] = torch.randperm(POSITIONS + 2, generator=generator)[None, :POSITIONS] - 2
    if "bert" in row.model.lower():
        given["token_type_ids"] = torch.randint(0, 2, (1, POSITIONS), generator=generator)
    return given


def jacobian(model, row: Row) -> torch.Tensor:
    """Rows of ∂output/∂parameters: random mixtures of the outputs on random examples, more than enough of both."""
    parameters = list(model.parameters())
    wanted = sum(p.numel() for p in parameters) * 3 // 2
    generator, rows, count = torch.Generator().manual_seed(1), [], 0
    while count < wanted:
        result = model(**example(row, generator))
        output = torch.cat([v.flatten() for k, v in result.items() if k.endswith("logits")])
        mixtures = min(len(output), 24)
        mix = torch.randn(mixtures, len(output), generator=generator, dtype=torch.float64)
        parts = torch.autograd.grad(output, parameters, mix, is_grads_batched=True)
        rows.append(torch.cat([p.reshape(mixtures, -1) for p in parts], dim=1))
        count += mixtures
    return torch.cat(rows)


def measured_kernel(model, row: Row) -> int:
    with float64_throughout():
        matrix = jacobian(model, row)
    values = torch.linalg.svdvals(matrix)
    values = values / values[0]
    rank = int((values > 1e-10).sum())
    assert values[rank - 1] > 1e3 * values[rank : rank + 1].sum(), "no clear gap: more or other examples are needed"
    return matrix.shape[1] - rank


@tiny
def test_groups_and_gauges_count_the_kernel_of_the_jacobian(row, total, tmp_path):
    model = build(row)
    model.save_pretrained(tmp_path)
    bound = describe(open_checkpoint(tmp_path))
    declared = group_dimension(bound) + gauge_dimension(bound)
    assert declared == measured_kernel(model, row), gauges(bound)
    assert total in (None, declared)


def test_the_formula_for_llama_is_the_one_on_paper(tmp_path):
    row = TINY[2][0]
    build(row).save_pretrained(tmp_path)
    bound = describe(open_checkpoint(tmp_path))
    rotation = WIDTH * (WIDTH - 1) // 2
    attention = LAYERS * 1 * (2 * INNER // 2 + INNER**2)  # a complex number per rotary pair, GL of the values
    scales, gains = LAYERS * UNITS, (2 * LAYERS + 1) * WIDTH
    assert group_dimension(bound) + gauge_dimension(bound) == rotation + attention + scales + gains
    assert dimension(bound.architecture.spaces, "residual") == rotation


@pytest.mark.slow
def test_of_a_state_space_one_factor_of_every_layer_is_not_used(tmp_path):
    model = build(tiny_decoders.MAMBA)
    model.save_pretrained(tmp_path)
    bound = describe(open_checkpoint(tmp_path))
    declared = group_dimension(bound) + gauge_dimension(bound)
    assert measured_kernel(model, tiny_decoders.MAMBA) - declared == LAYERS
