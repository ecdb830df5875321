"""Bytes on the wire: what a training step sends on each axis, beside the least that its layout needs.

Every collective and every point-to-point message of one optimizer step is counted as the step runs (gloo, 4 processes,
a small llama in fp32), and compared with closed forms. Nothing is timed; the figures are the same everywhere.

    python benchmarks/wire.py

A collective's bytes are those that one rank sends when it is done without waste: (n − 1)/n of the message for
all-gather, reduce-scatter and all-to-all over n ranks, twice that for all-reduce (Chan et al. 2007, "Collective
communication: theory, practice, and experience", section 4). Messages of up to 64 bytes (norms, token counts, flags)
are shown apart.

What is taken as needed, for L blocks, U = one micro-batch's hidden states on a cp rank, P parameters on a tp rank:

- FSDP (Zhao et al. 2023, section 3.2; Rajbhandari et al. 2020, section 7): blocks are gathered for forward and again
  for backward, embedding, head and last norm once; gradients are reduce-scattered once a step. HSDP adds one all-reduce
  of the shards' gradients.
- Tensor parallelism (Shoeybi et al. 2019, section 3): two all-reduces of U in each pass of a block, one after the
  embedding, one of the gradient before the head. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2)
  each is a reduce-scatter and an all-gather, of which the one before the head and one after the embedding lie in the
  other pass; the embedding's output is whole all the same, because the model's code works on it before the first
  block. Gradients of norms, and of LoRA factors that are whole, are summed in one bucket a step. The loss needs two
  numbers a token from every rank.
- Context parallelism: ring (Liu et al. 2023, section 3): keys and values visit every rank in both passes, gradients
  travel with them in fp32; direct: only rows that some query of the other rank sees; Ulysses (Jacobs et al. 2023,
  section 3): q, k, v and the output change hands in both passes.
- Full activation checkpointing repeats the forward pass of a block up to the last product whose input is needed.
- LoRA: frozen weights are gathered as others are, and only the factors' gradients are reduced; no gradient goes below
  the first block.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN, MLP, LAYERS, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 64, 128, 4, 8, 4, 8, 512
ROWS, LENGTH, RANK = 2, 64, 8
WIDTH = 4  # bytes of a number
CONTROL = 64  # bytes of the largest message that is no data
Bytes = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Layout:
    """What is run: degrees, and what else of the strategy matters for traffic."""

    shard: int = 1
    tp: int = 1
    cp: int = 1
    replicate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    lora: bool = False

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.shard * self.tp * self.cp * self.replicate

    def size(self, axis: str) -> int:
        """Ranks of an axis; parameters are sharded over cp, too."""
        sizes = {"dp_shard": self.shard * self.cp, "dp_replicate": self.replicate, "tp": self.tp, "cp": self.cp}
        return sizes.get(axis, self.ranks)


def _cp(method: str, **more: Any) -> Layout:
    return Layout(cp=4, options={"cp_method": method, "cp_layout": "zigzag"}, **more)


PLAIN_TP = {"sequence_parallel": False}
FULL = {"activation_checkpointing": "full"}
LAYOUTS = {
    "fsdp": Layout(shard=4),
    "fsdp, 2 micro-batches": Layout(shard=4, accumulate=2),
    "fsdp, not resharded": Layout(shard=4, options={"reshard_after_forward": False}),
    "fsdp, checkpointing": Layout(shard=4, options=FULL),
    "fsdp, LoRA": Layout(shard=4, lora=True),
    "hsdp": Layout(shard=2, replicate=2),
    "hsdp, LoRA": Layout(shard=2, replicate=2, lora=True),
    "tp": Layout(tp=4),
    "tp, no sequence parallel": Layout(tp=4, options=PLAIN_TP),
    "tp, checkpointing": Layout(tp=4, options=FULL),
    "tp, no sp, checkpointing": Layout(tp=4, options={**PLAIN_TP, **FULL}),
    "tp, LoRA": Layout(tp=4, lora=True),
    "tp, no sp, LoRA": Layout(tp=4, options=PLAIN_TP, lora=True),
    "tp × fsdp": Layout(shard=2, tp=2),
    "tp × fsdp, LoRA": Layout(shard=2, tp=2, lora=True),
    "cp ring": _cp("ring"),
    "cp direct": _cp("direct"),
    "cp ulysses": _cp("ulysses"),
    "cp direct, checkpointing": Layout(cp=4, options={"cp_method": "direct", "cp_layout": "zigzag", **FULL}),
    "cp direct, LoRA": _cp("direct", lora=True),
    "cp × tp": Layout(cp=2, tp=2, options={"cp_method": "direct", "cp_layout": "zigzag"}),
}


# -- the least ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Parameters of a tp rank by unit, and how many of them are trained."""

    block: float
    block_trained: float
    outside: dict[str, float]
    outside_trained: float
    summed: float


def weights(layout: Layout) -> Weights:
    """Numbers of parameters, counted by hand."""
    tp, h = layout.tp, HIDDEN
    q, kv = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    columns = [(h, q), (h, kv), (h, kv), (h, MLP), (h, MLP)]
    rows = [(q, h), (MLP, h)]
    base = sum(i * o for i, o in columns + rows) / tp
    pairs = sum(RANK * i + RANK * o / tp for i, o in columns) + sum(RANK * i / tp + RANK * o for i, o in rows)
    whole = sum(RANK * i for i, _ in columns) + sum(RANK * o for _, o in rows)
    outside = {"embedding": VOCABULARY * h / tp, "head": VOCABULARY * h / tp, "norm": h}
    if layout.lora:
        return Weights(base + 2 * h + pairs, pairs, outside, 0, LAYERS * whole if tp > 1 else 0)
    sequence = tp > 1 and layout.options.get("sequence_parallel", True)
    summed = (2 * LAYERS + 1) * h if sequence else 0
    return Weights(base + 2 * h, base + 2 * h, outside, sum(outside.values()), summed)


def least(layout: Layout) -> Bytes:
    """Message bytes of one optimizer step on one rank (mean over the ranks) by axis and kind; see the docstring."""
    found: Bytes = defaultdict(float)
    w, micros = weights(layout), layout.accumulate
    shard, tp, cp = layout.size("dp_shard"), layout.tp, layout.cp
    if shard > 1:
        passes = 2 if layout.options.get("reshard_after_forward", True) else 1
        found["dp_shard", "allgather"] = micros * WIDTH * (passes * LAYERS * w.block + sum(w.outside.values()))
        found["dp_shard", "reduce_scatter"] = WIDTH * (LAYERS * w.block_trained + w.outside_trained)
    if layout.replicate > 1:
        found["dp_replicate", "allreduce"] = WIDTH * (LAYERS * w.block_trained + w.outside_trained) / shard
    tokens = ROWS * LENGTH / cp
    again = layout.options.get("activation_checkpointing") == "full"
    if tp > 1:
        unit = micros * WIDTH * tokens * HIDDEN
        below = 0 if layout.lora else 1  # the gradient of what enters the first block
        if layout.options.get("sequence_parallel", True):
            found["tp", "allgather"] = unit * (LAYERS * (4 + 2 * again) + 1 + below)
            found["tp", "reduce_scatter"] = unit * (LAYERS * (4 + again) - 1 + below + 1)  # the last one: the head's
            found["tp", "allreduce"] = unit
        else:
            found["tp", "allreduce"] = unit * (LAYERS * (4 + again) + 1 + below)
        supervised = ROWS * (LENGTH - 1) if cp == 1 else tokens - ROWS / cp
        found["tp", "allgather"] += micros * 2 * WIDTH * tp * supervised
        found["tp", "allreduce"] += WIDTH * w.summed / shard
    if cp > 1:
        _context(layout, tokens, found, again)
    return {key: value for key, value in found.items() if value}


def _context(layout: Layout, tokens: float, found: Bytes, again: bool) -> None:
    """Keys, values and their gradients of one step."""
    cp, tp, micros, method = layout.cp, layout.tp, layout.accumulate, layout.options["cp_method"]
    passes = 2 + again
    if method == "ulysses":
        features = 2 * (HEADS + GROUPS) * HEAD_DIM / tp
        found["cp", "alltoall"] = micros * LAYERS * passes * WIDTH * tokens * features
        return
    rows = (cp - 1) * LENGTH / cp if method == "ring" else _seen_elsewhere(cp)
    block = WIDTH * ROWS * rows * 2 * GROUPS * HEAD_DIM / tp
    found["cp", "send"] = micros * LAYERS * (passes + 1) * block


def _seen_elsewhere(cp: int) -> float:
    """Rows of a row's keys that other ranks must be sent, mean over the ranks, from the causal mask itself."""
    chunk = LENGTH // (2 * cp)
    owned = [[*range(r * chunk, (r + 1) * chunk), *range((2 * cp - 1 - r) * chunk, (2 * cp - r) * chunk)]
             for r in range(cp)]  # fmt: skip
    sent = sum(
        any(key <= query for query in owned[other])
        for rank in range(cp) for other in range(cp) if other != rank for key in owned[rank]
    )  # fmt: skip
    return sent / cp


def on_the_wire(found: Bytes, layout: Layout) -> dict[str, float]:
    """Bytes that one rank sends, by axis."""
    total: dict[str, float] = defaultdict(float)
    for (axis, kind), message in found.items():
        n = layout.size(axis)
        factor = {"allreduce": 2 * (n - 1) / n, "send": 1.0, "recv": 0.0}.get(kind, (n - 1) / n)
        total[axis] += factor * message
    return dict(total)


# -- the count ---------------------------------------------------------------------------------------------------------


def measure(layout: Layout, trainer: Any, before: int = 4) -> tuple[Bytes, dict[tuple[str, str], float]]:
    """Bytes and calls of an optimizer step, mean over the ranks, by axis and kind; collective.

    Args:
        layout: what is run.
        trainer: makes a Trainer from a strategy and keyword arguments.
        before: steps that are not counted; in the first four batches, ranks compare their rows (small messages).
    """
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback, LightningModule
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_nd import NDStrategy
    from lightning_nd.planner.play import axes_of
    from lightning_nd.planner.tracker import Traffic

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
                num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=HEAD_DIM, use_cache=False,
                tie_word_embeddings=False,
            )  # fmt: skip
            self.model: Any = LlamaForCausalLM(config)
            if layout.lora:
                from peft import LoraConfig, get_peft_model

                adapters = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
                self.model = get_peft_model(self.model, adapters)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)

    class Count(Callback):
        def __init__(self) -> None:
            self.traffic = Traffic({}, CONTROL)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == before * layout.accumulate:
                self.traffic.axes = axes_of(trainer.strategy.meshes)
                self.traffic.__enter__()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == (before + 1) * layout.accumulate - 1:
                self.traffic.__exit__(None, None, None)

    count, data = Count(), layout.shard * layout.replicate
    ids = torch.arange((before + 1) * layout.accumulate * ROWS * data * LENGTH).view(-1, LENGTH) % VOCABULARY
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=ROWS)
    strategy = NDStrategy(
        dp_replicate=layout.replicate, dp_shard=layout.shard, cp=layout.cp, tp=layout.tp, **layout.options
    )
    fit = trainer(
        strategy,
        max_steps=before + 1,
        callbacks=[count],
        accumulate_grad_batches=layout.accumulate,
        gradient_clip_val=1.0,
    )
    fit.fit(Module(), loader)
    everyone: list[Any] = [None] * layout.ranks
    dist.all_gather_object(everyone, dict(count.traffic.found))
    sent: Bytes = defaultdict(float)
    calls: Bytes = defaultdict(float)
    for found in everyone:
        for (axis, kind), (times, message) in found.items():
            # The group of all ranks has several purposes; only cp sends from rank to rank, or all to all.
            axis = "cp" if kind in ("send", "recv", "alltoall") else axis
            sent[axis, kind] += message / layout.ranks
            calls[axis, kind] += times / layout.ranks
    return dict(sent), dict(calls)


def rank_main(rank: int, names: list[str], folder: str) -> None:
    """Run the layouts as one of four ranks; rank 0 writes what was counted."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RUN_ID="wire")
    warnings.filterwarnings("ignore")
    import logging

    import torch
    import torch.distributed as dist
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import Trainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)

    def trainer(strategy: Any, **options: Any) -> Trainer:
        return Trainer(
            accelerator="cpu", devices=4, strategy=strategy, plugins=[TorchElasticEnvironment()], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, **options,
        )  # fmt: skip

    results = {}
    for name in names:
        sent, calls = measure(LAYOUTS[name], trainer)
        results[name] = [[axis, kind, bytes_, calls[axis, kind]] for (axis, kind), bytes_ in sent.items()]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the options, run the layouts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--calls", action="store_true", help="every collective, too")
    options = parser.parse_args()

    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (options.layouts, folder), nprocs=4)
        results = json.loads(Path(folder, "found.json").read_text())
    print(f"{'layout':26s} {'axis':13s} {'KB sent':>9s} {'least':>9s} {'÷ least':>8s} {'calls':>6s}")
    for name, rows in results.items():
        layout = LAYOUTS[name]
        sent = {(axis, kind): size for axis, kind, size, _ in rows}
        calls: dict[str, float] = defaultdict(float)
        for axis, kind, _, times in rows:
            calls[axis] += times if kind != "recv" else 0
        ours, needed = on_the_wire(sent, layout), on_the_wire(least(layout), layout)
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "world", "control"):
            if axis in ours or axis in needed:
                have, need = ours.get(axis, 0.0), needed.get(axis, 0.0)
                ratio = f"{have / need:8.4f}" if need else " " * 8
                print(f"{name:26s} {axis:13s} {have / 1e3:9.2f} {need / 1e3:9.2f} {ratio} {calls[axis]:6.0f}")
        if options.calls:
            for axis, kind, size, times in sorted(rows):
                need = least(layout).get((axis, kind), 0.0)
                print(f"{'':28s}{axis} {kind}: {size:.0f} bytes in {times:.0f} calls, least {need:.0f}")


if __name__ == "__main__":
    main()
