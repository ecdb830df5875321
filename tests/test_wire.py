"""What a step sends is the least that its layout needs, counted from a run against formulas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, tiny_trainer
from tiny import tiny_model

from lightning_nd.gradients import average_partial_gradients
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import ParallelConfig, parallelize, partial_gradients
from lightning_nd.parallelize.sequence import find_tail

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import wire

wire.LAYERS = 2  # here and in the workers
COUNTED = [
    "fsdp, 2 micro-batches",
    "hsdp, LoRA",
    "tp, no sp, LoRA",
    "tp, checkpointing",
    "cp ring",
    "cp ulysses",
    "cp × tp",
]


def count(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    def trainer(strategy: Any, **options: Any) -> Any:
        return tiny_trainer(rank, world_size, strategy, **options)

    return {name: wire.measure(wire.LAYOUTS[name], trainer, before=1) for name in names}


def test_a_step_sends_the_least_that_its_layout_needs(pool: Pool) -> None:
    for name, (sent, calls) in pool.run(count, 4, COUNTED, timeout=120)[0].items():
        layout = wire.LAYOUTS[name]
        ours, needed = wire.on_the_wire(sent, layout), wire.on_the_wire(wire.least(layout), layout)
        control = ours.pop("control")
        assert ours == pytest.approx(needed, rel=0.01), name  # the same axes, too: none of size 1 sends anything
        assert control < 500, name
        if name == "tp, checkpointing":
            assert calls["tp", "allreduce"] == 2  # the embedding, and one bucket of all norms' gradients


# -- the head under sequence parallelism -------------------------------------------------------------------------------


def gradients(model: Any, ids: torch.Tensor, beside: bool) -> torch.Tensor:
    """Sum of the losses: of the labels, and where wanted of what a hook takes from the last norm."""
    taken: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _, __, out: taken.append(out))
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    loss = loss + taken[0].square().mean() if beside else loss
    loss.backward()
    return loss.detach()


def tail_on_ranks(rank: int, world_size: int, beside: bool, keep: int) -> list[float]:
    meshes = ParallelDims(tp=world_size).build_meshes("cpu")
    ids = torch.arange(2 * 13).view(2, 13) * 7 % 250
    whole, split = tiny_model(), tiny_model()
    split = parallelize(split, ParallelConfig(meshes=meshes))  # type: ignore[assignment]
    for model in (whole, split):
        if keep:
            model(input_ids=ids, logits_to_keep=keep).logits.logsumexp(-1).sum().backward()
        else:
            gradients(model, ids, beside)
    average_partial_gradients(partial_gradients(split), meshes.tp.get_group())
    expected = {name: p.grad for name, p in whole.named_parameters()}
    return [
        float((p.grad.full_tensor() - expected[name]).norm() / expected[name].norm())  # type: ignore[union-attr]
        for name, p in split.named_parameters()
    ]


@pytest.mark.parametrize(("beside", "keep"), [(False, 0), (True, 0), (False, 3)])
def test_gradients_around_the_head_are_those_of_one_process(pool: Pool, beside: bool, keep: int) -> None:
    for errors in pool.run(tail_on_ranks, 2, beside, keep):
        assert max(errors) < 2e-5


def test_the_tail_is_known_where_it_is_plain_to_see() -> None:
    assert find_tail(tiny_model()) == ("model.norm", "lm_head")
    small: dict[str, Any] = {"intermediate_size": 64}
    assert find_tail(tiny_model(model_type="gpt2", n_embd=32, n_layer=2, n_head=2, **small)) is None  # positions
    assert find_tail(tiny_model(model_type="bloom", n_layer=2, n_head=2)) is None  # a norm before the blocks
    assert find_tail(torch.nn.Linear(2, 2)) is None
