"""One simulated rank against the same rank on real tensors: what torch's CPU allocator gives out at the peak.

    python benchmarks/planner_allocator.py                 # 20 layouts × 4 families, tiny models: minutes on one core
    python benchmarks/planner_allocator.py --cases 7       # a sample, drawn by a fixed seed

To be run with every new version of torch and transformers before `lightning_nd/planner/patches.py` admits it; the tests
run a few of the cases. Exits with 1 if one differs by more than 0.1%.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.allocator import allocated_peak
from lightning_nd.planner.child import in_children
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.simulate import play_rank

LIMIT = 1e-3
_TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _TINY,
    "gemma3_text": _TINY
    | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    "phi3": {k: v for k, v in _TINY.items() if k != "head_dim"},
    "qwen3_moe": _TINY | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
FP32, BF16 = Work(128, precision="32-true"), Work(128)


def _at(shard: int, tp: int = 1, cp: int = 1, replicate: int = 1, **more: Any) -> Setting:
    return Setting(ParallelDims(replicate, shard, cp, tp), **more)


#: A setting, what is trained, and low-rank pairs or none.
LAYOUTS: list[tuple[Setting, Work, dict[str, Any] | None]] = [
    (_at(4), FP32, None),
    (_at(4), BF16, None),
    (_at(4, checkpointing="full"), BF16, None),
    (_at(4, checkpointing="selective"), BF16, None),
    (_at(8, checkpointing=2, micro_batch=2), FP32, None),
    (_at(4, accumulation=3), BF16, None),
    (_at(2, replicate=2), BF16, None),
    (_at(2, reshard=False), FP32, None),
    (_at(4, checkpointing="full"), Work(128, precision="bf16-true"), None),
    (_at(1, tp=2), FP32, None),
    (_at(1, tp=2, checkpointing="full"), BF16, None),
    (_at(2, tp=2, micro_batch=2), BF16, None),
    (_at(2, tp=4, replicate=2, accumulation=2), BF16, None),
    (_at(2, tp=2), Work(128, sequence_parallel=False), None),
    (_at(1, cp=2), FP32, None),
    (_at(2, cp=4, checkpointing="full"), BF16, None),
    (_at(2, cp=2, tp=2, checkpointing="selective"), BF16, None),
    (_at(4), BF16, {"r": 4}),
    (_at(2, tp=2, checkpointing="full"), BF16, {"r": 4}),
    (_at(2, cp=2, checkpointing="selective"), BF16, {"r": 8}),
]
#: Where pairs go if not beside every layer: packed experts take none.
TARGETS = {"qwen3_moe": {"target_modules": ["q_proj", "v_proj"]}}
Case = tuple[str, Setting, Work, dict[str, Any] | None]


def cases(count: int | None = None) -> list[Case]:
    """All of them, or so many drawn by a fixed seed."""
    every = [
        (family, setting, work, lora and lora | TARGETS.get(family, {}))
        for setting, work, lora in LAYOUTS
        for family in FAMILIES
    ]
    return every if count is None else random.Random(0).sample(every, count)


def compare(case: Case) -> tuple[float, int]:
    """Peak bytes on fake tensors, and of the allocator."""
    family, setting, work, lora = case
    given = (AutoConfig.for_model(family, **FAMILIES[family]), setting, work, lora)
    fake, real = in_children([(play_rank, given), (allocated_peak, given)])
    return fake.peak, real


def main() -> int:
    """Print every case and what differs most; 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="leave out those before this one")
    given = parser.parse_args()
    worst: dict[str, float] = {}
    for case in cases(given.cases)[given.first :]:
        fake, real = compare(case)
        error = fake / real - 1
        family, setting, work, lora = case
        worst[family] = max(worst.get(family, 0.0), abs(error))
        more = ("" if lora is None else ", LoRA") + ("" if work.sequence_parallel else ", no sequence parallelism")
        print(f"{100 * error:+8.4f}%  {real:11,} bytes  {family}: {setting}, {work.precision}{more}", flush=True)
    for family, error in worst.items():
        print(f"{family}: {100 * error:.4f}% at most")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    return int(max(worst.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
