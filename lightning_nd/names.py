"""Names as users know them, and help with those that were almost right."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

#: What other training tools call a setting of ours, where the names have few letters in common.
ELSEWHERE = {
    "tp": (
        "tensor_parallel",
        "tensor_parallel_size",
        "tensor_parallel_degree",
        "tensor_model_parallel_size",
        "tp_size",
    ),
    "cp": ("context_parallel", "context_parallel_size", "context_parallel_degree", "sequence_parallel_size", "cp_size"),
    "dp_shard": ("data_parallel_shard_degree", "dp_shard_size", "fsdp", "fsdp_size", "dp_size"),
    "dp_replicate": ("data_parallel_replicate_degree", "dp_replicate_size", "data_parallel_size", "ddp"),
    "activation_checkpointing": ("gradient_checkpointing", "recompute", "ac"),
    "max_length": ("max_seq_len", "max_seq_length", "seq_len", "sequence_len", "cutoff_len", "model_max_length"),
    "micro_batch_size": (
        "batch_size",
        "local_batch_size",
        "per_device_train_batch_size",
        "train_batch_size",
    ),
    "packing": ("sample_packing", "packed"),
    "train": ("dataset", "datasets", "train_file", "dataset_path", "data_files"),
    "accumulate_grad_batches": ("gradient_accumulation_steps", "grad_accum", "accumulation"),
    "gradient_clip_val": ("max_grad_norm", "max_norm", "clip_grad"),
    "max_epochs": ("num_train_epochs", "num_epochs", "epochs"),
    "max_steps": ("steps", "training_steps", "num_steps"),
    "precision": ("bf16", "fp16", "mixed_precision", "torch_dtype"),
    "default_root_dir": ("output_dir", "output_path"),
    "lr": ("learning_rate",),
}
_OURS = {other: ours for ours, others in ELSEWHERE.items() for other in others}


def warn_of_the_other_package() -> None:
    """Say what is wrong before a Trainer of ``pytorch_lightning`` calls the strategy an invalid name.

    The package has the same classes as ``lightning.pytorch`` under another name, and neither takes the other's.
    """
    if "pytorch_lightning" in sys.modules:
        warnings.warn(
            "NDStrategy belongs to `lightning.pytorch`, and `pytorch_lightning` is imported here: its Trainer refuses"
            " this strategy, and Trainers of `lightning.pytorch` refuse its modules. Write"
            " `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`.",
            stacklevel=3,
        )


def class_name(module: object) -> str:
    """The name of a module's class as its author wrote it: `fully_shard` puts a class of its own in front."""
    return type(module).__name__.removeprefix("FSDP")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Words that point from a wrong name to the valid one, or list what is valid."""
    valid = sorted(set(valid))
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.55)
    lower = {v.lower(): v for v in valid}
    if name.lower() in lower:
        close = [lower[name.lower()]]
    elif _OURS.get(name.lower()) in valid:
        close = [_OURS[name.lower()]]
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    shown = ", ".join(valid[:30]) + (", …" if len(valid) > 30 else "")
    return f"allowed here: {shown}" if valid else "nothing is allowed here"
