"""What a fit says when it starts, and when its memory is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from test_profiling import write_model_and_rows
from test_recipes import LLAMA_8B
from transformers import AutoConfig

from lightning_nd import NDStrategy, ParallelDims
from lightning_nd.callbacks import StartBanner
from lightning_nd.callbacks.banner import draw_layout
from lightning_nd.data import ChatDataModule
from lightning_nd.planner.hardware import GIB
from lightning_nd.planner.of_run import RunFacts, cheaper, describe_memory, facts_of_run, out_of_memory_words
from lightning_nd.recipes import CausalLM


def test_every_rank_is_in_the_picture_where_it_is() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    lines = draw_layout(dims, 8).splitlines()
    assert lines[0] == "Layout: dp_replicate=2 × dp_shard=2 × cp=2 × tp=2, 16 ranks on 2 nodes of 8"
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        line = next(text for text in lines if f"replica {at['dp_replicate']} shard {at['dp_shard']}" in text)
        cells = [cell.split() for cell in line.partition(f"shard {at['dp_shard']}")[2].split("   ") if cell.strip()]
        assert cells[at["cp"]][at["tp"]] == str(rank)
        assert cells[-1] == [str(rank // 8)]


@pytest.mark.parametrize(
    ("dims", "per_node", "words"),
    [
        (ParallelDims(), 1, "Layout: one process"),
        (ParallelDims(dp_shard=4), 4, "every rank has a part"),
        (ParallelDims(dp_replicate=2, dp_shard=4), 4, "replica 1   4 5 6 7   1"),
        (ParallelDims(dp_shard=32, tp=8), 8, "… 25 more"),
        (ParallelDims(cp=4, tp=8), 8, "shard 0   0–7    8–15   16–23   24–31   0–3"),
    ],
)
def test_pictures_are_short(dims: ParallelDims, per_node: int, words: str) -> None:
    picture = draw_layout(dims, per_node)
    assert words in picture
    assert len(picture.splitlines()) <= 11


def run_of(dims: ParallelDims, **data: Any) -> Any:
    strategy = NDStrategy(**dims.as_dict())
    strategy._dims = dims
    module = SimpleNamespace(config=AutoConfig.for_model(**LLAMA_8B, num_hidden_layers=8), lora=None)
    module._trainer = SimpleNamespace(
        strategy=strategy,
        datamodule=SimpleNamespace(**{"micro_batch_size": 4, "max_length": 8192} | data),
        accumulate_grad_batches=1,
        precision="bf16-mixed",
        num_devices=8,
    )
    return module


@pytest.fixture(scope="module")
def facts() -> RunFacts:
    found = facts_of_run(run_of(ParallelDims(dp_replicate=2, dp_shard=4)))
    assert found is not None
    return found


def test_changes_spare_memory_and_the_cheapest_come_first(facts: RunFacts) -> None:
    assert (facts.setting.micro_batch, facts.work.length, facts.work.rows) == (4, 8192, 32)
    changes = cheaper(facts, most=20)
    assert {change.words.partition(":")[0] for change in changes} >= {
        "nd.activation_checkpointing", "data.micro_batch_size", "nd.tp", "data.max_length"
    }  # fmt: skip
    assert all(change.live < facts.memory.live for change in changes)
    full = next(c for c in changes if c.words.endswith("full"))
    assert full.live < 0.6 * facts.memory.live
    assert 1.1 < full.slower < 1.5  # a third forward pass, or less
    assert len(cheaper(facts)) == 3
    only = cheaper(facts, most=1, total=1.1 * full.live + 2 * GIB)[0]
    assert only.live <= full.live  # what fits goes before what is faster
    parts = facts.memory.parts
    words = describe_memory(facts, 80 * GIB)
    assert f"activations {parts['activations'] / GIB:.1f} GiB" in words
    assert "of 80.0 GiB" in words


def test_words_are_of_the_batch_that_ran_out() -> None:
    module = run_of(ParallelDims(dp_shard=8))
    few, many = (out_of_memory_words(module, 1, length) for length in (2048, 8192))
    live = [float(lines[0].partition("holds ")[2].partition(" GiB")[0]) for lines in (few, many)]
    assert live[0] < live[1]
    assert len(many) == 5
    module.lora = SimpleNamespace(quantization="nf4")  # plans count no packed weights
    assert out_of_memory_words(module, 1, 8192) == []


class Full(CausalLM):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("own_group")
def test_a_fit_says_its_layout_once_and_explains_what_took_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model_and_rows(tmp_path)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    folder = str(tmp_path)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=NDStrategy(), callbacks=[StartBanner()], default_root_dir=folder, **quiet
    )
    data = ChatDataModule(str(tmp_path / "rows.jsonl"), max_length=32, micro_batch_size=2)
    with (
        caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"),
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        trainer.fit(Full(str(tmp_path / "model"), export=False), datamodule=data)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Layout")]
    assert len(said) == 1
    assert "Planned memory of a rank: " in said[0]
    assert "MiB live in the " in said[0]
    notes = "\n".join(error.value.__notes__)
    assert "step 2, forward; micro-batch of 2 rows" in notes
    assert "By the plan of this micro-batch a rank holds" in notes
    assert "Least costly, by the planner:" in notes
    assert "MiB less, " in notes
