"""The rows of decoders; see rows.py."""

from __future__ import annotations

from architectures.rows import LABELS, LLAMA, TEXT, row

TIED = {**LLAMA, "tie_word_embeddings": True}
WIDE = {**LLAMA, "num_attention_heads": 4, "hidden_size": 32}  # heads of 8, so that a part of them can be rotary
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}

# Phi-3 and Phi-4
row("phi3-lm", "Phi3ForCausalLM", **WIDE, **ENDS)
row("phi3-lm-part-rotary", "Phi3ForCausalLM", **WIDE, **ENDS, **HALF)
row("phi3-lm-tied", "Phi3ForCausalLM", **{**WIDE, "tie_word_embeddings": True}, **ENDS, **HALF)
row("phi3-sequence", "Phi3ForSequenceClassification", **WIDE, **ENDS, **LABELS, **HALF)
row("phi3-token", "Phi3ForTokenClassification", **WIDE, **ENDS, **LABELS)
row("phi3-bare", "Phi3Model", **WIDE, **ENDS)
