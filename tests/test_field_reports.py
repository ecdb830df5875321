"""Faults that users of other tools have reported, one test each where no other file has it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import make_model
from pool import Pool, tiny_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy
from lightning_nd.devices import claim
from lightning_nd.parallelize import roots

Batch = dict[str, Tensor]


def answers(lengths: list[int], width: int = 20) -> Batch:
    """One row a length: so many supervised tokens at its end, the rest context."""
    ids = torch.randint(0, 256, (len(lengths), width), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, : width - length] = -100
    return {"input_ids": ids, "labels": labels}


def one_process(batch: Batch) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and weights after one SGD step on all rows at once, in plain transformers and torch."""
    model = make_model("llama").train()
    logits = model(input_ids=batch["input_ids"]).logits
    targets = batch["labels"][:, 1:].reshape(-1)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item(), norm.item(), {name: p.detach() for name, p in model.named_parameters()}


class OneStep(pl.LightningModule):
    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.model = make_model("llama")
        self.batches = batches
        self.norm = 0.0

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(self.trainer.strategy.grad_norm())  # type: ignore[attr-defined]

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(
    rank: int,
    world_size: int,
    lengths: list[int],
    micro: int,
    accumulate: int,
    data_ranks: int,
    degrees: dict[str, int],
) -> tuple[float, float, dict[str, Tensor]]:
    batch = answers(lengths)
    mine = rank // (world_size // data_ranks)
    rows = [batch_rows(batch, slice(i, i + micro)) for i in range(mine * micro, len(lengths), micro * data_ranks)]
    module = OneStep(rows)
    strategy = NDStrategy(**degrees)  # type: ignore[arg-type]
    trainer = tiny_trainer(
        rank,
        world_size,
        strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    weights = {name: p.full_tensor() for name, p in module.model.named_parameters()}  # type: ignore[operator]
    return float(strategy.step_loss), module.norm, weights  # type: ignore[arg-type]


def batch_rows(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def assert_same(got: tuple[float, float, dict[str, Tensor]], want: tuple[float, float, dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got[1] == pytest.approx(want[1], rel=1e-5)
    for name, expected in want[2].items():
        assert (got[2][name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(("micro", "accumulate"), [(16, 1), (4, 4), (1, 16)])
def test_b01_micro_batch_size_does_not_change_the_step(pool: Pool, micro: int, accumulate: int) -> None:
    lengths = list(range(1, 17))
    got = pool.run(step, 1, lengths, micro, accumulate, 1, {})[0]
    assert_same(got, one_process(answers(lengths)))


@pytest.mark.parametrize(
    ("world", "degrees", "data_ranks"),
    [(2, {"dp_shard": 2}, 2), (2, {"dp_replicate": 2, "dp_shard": 1}, 2), (4, {"dp_shard": 2, "tp": 2}, 2)],
)
def test_b10_ranks_weigh_by_their_tokens(pool: Pool, world: int, degrees: dict[str, int], data_ranks: int) -> None:
    lengths = [1, 15]
    for got in pool.run(step, world, lengths, 1, 1, data_ranks, degrees):
        assert_same(got, one_process(answers(lengths)))


class Ones(pl.LightningModule):
    """Weights of one, whose gradient is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).sum()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(200, 1, 64), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, weight_decay=0.0)


def small_steps(rank: int, world_size: int, precision: str) -> float:
    module = Ones()
    trainer = tiny_trainer(
        rank, world_size, NDStrategy(), max_epochs=1, precision=precision, use_distributed_sampler=False
    )
    trainer.fit(module)
    return float(1.0 - module.layer.weight.full_tensor().mean())  # type: ignore[operator]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_i01_steps_below_the_resolution_of_bf16_are_not_lost(pool: Pool, precision: str) -> None:
    assert pool.run(small_steps, 2, precision)[0] == pytest.approx(200 * 1e-5, rel=5e-3)  # fp32 rounds 200 times


@pytest.mark.parametrize(("local_rank", "visible", "expected"), [(0, 2, 0), (1, 2, 1), (0, 1, 0)])
def test_e09_local_ranks_index_the_visible_devices(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert _strategy_on(local_rank, visible).root_device == torch.device("cuda", expected)


def test_e09_a_rank_without_a_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # As many as were asked for (Lightning under torchrun with one visible device), and as many as there are.
    for listed in (2, 1):
        with pytest.raises(RuntimeError, match=r"local rank 1 has no device: 1 are visible.*CUDA_VISIBLE_DEVICES=5"):
            _ = _strategy_on(1, listed).root_device


@pytest.fixture
def one_gpu_a_task(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two tasks a node, each of which sees a GPU of its own."""
    for name, value in {"NTASKS": 4, "NNODES": 2, "NTASKS_PER_NODE": 2, "PROCID": 3, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


@pytest.mark.parametrize("local_rank", [0, 1])
def test_e09_with_one_gpu_for_each_slurm_task_all_use_number_0(
    one_gpu_a_task: pytest.MonkeyPatch, local_rank: int
) -> None:
    strategy = _strategy_on(local_rank, 1)
    assert strategy.num_processes == 2
    assert strategy.root_device == torch.device("cuda", 0)
    one_gpu_a_task.delenv("SLURM_PROCID")  # a shell in the allocation, not a task
    assert _strategy_on(0, 1).num_processes == 1


def test_e09_two_ranks_on_one_gpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: type("P", (), {"uuid": uuids[d.index or 0]}))
    store = torch.distributed.HashStore()
    claim(store, torch.device("cuda", 0), 0)
    claim(store, torch.device("cuda", 1), 1)
    claim(store, torch.device("cuda", 0), 0)  # a second fit
    claim(store, torch.device("cpu"), 2)
    with pytest.raises(RuntimeError, match=r"ranks 1 and 2 on .* share one device \(cuda:1, GPU-b"):
        claim(store, torch.device("cuda", 1), 2)


def _strategy_on(local_rank: int, visible: int) -> NDStrategy:
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Fixed(LightningEnvironment):
        def local_rank(self) -> int:
            return local_rank

    strategy = NDStrategy()
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(visible)]
    strategy.cluster_environment = Fixed()
    return strategy


def test_i01_a_rate_that_bf16_weights_round_away_is_named() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    words = roots.small_steps([torch.optim.AdamW([weight], lr=1e-5)])
    assert words is not None
    assert "round steps below 2.0e-03 away, and the learning rate is 1.0e-05" in words
    assert roots.small_steps([torch.optim.AdamW([weight], lr=1e-2)]) is None
    assert roots.small_steps([torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))], lr=1e-5)]) is None


# Reports whose check is a case of a wider test, which does not carry their name.
ELSEWHERE = {
    "B02": "test_parity_training.py::test_short_last_window",
    "B04": "test_attention_parity.py::test_products_with_other_axes",
    "B05": "test_parity.py::test_family",
    "B07": "test_parity_training.py::test_clipping_by_norm",
    "B11": "test_lightning_integration.py::test_nonfinite_gradient_on_one_rank_stops_all",
    "D01": "test_mesh.py::test_what_does_not_fit_is_said_with_every_number",
    "D02": "test_parity.py::test_fewer_kv_heads_than_tp",
    "D04": "test_attention_parity.py::test_odd_short_and_silent_rows",
    "D05": "test_traps.py::test_each_rank_holds_its_share_of_the_parameters",
    "D07": "test_parity.py::test_tied_embeddings",
    "D10": "test_hub_distributed.py::test_layouts_hold_and_write_the_stored_weights",
    "D16": "test_attention_parity.py::test_products_with_other_axes",
    "D17": "test_traps.py::test_fp32_norms_in_a_bf16_model_train_and_stay_fp32",
    "E02": "test_faults.py::test_a_timeout_names_the_rank_that_is_behind",
    "E03": "test_launch.py::test_refusals_say_what_was_given_and_what_to_change",
    "E04": "test_launch.py::test_refusals_say_what_was_given_and_what_to_change",
    "E08": "test_launch.py::test_the_trainer_refuses_what_cannot_start",
    "E10": "test_faults.py::test_out_of_memory_says_where_and_what_to_change",
    "F03": "test_cli_config.py::test_a_list_can_be_extended_or_replaced",
    "F04": "test_cli_config.py::test_input_paths_start_at_the_configuration_file",
    "F06": "test_cli_config.py::test_print_save_load_print_is_a_fixed_point",
    "G04": "test_lightning_integration.py::test_mean_over_ranks_with_unequal_batch_counts",
    "H01": "test_attention_batch.py::test_shard_and_gather",
    "H08": "test_attention_training.py::test_predict_returns_each_row_once_in_whole",
    "I04": "test_parity.py::test_other_precisions_are_refused",
}


@pytest.mark.parametrize("report", ELSEWHERE)
def test_the_wider_test_is_there(report: str) -> None:
    file, name = ELSEWHERE[report].split("::")
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
