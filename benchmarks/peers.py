"""The contenders of `benchmarks/speed.py`: one training loop each, on the same model, layout, optimizer and batches.

A contender is a function of a `Job` that builds its model and gives back a function which runs a number of steps and
tells the wall and CPU seconds of each. What a contender cannot do it refuses with `NotOffered` before it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCABULARY = 8192
Seconds = tuple[float, float]
"""Wall and CPU seconds of a step."""
Run = Callable[[int], list[Seconds]]


class NotOffered(Exception):
    """A contender has no such layout."""


@dataclass(frozen=True)
class Job:
    """What is trained, and where.

    Args:
        folder: the model.
        degrees: size of each mesh axis.
        lora: train rank-16 adapters of all linear layers, instead of all weights.
        batch: rows of one data rank.
        sequence: tokens of a row, over all ranks of cp.
    """

    folder: str
    degrees: dict[str, int]
    lora: bool
    device: str
    batch: int
    sequence: int
    rank: int
    ranks: int

    @property
    def data_rank(self) -> int:
        """Ranks of tp and cp read the same rows."""
        return self.rank // (self.degrees["cp"] * self.degrees["tp"])

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks."""
        return self.batch * self.sequence * self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    def batches(self, device: str) -> Iterator[dict[str, Tensor]]:
        """Endless batches of this data rank."""
        generator = torch.Generator().manual_seed(self.data_rank)
        while True:
            ids = torch.randint(0, VOCABULARY, (self.batch, self.sequence), generator=generator).to(device)
            yield {"input_ids": ids, "labels": ids}

    def model(self, **options: Any) -> nn.Module:
        """The model in fp32, with adapters if wanted."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, **options)
        if not self.lora:
            return model
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        return get_peft_model(model, config)

    def only(self, *axes: str) -> None:
        """Refuse layouts with other axes than these."""
        others = [axis for axis, size in self.degrees.items() if size > 1 and axis not in axes]
        if others:
            raise NotOffered(f"no {', '.join(others)}")


def now(device: str) -> Seconds:
    """Wall and CPU seconds of this process, once the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def since(start: Seconds, device: str) -> Seconds:
    """Wall and CPU seconds since a moment."""
    wall, cpu = now(device)
    return wall - start[0], cpu - start[1]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def plain_loop(
    model: nn.Module, job: Job, prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
) -> Run:
    """Forward, backward, step; as one writes it by hand."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-4)
    source = job.batches(job.device)
    model.train()

    def run(steps: int) -> list[Seconds]:
        times = []
        for step in range(steps + 1):
            start = now(job.device)
            batch = next(source)
            model(**(prepare(batch) if prepare else batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                times.append(since(start, job.device))
        return times

    return run


# --- torch ---------------------------------------------------------------------------------------------------------


def split_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism after torch's tutorial for Llama: columns, rows, and a head whose logits are gathered."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    split: dict[str, Any] = {f"self_attn.{k}_proj": ColwiseParallel() for k in "qkv"}
    split |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    split |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, split)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def shard_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """`fully_shard` of each block, then of the rest."""
    from torch.distributed.fsdp import fully_shard

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def torch_loop(job: Job) -> Run:
    """`parallelize_module`, `fully_shard` and, for cp, keys gathered by hand."""
    sizes = job.degrees
    model = job.model().to(job.device)
    if sizes["cp"] > 1:
        job.only("cp")
        mesh = init_device_mesh(job.device, (sizes["cp"],), mesh_dim_names=("cp",))
        shard_by_hand(model, mesh)
        return plain_loop(model, job, gathered_attention(model, job, mesh))
    shape = (sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"])
    mesh = init_device_mesh(job.device, shape, mesh_dim_names=("replicate", "shard", "tp"))
    if sizes["tp"] > 1:
        split_by_hand(model, mesh["tp"])
    if sizes["dp_shard"] == 1 and sizes["dp_replicate"] > 1:
        job.only("dp_replicate")
        return plain_loop(nn.parallel.DistributedDataParallel(model), job)
    if sizes["dp_replicate"] > 1:
        shard_by_hand(model, mesh["replicate", "shard"])
    elif sizes["dp_shard"] > 1:
        shard_by_hand(model, mesh["shard"])
    return plain_loop(model, job)


def gathered_attention(
    model: nn.Module, job: Job, mesh: DeviceMesh
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Context parallelism as one writes it by hand: zigzag halves, keys and values gathered in every layer.

    Torch's own `context_parallel` has no kernel for the CPU (torch 2.13).
    """
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from transformers import AttentionInterface

    ranks, rank = mesh.size(), mesh.get_local_rank()
    half = job.sequence // (2 * ranks)
    order = torch.cat([torch.arange(half) + half * part for r in range(ranks) for part in (r, 2 * ranks - 1 - r)])
    order = order.to(job.device)
    mine = order[rank * 2 * half : (rank + 1) * 2 * half]
    mask = mine[:, None] >= order[None, :]
    group = mesh.get_group()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        key, value = (all_gather_tensor_autograd(x.contiguous(), 2, group) for x in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered_by_hand", attention)
    model.set_attn_implementation("gathered_by_hand")

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return {
            "input_ids": batch["input_ids"][:, mine],
            "position_ids": mine[None],
            "labels": batch["labels"][:, mine],
            "shift_labels": shifted[:, mine],
        }

    return prepare


# --- frameworks ----------------------------------------------------------------------------------------------------


def transformers_loop(job: Job) -> Run:
    """Transformers' `DistributedConfig` and a plain loop."""
    from transformers.distributed import DistributedConfig

    job.only("dp_shard", "tp")
    config = DistributedConfig(tp_size=job.degrees["tp"], fsdp_size=job.degrees["dp_shard"])
    if job.lora:
        raise NotOffered("adapters come after its sharding")
    return plain_loop(job.model(distributed_config=config), job)


def accelerate_loop(job: Job) -> Run:
    """Accelerate and a plain loop: DDP, or FSDP2 and `ParallelismConfig`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    sizes = job.degrees
    options = {}
    if sizes["dp_shard"] * sizes["tp"] * sizes["cp"] == 1:
        accelerator = Accelerator(cpu=job.device == "cpu", mixed_precision="no")
    elif job.device == "cpu":
        raise NotOffered("shards and splits on accelerators only")
    else:
        job.only("dp_replicate", "dp_shard", "tp")
        layout = ParallelismConfig(
            dp_replicate_size=sizes["dp_replicate"], dp_shard_size=sizes["dp_shard"], tp_size=sizes["tp"]
        )
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        plugin = sharding if sizes["dp_shard"] > 1 else None
        accelerator = Accelerator(parallelism_config=layout, fsdp_plugin=plugin, mixed_precision="no")
        if sizes["tp"] > 1:
            options = {"tp_plan": "auto", "device_mesh": layout.get_device_mesh()["tp"]}
    model = job.model(**options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained(model), lr=1e-4))
    source = job.batches(job.device)
    model.train()

    def run(steps: int) -> list[Seconds]:
        times = []
        for step in range(steps + 1):
            start = now(job.device)
            accelerator.backward(model(**next(source)).loss)
            optimizer.step()
            optimizer.zero_grad()
            if step:
                times.append(since(start, job.device))
        return times

    return run


def stock_lightning(job: Job) -> Run:
    """Lightning's own strategies: DDP, or `ModelParallelStrategy` with the same splits in `configure_model`."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    sizes = job.degrees
    if sizes["dp_shard"] * sizes["tp"] * sizes["cp"] == 1:
        return lightning_loop(job, DDPStrategy)
    job.only("dp_shard", "tp")

    def configure(module: Any) -> None:
        if sizes["tp"] > 1:
            split_by_hand(module.model, module.device_mesh["tensor_parallel"])
        if sizes["dp_shard"] > 1:
            shard_by_hand(module.model, module.device_mesh["data_parallel"])

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=sizes["dp_shard"], tensor_parallel_size=sizes["tp"])

    return lightning_loop(job, strategy, configure)


def ours(job: Job) -> Run:
    """A LightningModule that returns ``self.model(**batch).loss``, under `NDStrategy`."""
    from lightning_nd import NDStrategy

    return lightning_loop(job, lambda: NDStrategy(**job.degrees))


def lightning_loop(job: Job, strategy: Callable[[], Any], configure: Callable[[Any], None] | None = None) -> Run:
    """One `Trainer.fit` a round."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader, IterableDataset

    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), LOCAL_WORLD_SIZE=str(job.ranks))
    os.environ.update(WORLD_SIZE=str(job.ranks), GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    os.environ.update(TORCHELASTIC_RUN_ID="bench")

    class Rows(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return job.batches("cpu")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()
            self.configured = False

        def configure_model(self) -> None:
            if configure and not self.configured:
                self.configured = True
                configure(self)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(trained(self), lr=1e-4)

        def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
            return DataLoader(Rows(), batch_size=None)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.marks: list[Seconds] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(now(job.device))

    module = Module()

    def run(steps: int) -> list[Seconds]:
        clock = Clock()
        trainer = pl.Trainer(
            accelerator="gpu" if job.device == "cuda" else "cpu",
            devices=job.ranks,
            strategy=strategy(),
            plugins=[TorchElasticEnvironment()],
            max_steps=steps + 1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(clock.marks, clock.marks[1:], strict=False)]

    return run


def usable(name: str, job: Job) -> Run | str:
    """The loop of a contender, or why there is none."""
    try:
        return CONTENDERS[name](job)
    except NotOffered as error:
        return str(error)
    except ImportError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # another version of a framework: it is left out, and said
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    finally:
        dist.barrier()


CONTENDERS: dict[str, Callable[[Job], Run]] = {
    "ours": ours,
    "torch": torch_loop,
    "transformers": transformers_loop,
    "Lightning": stock_lightning,
    "Accelerate": accelerate_loop,
}
