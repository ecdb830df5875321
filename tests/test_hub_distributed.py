"""Sharded loading and drawing: every layout holds what plain transformers holds in one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_nd.checkpoint import load_pretrained, materialize
from lightning_nd.checkpoint.shards import gather_full
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize.blocks import block_list
from lightning_nd.parallelize.tensor import apply_tensor_parallel

Layout = tuple[int, int, int]
"""dp_replicate, dp_shard, tp"""

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"vocab_size": 257}),
    ("llama", {"tie_word_embeddings": True, "vocab_size": 257}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma3", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("mixtral", {}),
    ("qwen3_moe", {"num_experts": 5}),
    ("gpt_oss", {}),
]
LAYOUTS: list[Layout] = [(1, 1, 4), (1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2)]


def shard(model: PreTrainedModel, layout: Layout) -> None:
    """Tensor parallelism, then FSDP2 per block and for the rest, as `parallelize` does."""
    dp_replicate, dp_shard, tp = layout
    meshes = ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp).build_meshes("cpu")
    apply_tensor_parallel(model, meshes.tp)
    if dp_replicate * dp_shard > 1:
        for block in block_list(model) or []:
            fully_shard(block, mesh=meshes.fsdp)
        fully_shard(model, mesh=meshes.fsdp)


def differences(model: PreTrainedModel, wanted: dict[str, Tensor]) -> list[str]:
    """Names of the parameters, ties and buffers of a sharded model that are not what they should be."""
    found = {n: gather_full(p) for n, p in model.named_parameters(remove_duplicate=False)}
    found |= dict(model.named_buffers())
    wrong = sorted(set(found) ^ set(wanted))
    for name in set(found) & set(wanted):
        a, b = found[name], wanted[name]
        if a.dtype != b.dtype or a.is_meta or not torch.equal(a, b):
            wrong.append(name)
    return wrong


def contents(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def load_on_ranks(rank: int, world_size: int, folder: str, layouts: list[Layout]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    reference = AutoModelForCausalLM.from_pretrained(folder)
    wanted = contents(reference)
    tokens = torch.arange(2 * 16).reshape(2, 16) * 7 % 250 + 1
    with torch.no_grad():
        logits = reference(input_ids=tokens, use_cache=False).logits
    for layout in layouts:
        model = load_pretrained(folder)
        shard(model, layout)
        _poison()
        materialize(model, "cpu")
        wrong = differences(model, wanted)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        if tied != bool(reference.config.tie_word_embeddings):
            wrong.append(f"tied: {tied}")
        with torch.no_grad():
            out = model.eval()(input_ids=tokens, use_cache=False).logits
        out = out.full_tensor() if isinstance(out, DTensor) else out
        result[str(layout)] = (wrong, ((out - logits).abs().max() / logits.abs().max()).item())
    return result


def _poison() -> None:
    """Fill freed memory, so that what is left uninitialised shows."""
    blocks = [torch.full((n,), torch.nan) for n in (4, 8, 16, 64, 256, 4096) for _ in range(50)]
    del blocks


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_layout_holds_the_stored_weights(
    pool: Pool, tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    make_model(family, **overrides).save_pretrained(tmp_path)
    for result in pool.run(load_on_ranks, 4, str(tmp_path), LAYOUTS, timeout=120):
        for layout, (wrong, error) in result.items():
            assert wrong == [], layout
            assert error < 1e-5, layout
