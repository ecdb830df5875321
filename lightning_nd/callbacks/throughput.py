"""How fast a run is: tokens, floating-point operations, memory and waiting, over all ranks."""

from __future__ import annotations

import logging
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_nd.callbacks.clock import Clock
from lightning_nd.profiling import TracedStep

if TYPE_CHECKING:
    from lightning_nd.planner.model import ModelFacts

log = logging.getLogger(__name__)
_GIB = 2**30


class Throughput(Callback):
    """Logs ``throughput/...``, averaged over ``trainer.log_every_n_steps`` optimizer steps.

    - ``tokens_per_s``, ``tokens_per_s_per_device``: tokens that attention sees (no padding). Ranks that share a row
      (tp, cp) count it once.
    - ``step_time_s``: between the ends of optimizer steps, waiting for data included and validation excluded.
    - ``data_wait_s``: of it, what the host spent between batches (the slowest rank): loader, collation, copies, other
      callbacks. On a GPU that is behind the host, some of it is hidden.
    - ``tflops_per_device``: floating-point operations that the model needs, forward and backward, attention by the
      pairs of tokens that see each other (documents, windows), no recomputation, two products instead of three for a
      frozen weight (PaLM, appendix B; LoRA). Models of transformers in a `CausalLM`, or held by another LightningModule
      without adapters.
    - ``mfu``: that over the device's dense bf16 peak; ``hfu`` counts what checkpointing repeats, too. Where the peak is
      known: a GPU of the planner's table, or ``gpu``, ``peak_tflops``.
    - ``peak_memory_gib``: the most that tensors took on a GPU, or the process on CPU (the largest rank), since the
      start.

    - ``exposed_communication``: the share of a step in which something was on its way and nothing was computed (the
      largest rank's: one that waits for a slower one counts it, too). With ``communication_every``: the first step of
      every so many is traced by torch's profiler, and left out of the other numbers.

    Args:
        gpu: what the devices are called in the planner's table, or in ``gpu_file``; on CUDA the driver is asked.
        gpu_file: as of ``lightning-nd plan --gpu-file``.
        peak_tflops: of one device, in 10¹² operations a second, in place of the table's.
        communication_every: optimizer steps from one that is traced to the next; 0 traces none.

    Raises:
        ValueError: for a GPU that is not in the table; for a peak that is not positive; for a negative number of steps.
    """

    def __init__(
        self,
        gpu: str | None = None,
        gpu_file: str | None = None,
        peak_tflops: float | None = None,
        communication_every: int = 0,
    ) -> None:
        if communication_every < 0:
            raise ValueError(f"Throughput: communication_every is {communication_every}; it must be 0 or more.")
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"Throughput: peak_tflops is {peak_tflops}; it must be positive.")
        if gpu is not None and peak_tflops is None:
            from lightning_nd.planner.hardware import find_gpu

            peak_tflops = find_gpu(gpu, None if gpu_file is None else Path(gpu_file).expanduser()).bf16_tflops
        self._peak = peak_tflops
        self._trace_every = communication_every
        self._traced: TracedStep | None = None
        self._clock = Clock()
        self._facts: ModelFacts | None = None
        self._windows: list[int | None] = []
        self._sums: Tensor | None = None
        self._steps = 0
        self._waited = 0.0
        self._ended: float | None = None

    def _restart(self, module: LightningModule) -> None:
        self._sums = torch.zeros(1 + len(self._windows), dtype=torch.float64, device=_counting_device(module.device))
        self._steps, self._waited = 0, 0.0
        self._clock.restart(module.device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._facts = _facts(trainer, pl_module)
        blocks = () if self._facts is None else self._facts.blocks
        self._windows = list(dict.fromkeys(call.window for block in blocks for call in block.attention))
        if self._peak is None and pl_module.device.type == "cuda":
            from lightning_nd.planner.calibrate import known_as

            memory = torch.cuda.get_device_properties(pl_module.device).total_memory / _GIB
            gpu = known_as(torch.cuda.get_device_name(pl_module.device), memory)
            self._peak = None if gpu is None else gpu.bf16_tflops
        self._ended = self._traced = None
        self._began = trainer.global_step
        self._restart(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._traced is None and self._is_to_be_traced(trainer, batch_idx):
            self._clock.pause()
            self._traced = TracedStep(pl_module.device)
        elif self._ended is not None and self._traced is None:
            self._waited += time.perf_counter() - self._ended

    def _is_to_be_traced(self, trainer: Trainer, batch_idx: int) -> bool:
        every = self._trace_every
        if not every or trainer.global_step == self._began or trainer.global_step % every:
            return False  # the first step of a run does much that no other does
        return batch_idx % trainer.accumulate_grad_batches == 0 and not torch.autograd._profiler_enabled()

    def _log_traced(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._traced is not None
        share = torch.tensor(self._traced.exposed_share(), dtype=torch.float64, device=_counting_device(module.device))
        self._traced = None
        module.log("throughput/exposed_communication", trainer.strategy.reduce(share, reduce_op="max"), batch_size=1)
        self._clock.go_on()
        self._ended = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ended = time.perf_counter()
        if self._traced is not None:
            if not trainer.fit_loop._should_accumulate():
                self._log_traced(trainer, pl_module)
            return
        if self._sums is None or not isinstance(batch, dict) or "input_ids" not in batch:
            return
        self._sums += count_batch(batch, self._windows).to(self._sums.device)
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every or not self._steps:
            return
        seconds = self._clock.seconds(pl_module.device)
        sums = trainer.strategy.reduce(self._sums, reduce_op="sum")
        worst = torch.tensor(
            [self._waited / self._steps, _peak_memory(pl_module.device)], dtype=torch.float64, device=sums.device
        )
        worst = trainer.strategy.reduce(worst, reduce_op="max")
        if seconds > 0:
            values = self.rates(trainer, sums.tolist(), seconds)
            values |= {"data_wait_s": float(worst[0]), "peak_memory_gib": float(worst[1]) / _GIB}
            for name, value in values.items():
                pl_module.log(f"throughput/{name}", value, batch_size=1)
        self._restart(pl_module)
        self._ended = time.perf_counter()

    def rates(self, trainer: Trainer, sums: list[float], seconds: float) -> dict[str, float]:
        """What is logged of sums over all ranks (tokens, then pairs by window) and the time that they took."""
        devices = trainer.world_size
        tokens, pairs = sums[0], dict(zip(self._windows, sums[1:], strict=True))
        found = {
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / devices,
            "step_time_s": seconds / self._steps,
        }
        if self._facts is None:
            return found
        needed = self._facts.training_flops(tokens, pairs)
        done = needed + self._facts.recomputed_flops(tokens, pairs, _recomputed(trainer, self._facts.layers))
        found["tflops_per_device"] = needed / seconds / devices / 1e12
        if self._peak is not None:
            found["mfu"] = found["tflops_per_device"] / self._peak
            found["hfu"] = done / seconds / devices / 1e12 / self._peak
        return found

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.go_on()
        self._ended = None if self._ended is None else time.perf_counter()


def count_batch(batch: dict[str, Any], windows: list[int | None]) -> Tensor:
    """Tokens of a batch as a rank has it, and for each window the pairs of tokens that attention computes with.

    A token sees as many tokens as its place in its document says (``position_ids``, or its place among the row's tokens
    that are no padding), or as its window has.
    """
    ids, mask, places = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.bool()
    if places is None or places.shape != ids.shape:
        places = real.long().cumsum(-1) - 1
    seen = (places + 1).masked_fill(~real, 0)
    pairs = [seen if window is None else seen.clamp(max=window) for window in windows]
    return torch.stack([real.sum().double(), *(p.sum().double() for p in pairs)])


def _facts(trainer: Trainer, module: Any) -> ModelFacts | None:
    """The model in numbers; None for one that the planner cannot count."""
    from lightning_nd.parallelize import roots
    from lightning_nd.planner.ask import ask

    lora, config = getattr(module, "lora", None), _config(module)
    if not (hasattr(module, "lora") and hasattr(config, "get_text_config")):
        models = [m for m in module.modules() if roots.is_causal_lm(m)]
        adapted = any(hasattr(m, "peft_config") for m in module.modules())
        frozen = any(not p.requires_grad for p in module.parameters())
        if len(models) != 1 or adapted or frozen:
            return None
        lora, config = None, models[0].config
    try:
        with torch.random.fork_rng(devices=[]):
            return ask(config, "this model", str(trainer.precision or "32-true"), lora)[0]
    except Exception as error:  # a model of any kind: its rates are counted without
        log.info("Throughput: no floating-point operations are counted: %s", error)
        return None


def _config(module: Any) -> Any:
    return getattr(module, "config", None)


def _recomputed(trainer: Trainer, layers: int) -> float:
    """How many blocks' forward passes are repeated; selective checkpointing repeats about half of each."""
    kind = getattr(trainer.strategy, "_activation_checkpointing", "none")
    if kind == "selective":
        return layers / 2
    return {"none": 0, "full": layers}[kind] if isinstance(kind, str) else -(-layers // kind)


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _counting_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device
