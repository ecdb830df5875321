"""Training-step speed against a hand-written torch loop and transformers' own parallelism.

Same model, layout, optimizer and batches, in the same processes, in alternating rounds. A ratio is the median of the
rounds' ratios, each of neighbouring measurements, so that a machine that slows down meanwhile does not decide; the
range beside it says how far to trust it.

    python benchmarks/step_time.py                      # CPU, gloo, 4 processes
    python benchmarks/step_time.py --device cuda        # one process per GPU

(a) torch: `parallelize_module` + `fully_shard`, a plain loop; (b) transformers: `from_pretrained` with its
`DistributedConfig`, a plain loop; ours: `Trainer(strategy=NDStrategy(...))` on a LightningModule that returns
``self.model(**batch).loss``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LAYOUTS = {
    "fsdp": {"dp_shard": "all"},
    "tp": {"tp": "all"},
    "tp×fsdp": {"dp_shard": 2, "tp": "rest"},
}


def main() -> None:
    """Parse the options, start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=0, help="default: 4 on CPU, the visible GPUs on CUDA")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="measured steps a round, after one that is not")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="rows per data rank")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    import torch

    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 4)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options)
        results = {}
        for layout in options.layouts:
            output = Path(folder) / f"{layout}.json"
            torch.multiprocessing.spawn(rank_main, (ranks, layout, folder, str(output), options), nprocs=ranks)
            results[layout] = json.loads(output.read_text())
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"\n{device}, {ranks} ranks, torch {torch.__version__}; {options.rounds} alternating rounds")
    print(f"{'layout':10s} {'ours tok/s':>11s}   {'÷ torch':<23s} {'÷ transformers':<23s}")
    for layout, rates in results.items():
        cells = [describe(rates["ours"], rates[k]) if k in rates else "-" for k in ("torch", "transformers")]
        print(f"{layout:10s} {statistics.median(rates['ours']):11.0f}   {cells[0]:<23s} {cells[1]:<23s}")
    if options.json:
        options.json.write_text(json.dumps({"device": device, "ranks": ranks, "tokens_per_s": results}, indent=1))


def describe(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios and their range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a llama of the wanted size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def rank_main(rank: int, ranks: int, layout: str, folder: str, output: str, options: argparse.Namespace) -> None:
    """Measure one layout on one rank; rank 0 writes tokens/s by contender and round."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    warnings.filterwarnings("ignore")
    import logging

    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(output + ".store", ranks), rank=rank, world_size=ranks)
    degrees = resolve(layout, ranks)
    contenders: dict[str, Callable[[int], list[float]]] = {
        "torch": torch_loop(folder, degrees, options),
        "ours": lightning_loop(folder, degrees, options, rank, ranks),
    }
    try:
        contenders["transformers"] = transformers_loop(folder, degrees, options)
    except Exception as error:  # a version without DistributedConfig: say so and go on
        if rank == 0:
            print(f"transformers' DistributedConfig is left out: {type(error).__name__}: {error}")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        order = list(contenders.items())
        for name, run in order if number % 2 else order[::-1]:
            dist.barrier()
            times[name].append(statistics.median(run(options.steps)))
    if rank == 0:
        tokens = options.batch * options.sequence * degrees["dp_shard"]
        rates = {name: [tokens / seconds for seconds in values] for name, values in times.items()}
        Path(output).write_text(json.dumps(rates))
    dist.barrier()
    dist.destroy_process_group()


def resolve(layout: str, ranks: int) -> dict[str, int]:
    """Degrees of a layout for this number of ranks."""
    wanted = LAYOUTS[layout]
    shard = wanted.get("dp_shard", 1)
    shard = ranks if shard == "all" else min(int(shard), ranks)
    return {"dp_shard": shard, "tp": ranks // shard}


def batches(options: argparse.Namespace, data_rank: int) -> Iterator[dict[str, Any]]:
    """Endless batches of this data rank."""
    import torch

    generator = torch.Generator().manual_seed(data_rank)
    while True:
        ids = torch.randint(0, 8192, (options.batch, options.sequence), generator=generator)
        yield {"input_ids": ids.to(options.device), "labels": ids.to(options.device)}


def plain_loop(model: Any, options: argparse.Namespace, data_rank: int) -> Callable[[int], list[float]]:
    """Forward, backward, step; as one writes it by hand."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = batches(options, data_rank)
    model.train()

    def run(steps: int) -> list[float]:
        times = []
        for step in range(steps + 1):
            start = now(options.device)
            model(**next(source)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                times.append(now(options.device) - start)
        return times

    return run


def torch_loop(folder: str, degrees: dict[str, int], options: argparse.Namespace) -> Callable[[int], list[float]]:
    """`parallelize_module` and `fully_shard`, following torch's tensor-parallel tutorial for Llama."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh(options.device, (degrees["dp_shard"], degrees["tp"]), mesh_dim_names=("dp", "tp"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device)
    if degrees["tp"] > 1:
        split = {f"self_attn.{k}_proj": ColwiseParallel() for k in "qkv"}
        split |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        split |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], split)
        head = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], head)
    if degrees["dp_shard"] > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return plain_loop(model, options, mesh["dp"].get_local_rank())


def transformers_loop(
    folder: str, degrees: dict[str, int], options: argparse.Namespace
) -> Callable[[int], list[float]]:
    """Transformers' `DistributedConfig`."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=degrees["tp"], fsdp_size=degrees["dp_shard"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    return plain_loop(model, options, dist.get_rank() // degrees["tp"])


def lightning_loop(
    folder: str, degrees: dict[str, int], options: argparse.Namespace, rank: int, ranks: int
) -> Callable[[int], list[float]]:
    """A LightningModule under `NDStrategy`, one fit a round."""
    import lightning.pytorch as pl
    import torch
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader, IterableDataset
    from transformers import AutoModelForCausalLM

    from lightning_nd import NDStrategy

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0")

    class Rows(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return batches(argparse.Namespace(**{**vars(options), "device": "cpu"}), rank // degrees["tp"])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_size=None)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(now(options.device))

    module = Module()

    def run(steps: int) -> list[float]:
        clock = Clock()
        trainer = pl.Trainer(
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=ranks,
            strategy=NDStrategy(**degrees),
            plugins=[TorchElasticEnvironment()],
            max_steps=steps + 1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        return [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]

    return run


def now(device: str) -> float:
    """Seconds, once the device is idle."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
