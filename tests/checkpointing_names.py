"""The words of transformers for activation checkpointing: 5.23 has other ones than 5.22, and warns of the old."""

from transformers import PreTrainedModel, TrainingArguments

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW if NEW in TrainingArguments.__dataclass_fields__ else OLD


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let a model compute its activations again in the backward pass."""
    getattr(model, f"{CHECKPOINTING}_enable")()
