"""Says when a run is far from what the planner expects of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_nd.callbacks.clock import Clock

if TYPE_CHECKING:
    from lightning_nd.planner.hardware import GPU

_FAR = 0.2
_GIB = 2**30


class PlanAdvice(Callback):
    """One line in the log, once, if time or memory of the first steps are more than a fifth off the plan.

    On GPUs that the planner's table has, or for the one that is named. Elsewhere, and for modules and data that the
    planner does not know (it knows `CausalLM` and `ChatDataModule`), it does nothing.

    Args:
        gpu: what the devices are called in the planner's table, or in ``gpu_file``; on CUDA the driver is asked.
        gpu_file: as of ``lightning-nd plan --gpu-file``; `lightning-nd calibrate` writes one.
        after: optimizer steps that are not looked at.
        steps: optimizer steps that are.
    """

    def __init__(self, gpu: str | None = None, gpu_file: str | None = None, after: int = 10, steps: int = 20) -> None:
        self.gpu, self.gpu_file = gpu, gpu_file
        self.after, self.steps = after, steps
        self._device: GPU | None = None
        self._clock = Clock()
        self._seen = 0
        self._lengths: list[int] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = self._find(trainer, pl_module) if trainer.is_global_zero else None
        self._seen, self._lengths = 0, []

    def _find(self, trainer: Trainer, module: LightningModule) -> GPU | None:
        from lightning_nd.strategy import NDStrategy

        data: Any = getattr(trainer, "datamodule", None)
        known = hasattr(module, "config") and hasattr(module, "lora") and hasattr(data, "micro_batch_size")
        known = known and getattr(module.lora, "quantization", None) is None  # plans count no packed weights
        on_gpu = module.device.type == "cuda"
        if not known or not isinstance(trainer.strategy, NDStrategy) or not (on_gpu or self.gpu):
            return None
        if self.gpu is not None:
            from lightning_nd.planner.hardware import find_gpu

            return find_gpu(self.gpu, None if self.gpu_file is None else Path(self.gpu_file).expanduser())
        from lightning_nd.planner.calibrate import known_as

        memory = torch.cuda.get_device_properties(module.device).total_memory / _GIB
        return known_as(torch.cuda.get_device_name(module.device), memory)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._device is None:
            return
        if self._seen >= self.after:
            self._lengths.append(int(batch["input_ids"].shape[-1]))
        if trainer.fit_loop._should_accumulate():
            return
        self._seen += 1
        if self._seen == self.after:
            self._clock.restart(pl_module.device)
        elif self._seen == self.after + self.steps:
            seconds = self._clock.seconds(pl_module.device) / self.steps
            if (words := self._judge(trainer, pl_module, seconds)) is not None:
                rank_zero_info(words)
            self._device = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.go_on()

    def _judge(self, trainer: Trainer, module: Any, seconds: float) -> str | None:
        from lightning_nd.planner.ask import ask
        from lightning_nd.planner.hardware import Cluster
        from lightning_nd.planner.layout import Setting, Work
        from lightning_nd.planner.memory import memory
        from lightning_nd.planner.steptime import step_time

        strategy: Any = trainer.strategy
        device = self._device
        assert device is not None
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        dims = strategy.dims
        setting = Setting(
            dims, data.micro_batch_size, trainer.accumulate_grad_batches, strategy._activation_checkpointing
        )
        precision: Any = trainer.precision or "32-true"
        mean = round(sum(self._lengths) / len(self._lengths)) * dims.cp
        work = Work(
            mean, setting.rows, precision, compiled=strategy._compile,
            sequence_parallel=strategy._sequence_parallel,
        )  # fmt: skip
        try:
            facts, _ = ask(module.config, "this model", work.precision, module.lora)
        except (ValueError, KeyError):
            return None  # a model that the planner cannot count
        cluster = Cluster(device, dims.world_size, trainer.num_devices, device.nic_gbs)
        expected = step_time(facts, setting, work, cluster)
        tokens = setting.rows * mean / dims.world_size
        differ = []
        if abs(seconds / expected.total - 1) > _FAR:
            differ.append(
                f"{tokens / seconds:,.0f} tokens/s/GPU, expected {tokens / expected.total:,.0f}"
                f" ({seconds:.3g} s a step, expected {expected.total:.3g})"
            )
        if module.device.type == "cuda":
            longest = replace(work, length=max(self._lengths) * dims.cp)
            live, used = memory(facts, setting, longest).live, torch.cuda.max_memory_allocated(module.device)
            if abs(used / live - 1) > _FAR:
                differ.append(f"{used / _GIB:.1f} GiB live at most, expected {live / _GIB:.1f}")
        if not differ:
            return None
        return (
            f"Plan: steps {self.after + 1} to {self.after + self.steps} on {device.name} differ from what the planner"
            f" expects of {setting}, rows of {mean:,} tokens: {'; '.join(differ)}. `lightning-nd plan --explain` says"
            " where time and memory should go; `lightning-nd calibrate` measures the GPU."
        )
