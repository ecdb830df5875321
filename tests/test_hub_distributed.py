"""Sharded models are loaded, drawn and written as plain transformers does it in one process, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_config, make_model
from memory import Peak, needs_linux
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lightning_nd.checkpoint import from_config, load_pretrained, materialize, save_pretrained
from lightning_nd.checkpoint.shards import gather_full, local_box
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize.data import ShardingOptions, apply_fully_shard
from lightning_nd.parallelize.tensor import apply_tensor_parallel

Layout = tuple[int, int, int]
"""dp_replicate, dp_shard, tp"""

ALL: list[Layout] = [(1, 1, 4), (1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2)]
MIXED: list[Layout] = [(1, 2, 2)]
CASES: list[tuple[str, dict[str, Any], list[Layout]]] = [
    ("llama", {"tie_word_embeddings": True, "vocab_size": 257}, ALL),
    ("llama", {"vocab_size": 257}, MIXED),
    ("qwen2", {}, MIXED),
    ("qwen3", {}, MIXED),
    ("gemma3", {}, MIXED),
    ("phi3", {}, MIXED),
    ("gpt_neox", {}, MIXED),
    ("mixtral", {}, [(1, 4, 1)]),
    ("qwen3_moe", {"num_experts": 3}, ALL),  # which FSDP2 would pad: a later dim is split
    ("gpt_oss", {}, MIXED),
]


def shard(model: PreTrainedModel, layout: Layout) -> None:
    """Tensor parallelism, then FSDP2, as `parallelize` does."""
    dp_replicate, dp_shard, tp = layout
    meshes = ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp).build_meshes("cpu")
    apply_tensor_parallel(model, meshes.tp)
    if dp_replicate * dp_shard > 1:
        apply_fully_shard(model, meshes.fsdp, ShardingOptions())


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


def _poison() -> None:
    """Fill freed memory, so that what is left uninitialised shows."""
    blocks = [torch.full((n,), torch.nan) for n in (4, 8, 16, 64, 256, 4096) for _ in range(50)]
    del blocks


def load_and_save(
    rank: int, world_size: int, folder: str, layouts: list[Layout]
) -> dict[Layout, tuple[list[str], float]]:
    """For each layout: what differs from a plain load, and the relative error of the logits; the first is saved."""
    result = {}
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
        if layout == layouts[0]:
            save_pretrained(model, folder + "-saved", max_shard_size="100KB")
        with torch.no_grad():
            out = model.eval()(input_ids=tokens, use_cache=False).logits
        out = out.full_tensor() if isinstance(out, DTensor) else out
        result[layout] = (wrong, ((out - logits).abs().max() / logits.abs().max()).item())
    return result


@pytest.mark.parametrize(("family", "overrides", "layouts"), CASES, ids=[f"{f}-{'-'.join(o)}" for f, o, _ in CASES])
def test_layouts_hold_and_write_the_stored_weights(
    pool: Pool, tmp_path: Path, family: str, overrides: dict[str, Any], layouts: list[Layout]
) -> None:
    folder = tmp_path / "model"
    make_model(family, **overrides).save_pretrained(folder)
    for result in pool.run(load_and_save, 4, str(folder), layouts, timeout=240):
        for layout, (wrong, error) in result.items():
            assert wrong == [], layout
            assert error < 1e-5, layout
    before, after = stored(folder), stored(tmp_path / "model-saved")
    assert before.keys() == after.keys()
    assert [k for k in before if not torch.equal(before[k], after[k])] == []
    assert len(list((tmp_path / "model-saved").glob("*.safetensors"))) > 1


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def draw_on_ranks(rank: int, world_size: int, layouts: list[Layout]) -> list[dict[str, Tensor]]:
    drawn = []
    for layout in layouts:
        for family in ("qwen3_moe", "gemma3"):
            model = from_config(make_config(family, vocab_size=257), seed=5)
            torch.manual_seed(rank)
            shard(model, layout)
            materialize(model, "cpu")
            drawn.append({n: gather_full(p).numpy() for n, p in model.named_parameters()})
    return drawn


def test_random_weights_do_not_depend_on_the_layout(pool: Pool) -> None:
    wanted = []
    for family in ("qwen3_moe", "gemma3"):
        model = from_config(make_config(family, vocab_size=257), seed=5)
        materialize(model, "cpu")
        wanted.append({n: p.detach().numpy() for n, p in model.named_parameters()})
    layouts = [(1, 2, 2), (2, 2, 1)]
    for drawn in pool.run(draw_on_ranks, 4, layouts, timeout=240):
        for found, want in zip(drawn, wanted * len(layouts), strict=True):
            assert found.keys() == want.keys()
            assert [n for n in want if not (found[n] == want[n]).all()] == []


def save_into_a_file(rank: int, world_size: int, folder: str) -> list[str]:
    """Both kinds of failure of rank 0: before anything is gathered, and in the middle of writing."""
    model = from_config(make_config("llama"))
    shard(model, (1, 2, 1))
    materialize(model, "cpu")
    messages = []
    for target in (folder, folder + "/nothing/new"):
        if target != folder and rank == 0:
            os.environ["TMPDIR"] = "/nowhere"
        try:
            save_pretrained(model, target)
        except (FileExistsError, RuntimeError, OSError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_rank_zero_cannot_write_is_raised_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    first, second = pool.run(save_into_a_file, 2, str(file), timeout=120)
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert "is a file" in second[0]
    assert "rank 0 failed with NotADirectoryError" in second[1]


def peak_on_ranks(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """MiB above the start at the highest, for loading and for drawing."""
    peaks = {}
    for kind in ("load", "draw"):
        loaded = load_pretrained(folder)
        model = loaded if kind == "load" else from_config(loaded.config)
        shard(model, (1, 4, 1))
        with Peak() as peak:
            materialize(model, "cpu")
        peaks[kind] = peak.most / 2**20
        assert model.num_parameters() > 0
    return peaks


@needs_linux
def test_a_rank_needs_its_share_and_one_tensor(pool: Pool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    largest = max(p.numel() * 4 for p in model.parameters()) / 2**20
    del model
    limit = size / 4 + largest + 16
    assert limit < size / 2  # or a full load would pass
    for peaks in pool.run(peak_on_ranks, 4, str(tmp_path), timeout=240):
        assert max(peaks.values()) < limit, (peaks, limit)
        assert peaks["load"] > size / 8  # or nothing was measured


def pack_and_shard(rank: int, world_size: int, rows: int) -> tuple[bool, bool]:
    """A packed weight split by tp and FSDP2 on the same dim: is it put back, and is the box where the values are?"""
    meshes = ParallelDims(dp_shard=2, tp=2).build_meshes("cpu")
    layer = nn.Linear(3, rows, bias=False)
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    packed = distribute_tensor(whole, meshes.tp, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    layer.weight = nn.Parameter(packed)
    fully_shard(layer, mesh=meshes.fsdp)
    (held,) = local_box(layer.weight)[:1]
    expected = torch.cat([whole[a:b] for a, b in held])
    return torch.equal(gather_full(layer.weight), whole), torch.equal(layer.weight.to_local(), expected)


@pytest.mark.parametrize("rows", [8, 12, 20])
def test_packed_weights_that_tp_and_fsdp_split_on_one_dim(pool: Pool, rows: int) -> None:
    assert pool.run(pack_and_shard, 4, rows) == [(True, True)] * 4
