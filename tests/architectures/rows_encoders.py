"""Rows of the table for encoders, for models of images and sound, and for two towers: see rows.py."""

from __future__ import annotations

from collections.abc import Callable

BASE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 11}
TEXT = {**BASE, "vocab_size": 37, "pad_token_id": 0, "max_position_embeddings": 23}
LABELS = {"num_labels": 5}

# Three layers: the first has no norm in front of its attention, and the second sees a window only.
MODERNBERT = {**TEXT, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
              "sep_token_id": 2, "local_attention": 4, "global_attn_every_n_layers": 2}  # fmt: skip
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}


def add(row: Callable[..., None]) -> None:
    row("modernbert-lm", "ModernBertForMaskedLM", **MODERNBERT)
    row("modernbert-lm-biases", "ModernBertForMaskedLM", **MODERNBERT, **BIASED)
    row("modernbert-lm-untied", "ModernBertForMaskedLM", **MODERNBERT, tie_word_embeddings=False)
    row("modernbert-sequence", "ModernBertForSequenceClassification", **MODERNBERT, **LABELS)
    row("modernbert-token", "ModernBertForTokenClassification", **MODERNBERT, **LABELS, **BIASED)
    row("modernbert-question", "ModernBertForQuestionAnswering", **MODERNBERT)
    row("modernbert-choice", "ModernBertForMultipleChoice", "choice", **MODERNBERT)
    row("modernbert-bare", "ModernBertModel", **MODERNBERT)
