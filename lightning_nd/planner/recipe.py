"""A recipe that `fit` runs, from a planned setting."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_nd.planner.hardware import GIB, Cluster
from lightning_nd.planner.layout import Work
from lightning_nd.planner.search import Candidate


def recipe(candidate: Candidate, model: str, work: Work, cluster: Cluster, lora: dict[str, Any] | None) -> str:
    """YAML with a comment that says what was predicted."""
    s, t = candidate.setting, candidate.time
    devices = min(cluster.gpus, cluster.gpus_per_node)
    content: dict[str, Any] = {
        "seed_everything": 42,
        "nd": {
            **s.dims.as_dict(),
            "activation_checkpointing": s.checkpointing,
            **({} if work.sequence_parallel else {"sequence_parallel": False}),
            **({"compile": True} if work.compiled else {}),
        },
        "trainer": {
            "accelerator": "gpu",
            "devices": devices,
            "num_nodes": -(-cluster.gpus // devices),
            "precision": work.precision,
            "max_epochs": 1,
            "accumulate_grad_batches": s.accumulation,
            "gradient_clip_val": 1.0,
        },
        "model": {"init_args": {"model": model, **({"lora": lora} if lora else {})}},
        "data": {
            "init_args": {
                "train": "train.jsonl",
                "max_length": work.length,
                "on_too_long": "drop",
                "packing": True,
                "micro_batch_size": s.micro_batch,
            }
        },
        "optimizer": {"init_args": {"lr": 1e-4 if lora else 1e-5}},
    }
    return (
        f"# Planned for {cluster.gpus} × {cluster.gpu.name}: {s}\n"
        f"# predicted: {t.tokens_per_gpu:,.0f} tokens/s/GPU (MFU {100 * t.mfu:.1f}%), {t.total:.2f} s a step of"
        f" {t.tokens:,.0f} tokens, {candidate.memory.live / GIB:.1f} GiB live,"
        f" {candidate.memory.reserved / GIB:.1f} reserved\n"
        f"#   lightning-nd fit --config THIS_FILE --data.train train.jsonl\n" + yaml.safe_dump(content, sort_keys=False)
    )
