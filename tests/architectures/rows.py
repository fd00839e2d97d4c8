"""The table of models every specification is tested on: one row buys the whole suite.

A row is a stock `transformers` class with a tiny configuration. To add one:

    row("mixtral-lm", "MixtralForCausalLM", **LLAMA, num_local_experts=3)

`kind` says what the model reads: "text", "image" or "seq2seq". Rows with tied tables are tested tied, and untied too
where the family allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from architectures import rows_encoders

VOCABULARY = 37


@dataclass(frozen=True)
class Row:
    """A model of the table."""

    id: str
    model: str  # name of the class in `transformers`
    config: Mapping[str, Any]
    kind: str = "text"


ROWS: dict[str, Row] = {}


def row(id: str, model: str, kind: str = "text", **config: Any) -> None:
    """Add a model to the table."""
    assert id not in ROWS, id
    ROWS[id] = Row(id, model, config, kind)


# Every size differs from every other, so that no two axes can be confused unnoticed.
BASE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 11}
TEXT = {**BASE, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 23}
LABELS = {"num_labels": 5}
IMAGE = {**BASE, "image_size": 8, "patch_size": 4, **LABELS}
LLAMA = {**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False}

# ViT and DeiT
row("vit-image", "ViTForImageClassification", "image", **IMAGE)
row("vit-image-no-bias", "ViTForImageClassification", "image", **IMAGE, qkv_bias=False)
row("vit-image-relu", "ViTForImageClassification", "image", **IMAGE, hidden_act="relu")
row("vit-bare", "ViTModel", "image", **IMAGE)
row("deit-image", "DeiTForImageClassification", "image", **IMAGE)
row("deit-teacher", "DeiTForImageClassificationWithTeacher", "image", **IMAGE)
row("deit-bare", "DeiTModel", "image", **IMAGE)

# BERT
row("bert-lm", "BertForMaskedLM", **TEXT)
row("bert-lm-untied", "BertForMaskedLM", **TEXT, tie_word_embeddings=False)
row("bert-pretraining", "BertForPreTraining", **TEXT)
row("bert-sequence", "BertForSequenceClassification", **TEXT, **LABELS)
row("bert-token", "BertForTokenClassification", **TEXT, **LABELS)
row("bert-token-relu", "BertForTokenClassification", **TEXT, **LABELS, hidden_act="relu")
row("bert-question", "BertForQuestionAnswering", **TEXT)
row("bert-choice", "BertForMultipleChoice", "choice", **TEXT)
row("bert-bare", "BertModel", **TEXT)

# RoBERTa and its relatives
row("roberta-lm", "RobertaForMaskedLM", **TEXT)
row("roberta-sequence", "RobertaForSequenceClassification", **TEXT, **LABELS)
row("roberta-token", "RobertaForTokenClassification", **TEXT, **LABELS)
row("roberta-question", "RobertaForQuestionAnswering", **TEXT)
row("roberta-bare", "RobertaModel", **TEXT)
row("xlm-roberta-sequence", "XLMRobertaForSequenceClassification", **TEXT, **LABELS)
row("camembert-lm", "CamembertForMaskedLM", **TEXT)

# Llama and its relatives
row("llama-lm", "LlamaForCausalLM", **LLAMA)
row("llama-lm-tied", "LlamaForCausalLM", **{**LLAMA, "tie_word_embeddings": True})
row("llama-lm-multi-query", "LlamaForCausalLM", **{**LLAMA, "num_key_value_heads": 1})
row("llama-lm-biases", "LlamaForCausalLM", **LLAMA, attention_bias=True, mlp_bias=True)
row("llama-lm-wide-heads", "LlamaForCausalLM", **LLAMA, head_dim=6)
row("llama-lm-scaled-rope", "LlamaForCausalLM", **LLAMA, rope_parameters={
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16})  # fmt: skip
row("llama-sequence", "LlamaForSequenceClassification", **LLAMA, **LABELS)
row("llama-token", "LlamaForTokenClassification", **LLAMA, **LABELS)
row("llama-question", "LlamaForQuestionAnswering", **LLAMA)
row("llama-bare", "LlamaModel", **LLAMA)
row("mistral-question", "MistralForQuestionAnswering", **LLAMA)
row("mistral-lm", "MistralForCausalLM", **LLAMA, sliding_window=4)
row("qwen2-lm", "Qwen2ForCausalLM", **LLAMA)
row("qwen2-lm-tied", "Qwen2ForCausalLM", **{**LLAMA, "tie_word_embeddings": True})
row("qwen2-token", "Qwen2ForTokenClassification", **LLAMA, **LABELS)
row("qwen2-question", "Qwen2ForQuestionAnswering", **LLAMA)
row("qwen3-bare", "Qwen3Model", **LLAMA, head_dim=6)
row("qwen3-lm", "Qwen3ForCausalLM", **LLAMA, head_dim=6)
row("qwen3-lm-tied", "Qwen3ForCausalLM", **{**LLAMA, "tie_word_embeddings": True}, head_dim=6)
row("qwen3-sequence", "Qwen3ForSequenceClassification", **LLAMA, **LABELS, head_dim=6)

# GPT-2
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 11, "n_positions": 23, "vocab_size": VOCABULARY,
        "pad_token_id": 0}  # fmt: skip
row("gpt2-lm", "GPT2LMHeadModel", **GPT2)
row("gpt2-lm-untied", "GPT2LMHeadModel", **GPT2, tie_word_embeddings=False)
row("gpt2-lm-scaled-attention", "GPT2LMHeadModel", **GPT2, scale_attn_by_inverse_layer_idx=True)
row("gpt2-lm-relu", "GPT2LMHeadModel", **GPT2, tie_word_embeddings=False, activation_function="relu")
row("gpt2-sequence", "GPT2ForSequenceClassification", **GPT2, **LABELS)
row("gpt2-token", "GPT2ForTokenClassification", **GPT2, **LABELS)
row("gpt2-question", "GPT2ForQuestionAnswering", **GPT2)
row("gpt2-bare", "GPT2Model", **GPT2)

# GPT-NeoX: head width 8, of which a quarter, a half or all is rotary
NEOX = {**TEXT, "num_attention_heads": 2}
HALF, WHOLE = ({"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": share}} for share in (0.5, 1.0))
row("neox-lm", "GPTNeoXForCausalLM", **NEOX, **HALF)
row("neox-lm-tied", "GPTNeoXForCausalLM", **NEOX, tie_word_embeddings=True)
row("neox-lm-whole-rotary", "GPTNeoXForCausalLM", **NEOX, **WHOLE)
row("neox-lm-sequential", "GPTNeoXForCausalLM", **NEOX, use_parallel_residual=False)
row("neox-lm-no-bias", "GPTNeoXForCausalLM", **NEOX, **HALF, attention_bias=False)
row("neox-sequence", "GPTNeoXForSequenceClassification", **NEOX, **LABELS)
row("neox-token", "GPTNeoXForTokenClassification", **NEOX, **LABELS)
row("neox-question", "GPTNeoXForQuestionAnswering", **NEOX)
row("neox-bare", "GPTNeoXModel", **NEOX)

# OPT; the 350m variant has norms on the stream and a narrow table
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 11, "vocab_size": VOCABULARY,
       "pad_token_id": 0, "max_position_embeddings": 23}  # fmt: skip
OPT_350M = {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 7}
row("opt-lm", "OPTForCausalLM", **OPT)
row("opt-lm-untied", "OPTForCausalLM", **OPT, tie_word_embeddings=False)
row("opt-lm-no-bias", "OPTForCausalLM", **OPT, tie_word_embeddings=False, enable_bias=False)
row("opt-lm-plain-norms", "OPTForCausalLM", **OPT, tie_word_embeddings=False, layer_norm_elementwise_affine=False)
row("opt-lm-gelu", "OPTForCausalLM", **OPT, tie_word_embeddings=False, activation_function="gelu")
row("opt-lm-no-last-norm", "OPTForCausalLM", **OPT, tie_word_embeddings=False, _remove_final_layer_norm=True)
row("opt-lm-narrow", "OPTForCausalLM", **OPT, word_embed_proj_dim=7)
row("opt-sequence", "OPTForSequenceClassification", **OPT, **LABELS)
row("opt-question", "OPTForQuestionAnswering", **OPT)
row("opt-bare", "OPTModel", **OPT)
row("opt-350m-lm", "OPTForCausalLM", **OPT_350M)
row("opt-350m-lm-untied", "OPTForCausalLM", **OPT_350M, tie_word_embeddings=False)
row("opt-350m-lm-no-bias", "OPTForCausalLM", **OPT_350M, enable_bias=False)
row("opt-350m-sequence", "OPTForSequenceClassification", **OPT_350M, **LABELS)
row("opt-350m-question", "OPTForQuestionAnswering", **OPT_350M)
row("opt-350m-bare", "OPTModel", **OPT_350M)
row("opt-post-norm-lm", "OPTForCausalLM", **OPT, do_layer_norm_before=False)

# DistilBERT
DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 11, "vocab_size": VOCABULARY, "pad_token_id": 0,
              "max_position_embeddings": 23}  # fmt: skip
row("distilbert-lm", "DistilBertForMaskedLM", **DISTILBERT)
row("distilbert-lm-relu", "DistilBertForMaskedLM", **DISTILBERT, activation="relu")
row("distilbert-lm-untied", "DistilBertForMaskedLM", **DISTILBERT, tie_word_embeddings=False)
row("distilbert-sequence", "DistilBertForSequenceClassification", **DISTILBERT, **LABELS)
row("distilbert-token", "DistilBertForTokenClassification", **DISTILBERT, **LABELS, sinusoidal_pos_embds=True)
row("distilbert-question", "DistilBertForQuestionAnswering", **DISTILBERT)
row("distilbert-choice", "DistilBertForMultipleChoice", "choice", **DISTILBERT)
row("distilbert-bare", "DistilBertModel", **DISTILBERT)

# DeBERTa-v2 and v3
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 = {**RELATIVE, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 4,
              "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
NARROW = {**DEBERTA_V3, "embedding_size": 13, "position_biased_input": True, "type_vocab_size": 2}
row("deberta-v3-lm", "DebertaV2ForMaskedLM", **DEBERTA_V3)
row("deberta-v3-lm-new-head", "DebertaV2ForMaskedLM", **DEBERTA_V3, legacy=False)
row("deberta-v3-lm-untied", "DebertaV2ForMaskedLM", **DEBERTA_V3, tie_word_embeddings=False)
row("deberta-v3-sequence", "DebertaV2ForSequenceClassification", **DEBERTA_V3, **LABELS)
row("deberta-v3-token-relu", "DebertaV2ForTokenClassification", **DEBERTA_V3, **LABELS, hidden_act="relu")
row("deberta-v3-question", "DebertaV2ForQuestionAnswering", **DEBERTA_V3)
row("deberta-v3-bare", "DebertaV2Model", **DEBERTA_V3)
row("deberta-convolution-lm", "DebertaV2ForMaskedLM", **DEBERTA_V3, conv_kernel_size=3, conv_act="gelu")
row("deberta-convolution-token", "DebertaV2ForTokenClassification", **RELATIVE, **LABELS, conv_kernel_size=3)
row("deberta-narrow-lm", "DebertaV2ForMaskedLM", **NARROW)
row("deberta-narrow-lm-untied", "DebertaV2ForMaskedLM", **NARROW, tie_word_embeddings=False)
row("deberta-narrow-token", "DebertaV2ForTokenClassification", **NARROW, **LABELS)
row("deberta-absolute-token", "DebertaV2ForTokenClassification", **TEXT, **LABELS, type_vocab_size=3)
row("deberta-own-sequence", "DebertaV2ForSequenceClassification", **RELATIVE, **LABELS, pooler_hidden_act="tanh")
row("deberta-own-norm-token", "DebertaV2ForTokenClassification", **RELATIVE, **LABELS, norm_rel_ebd="layer_norm")
row("deberta-own-c2p-token", "DebertaV2ForTokenClassification", **{**RELATIVE, "pos_att_type": ["c2p"]}, **LABELS)
row("deberta-own-p2c-token", "DebertaV2ForTokenClassification", **{**RELATIVE, "pos_att_type": "p2c"}, **LABELS)
row("deberta-shared-c2p-token", "DebertaV2ForTokenClassification", **{**DEBERTA_V3, "pos_att_type": ["c2p"]}, **LABELS)

# T5 and mT5; T5 1.1 is told by its gated feed-forward and an output that is not scaled
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 11, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "pad_token_id": 0,
      "eos_token_id": 1, "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
      "relative_attention_max_distance": 12}  # fmt: skip
row("t5-lm", "T5ForConditionalGeneration", "seq2seq", **T5)
T5_1_1 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
row("t5-1.1-lm", "T5ForConditionalGeneration", "seq2seq", **T5_1_1)
row("t5-sequence", "T5ForSequenceClassification", **T5, **LABELS)
row("t5-token", "T5ForTokenClassification", **T5, **LABELS)
row("t5-question", "T5ForQuestionAnswering", "seq2seq", **T5)
row("t5-bare", "T5Model", "seq2seq", **T5)
row("t5-encoder", "T5EncoderModel", **T5)
row("mt5-lm", "MT5ForConditionalGeneration", "seq2seq", **T5)
row("mt5-sequence", "MT5ForSequenceClassification", **T5, **LABELS)

# Mixtral
MIXTRAL = {**LLAMA, "num_local_experts": 3}
row("mixtral-lm", "MixtralForCausalLM", **MIXTRAL)
row("mixtral-lm-tied", "MixtralForCausalLM", **{**MIXTRAL, "tie_word_embeddings": True})
row("mixtral-sequence", "MixtralForSequenceClassification", **MIXTRAL, **LABELS)
row("mixtral-token", "MixtralForTokenClassification", **MIXTRAL, **LABELS)
row("mixtral-question", "MixtralForQuestionAnswering", **MIXTRAL)
row("mixtral-bare", "MixtralModel", **MIXTRAL)

# Gemma and Gemma-2
GEMMA = {**LLAMA, "tie_word_embeddings": True, "head_dim": 6}
row("gemma-lm", "GemmaForCausalLM", **GEMMA)
row("gemma-sequence", "GemmaForSequenceClassification", **GEMMA, **LABELS)
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
row("gemma2-lm", "Gemma2ForCausalLM", **GEMMA, **CAPS, sliding_window=4)
row("gemma2-lm-untied-biases", "Gemma2ForCausalLM", **{**GEMMA, "tie_word_embeddings": False}, attention_bias=True)
row("gemma2-sequence", "Gemma2ForSequenceClassification", **GEMMA, **LABELS)
row("gemma2-token", "Gemma2ForTokenClassification", **GEMMA, **LABELS)
row("gemma2-bare", "Gemma2Model", **GEMMA)

# OLMo-2
row("olmo2-lm", "Olmo2ForCausalLM", **LLAMA)
row("olmo2-lm-tied-biases", "Olmo2ForCausalLM", **{**LLAMA, "tie_word_embeddings": True}, attention_bias=True)
row("olmo2-sequence", "Olmo2ForSequenceClassification", **LLAMA, **LABELS)
row("olmo2-bare", "Olmo2Model", **LLAMA)

# Encoders, images, sound, two towers
rows_encoders.add(row)

from architectures import rows_decoders  # noqa: E402, F401  adds its rows to the table
