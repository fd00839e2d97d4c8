"""LoRA adapters: read them, see a base model through one, write one, extract one from a fine-tuned model."""

from isomerge.adapters.adapter import Adapter, Target, is_adapter, open_adapter
from isomerge.adapters.applied import apply_adapter

__all__ = ["Adapter", "Target", "apply_adapter", "is_adapter", "open_adapter"]
