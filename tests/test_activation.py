"""What blocks keep for the backward pass: offload to host memory, and compiled blocks, change no number."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from tiny import tiny_model

from lightning_nd import NDStrategy
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import ParallelConfig, offload, parallelize
from lightning_nd.planner.tracker import LiveStorages

LAYERS = 4


def step(meshes: Any, **options: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients of one step, and the bytes that the device keeps between forward and backward."""
    model = parallelize(tiny_model(num_hidden_layers=LAYERS), ParallelConfig(meshes=meshes, **options))
    ids = torch.arange(2 * 64).view(2, 64)
    live = LiveStorages(None)
    with live:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    least, end = live.live, time.monotonic() + 0.2
    while time.monotonic() < end:  # a thread of gloo's lets go of its last buffers when it comes to it
        time.sleep(0.01)
        least = min(least, live.live)
    loss.backward()
    return [p.grad.full_tensor() for p in model.parameters()], least  # type: ignore[union-attr, operator]


def offloaded(rank: int, world_size: int, dims: dict[str, int]) -> dict[str, Any]:
    meshes, moved = ParallelDims(**dims).build_meshes("cpu"), []
    move = offload._Moved.__init__

    def note(self: Any, tensor: torch.Tensor) -> None:
        moved.append(tuple(tensor.shape))
        move(self, tensor)

    found: dict[str, Any] = {}
    with mock.patch.object(offload._Moved, "__init__", note):
        for mode in ("none", "full", 2) if "tp" in dims else ("none",):
            plain, more = step(meshes, activation_checkpointing=mode)
            gradients, less = step(meshes, activation_checkpointing=mode, offload_activations=True)
            found[str(mode)] = all(map(torch.equal, plain, gradients)), less / more
    weights = {tuple(p.shape) for p in tiny_model().parameters() if p.dim() == 2}
    found["weights"] = len([s for s in moved if s in weights or s[::-1] in weights])
    found["moved"] = len(moved)
    return found


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_offload_changes_no_gradient_and_keeps_little(pool: Pool, dims: dict[str, int]) -> None:
    for found in pool.run(offloaded, 2, dims):
        assert all(equal for equal, _ in (v for v in found.values() if isinstance(v, tuple)))
        assert found["moved"] > 2 * LAYERS
        assert found["weights"] == 0  # FSDP2 frees and gathers them
        assert found["none"][1] < 0.6
        assert found.get("2", (1, 0))[1] < 0.6
        assert found.get("full", (1, 0))[1] < 0.95  # of what is left: gathered head, logits' gradients


def test_selective_cannot_be_offloaded() -> None:
    with pytest.raises(ValueError, match="offload_activations=True does not go with"):
        NDStrategy(activation_checkpointing="selective", offload_activations=True)


def compiled(
    rank: int, world_size: int, cases: list[dict[str, Any]], axis: str = "dp_shard"
) -> list[tuple[bool, list[int]]]:
    from torch._dynamo.testing import CompileCounterWithBackend

    meshes = ParallelDims(**{axis: world_size}).build_meshes("cpu")
    ids, found = torch.arange(2 * 64).view(2, 64), []
    for options in cases:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def compile_with(module: Any, counter: Any = counter) -> None:
            module._compiled_call_impl = torch.compile(module._call_impl, backend=counter)

        losses, graphs = [], []
        for on in (False, True):
            with mock.patch.object(torch.nn.Module, "compile", compile_with):
                model = parallelize(tiny_model(num_hidden_layers=5), ParallelConfig(meshes, compile=on, **options))
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                graphs.append(counter.frame_count)
            losses.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])  # type: ignore[union-attr, operator]
        found.append((all(map(torch.equal, *losses)), graphs))
    torch._dynamo.reset()
    return found


def test_compiled_blocks_share_one_graph_and_change_no_number(pool: Pool) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": "full", "offload_activations": True},
        {"activation_checkpointing": "selective"},
    ]
    for equal, graphs in pool.run(compiled, 2, cases, timeout=120)[0]:
        assert equal
        assert graphs == [0, 0, 1, 1]


def test_compiled_blocks_share_their_graphs_under_tensor_parallelism(pool: Pool) -> None:
    cases: list[dict[str, Any]] = [{}, {"sequence_parallel": False}, {"activation_checkpointing": "full"}]
    found = pool.run(compiled, 2, cases, "tp", timeout=120)[0]
    assert [equal for equal, _ in found] == [True] * 3
    for _, (*before, first, second) in found:
        assert before == [0, 0]
        # of the first block, which splits the sequence, of the last, which gathers it, and of the three others
        assert 1 <= first <= 3
        assert second == first
