"""Rows of the table for encoders, for models of images and sound, and for two towers: see rows.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BASE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 11}
TEXT = {**BASE, "vocab_size": 37, "pad_token_id": 0, "max_position_embeddings": 23}
LABELS = {"num_labels": 5}

# Three layers: the first has no norm in front of its attention, and the second sees a window only.
MODERNBERT = {**TEXT, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
              "sep_token_id": 2, "local_attention": 4, "global_attn_every_n_layers": 2}  # fmt: skip
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}

ELECTRA = {**TEXT, "embedding_size": 7}
ALBERT = {**TEXT, "embedding_size": 7, "num_hidden_layers": 3}
ALBERT_GROUPS = {**ALBERT, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 11, "decoder_ffn_dim": 13, "vocab_size": 37,
        "max_position_embeddings": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
IMAGE = {**BASE, "image_size": 8, "patch_size": 4, **LABELS}
DINOV2 = {**IMAGE, "mlp_ratio": 2, "layerscale_value": 0.7}
DINOV3 = {**BASE, "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "num_register_tokens": 3}
# Two towers of different widths and depths.
TOWERS: dict[str, dict[str, Any]] = {
    "text_config": {**TEXT, "hidden_size": 12, "num_attention_heads": 3, "eos_token_id": 2},
    "vision_config": {**BASE, "num_hidden_layers": 3, "intermediate_size": 13, "image_size": 8, "patch_size": 4},
}
CLIP = {**TOWERS, "projection_dim": 7, **LABELS}
SIGLIP = {**TOWERS, "text_config": {**TOWERS["text_config"], "projection_size": 16}, **LABELS}
WHISPER = {**BART, "num_mel_bins": 6, "max_source_positions": 7, "max_target_positions": 23, "suppress_tokens": None,
           "begin_suppress_tokens": None}  # fmt: skip
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2, 1], "num_heads": [2, 4, 2],
        "window_size": 2, "mlp_ratio": 1.5, **LABELS}  # fmt: skip
CONVNEXT = {"image_size": 16, "patch_size": 2, "hidden_sizes": [6, 10, 7], "depths": [1, 2, 1], "num_stages": 3,
            "layer_scale_init_value": 0.7, **LABELS}  # fmt: skip
RESNET = {"embedding_size": 6, "hidden_sizes": [8, 12, 10], "depths": [2, 1, 2], "layer_type": "basic", **LABELS}


def add(row: Callable[..., None]) -> None:
    row("modernbert-lm", "ModernBertForMaskedLM", **MODERNBERT)
    row("modernbert-lm-biases", "ModernBertForMaskedLM", **MODERNBERT, **BIASED)
    row("modernbert-lm-untied", "ModernBertForMaskedLM", **MODERNBERT, tie_word_embeddings=False)
    row("modernbert-sequence", "ModernBertForSequenceClassification", **MODERNBERT, **LABELS)
    row("modernbert-token", "ModernBertForTokenClassification", **MODERNBERT, **LABELS, **BIASED)
    row("modernbert-question", "ModernBertForQuestionAnswering", **MODERNBERT)
    row("modernbert-choice", "ModernBertForMultipleChoice", "choice", **MODERNBERT)
    row("modernbert-bare", "ModernBertModel", **MODERNBERT)

    row("electra-lm", "ElectraForMaskedLM", **ELECTRA)
    row("electra-lm-wide-table", "ElectraForMaskedLM", **{**ELECTRA, "embedding_size": 16})
    row("electra-lm-untied", "ElectraForMaskedLM", **ELECTRA, tie_word_embeddings=False)
    row("electra-pretraining", "ElectraForPreTraining", **ELECTRA)
    row("electra-sequence", "ElectraForSequenceClassification", **ELECTRA, **LABELS)
    row("electra-token-relu", "ElectraForTokenClassification", **ELECTRA, **LABELS, hidden_act="relu")
    row("electra-question", "ElectraForQuestionAnswering", **ELECTRA)
    row("electra-choice", "ElectraForMultipleChoice", "choice", **ELECTRA)
    row("electra-bare", "ElectraModel", **ELECTRA)

    row("albert-lm", "AlbertForMaskedLM", **ALBERT)
    row("albert-lm-untied", "AlbertForMaskedLM", **ALBERT, tie_word_embeddings=False)
    row("albert-pretraining", "AlbertForPreTraining", **ALBERT)
    row("albert-sequence", "AlbertForSequenceClassification", **ALBERT_GROUPS, **LABELS)
    row("albert-token-relu", "AlbertForTokenClassification", **ALBERT, **LABELS, hidden_act="relu")
    row("albert-question", "AlbertForQuestionAnswering", **ALBERT)
    row("albert-choice", "AlbertForMultipleChoice", "choice", **ALBERT)
    row("albert-bare", "AlbertModel", **ALBERT)

    row("bart-lm", "BartForConditionalGeneration", "seq2seq", **BART)
    row("bart-lm-relu", "BartForConditionalGeneration", "seq2seq", **BART, activation_function="relu")
    row("bart-sequence", "BartForSequenceClassification", **BART, **LABELS)
    row("bart-question", "BartForQuestionAnswering", "seq2seq", **BART)
    row("bart-decoder", "BartForCausalLM", **{**BART, "is_encoder_decoder": False, "encoder_layers": 3})
    row("bart-bare", "BartModel", "seq2seq", **BART)

    row("dinov2-image", "Dinov2ForImageClassification", "image", **DINOV2)
    row("dinov2-image-no-bias", "Dinov2ForImageClassification", "image", **DINOV2, qkv_bias=False)
    row("dinov2-image-gated", "Dinov2ForImageClassification", "image", **DINOV2, use_swiglu_ffn=True)
    row("dinov2-bare", "Dinov2Model", "image", **DINOV2)
    row("dinov2-registers-image", "Dinov2WithRegistersForImageClassification", "image", **DINOV2, num_register_tokens=3)
    row("dinov2-registers-bare-gated", "Dinov2WithRegistersModel", "image", **DINOV2, use_swiglu_ffn=True)
    row("dinov3-bare", "DINOv3ViTModel", "image", **DINOV3)
    row("dinov3-bare-gated", "DINOv3ViTModel", "image", **DINOV3, use_gated_mlp=True, key_bias=True)

    row("clip", "CLIPModel", "towers", **CLIP)
    row("clip-image", "CLIPForImageClassification", "image", **CLIP)
    row("clip-vision-projection", "CLIPVisionModelWithProjection", "image", **TOWERS["vision_config"])
    row("clip-text-bare", "CLIPTextModel", **TOWERS["text_config"])
    row("siglip", "SiglipModel", "towers", **SIGLIP)
    row("siglip-image", "SiglipForImageClassification", "image", **SIGLIP)
    row("siglip-image-no-head", "SiglipForImageClassification", "image",
        **{**SIGLIP, "vision_config": {**TOWERS["vision_config"], "vision_use_head": False}})  # fmt: skip
    row("siglip-vision-bare", "SiglipVisionModel", "image", **TOWERS["vision_config"])

    row("whisper-lm", "WhisperForConditionalGeneration", "sound", **WHISPER)
    row("whisper-lm-untied-relu", "WhisperForConditionalGeneration", "sound", **WHISPER, tie_word_embeddings=False,
        activation_function="relu")  # fmt: skip
    row("whisper-sound", "WhisperForAudioClassification", "sound", **WHISPER, **LABELS, classifier_proj_size=9)
    row("whisper-sound-weighted", "WhisperForAudioClassification", "sound", **WHISPER, **LABELS,
        classifier_proj_size=9, use_weighted_layer_sum=True)  # fmt: skip
    row("whisper-bare", "WhisperModel", "sound", **WHISPER)

    row("swin-image", "SwinForImageClassification", "image", **SWIN)
    row("swin-image-absolute", "SwinForImageClassification", "image", **SWIN, use_absolute_embeddings=True,
        qkv_bias=False, hidden_act="relu")  # fmt: skip
    row("swin-bare", "SwinModel", "image", **SWIN)

    row("convnext-image", "ConvNextForImageClassification", "image", **CONVNEXT)
    row("convnext-image-no-scale", "ConvNextForImageClassification", "image", **{**CONVNEXT, "hidden_act": "relu",
        "layer_scale_init_value": 0.0})  # fmt: skip
    row("convnext-bare", "ConvNextModel", "image", **CONVNEXT)
    row("convnextv2-image", "ConvNextV2ForImageClassification", "image", **CONVNEXT)

    row("resnet-image", "ResNetForImageClassification", "image", **RESNET)
    row("resnet-image-bottleneck", "ResNetForImageClassification", "image", **{**RESNET, "layer_type": "bottleneck"})
    row("resnet-image-joined", "ResNetForImageClassification", "image", **{**RESNET, "embedding_size": 8})
    row("resnet-image-silu", "ResNetForImageClassification", "image", **RESNET, hidden_act="silu")
    row("resnet-bare", "ResNetModel", "image", **RESNET)
