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

ELECTRA = {**TEXT, "embedding_size": 7}
ALBERT = {**TEXT, "embedding_size": 7, "num_hidden_layers": 3}
ALBERT_GROUPS = {**ALBERT, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 11, "decoder_ffn_dim": 13, "vocab_size": 37,
        "max_position_embeddings": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip


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
    row("bart-bare", "BartModel", "seq2seq", **BART)
