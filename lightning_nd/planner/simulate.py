"""One rank's optimizer steps on fake tensors: the strategy's own code, counted.

``python -m lightning_nd.planner.simulate < request.json`` plays a request in a process of its own and prints a JSON
object; `simulate` starts that. Models deeper than `DEPTHS` are played at two small depths and extrapolated: every
further block adds the same to every phase.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.layout import Setting, Work

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PHASES = ("forward", "backward", "optimizer")
_CHUNK_DEVICE = "cuda"  # the loss is played in the chunks of a GPU


@dataclass(frozen=True)
class Simulation:
    """What one rank held and sent in its second step, when optimizer state exists.

    Attributes:
        peaks: live bytes by phase.
        traffic: by ``"axis collective"``: calls and bytes of their whole messages.
        seconds: that it took.
        layers: blocks that were played; fewer than the model has were extrapolated.
    """

    peaks: dict[str, float]
    traffic: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    layers: int = 0

    @property
    def peak(self) -> float:
        """The largest of all phases."""
        return max(self.peaks.values())


def simulate(
    config: PretrainedConfig, setting: Setting, work: Work, lora: Mapping[str, Any] | None = None, timeout: float = 900
) -> Simulation:
    """Play one rank in a process of its own.

    Raises:
        RuntimeError: with what the run itself would have raised.
    """
    period = _period(config)
    depth, few, more = config.get_text_config().num_hidden_layers, 2 * period, 4 * period
    depths = [depth] if depth <= more or os.environ.get("LIGHTNING_ND_PLAN_WHOLE") else [few, more]
    runs = [_start(config, setting, work, lora, layers, timeout) for layers in depths]
    if len(runs) == 1:
        return runs[0]
    share = (depth - more) / (more - few)
    low, high = runs
    peaks = {phase: high.peaks[phase] + share * (high.peaks[phase] - low.peaks[phase]) for phase in high.peaks}
    traffic = {}
    for key, (calls, size) in high.traffic.items():
        before = low.traffic.get(key, [0, 0])
        traffic[key] = [calls + share * (calls - before[0]), size + share * (size - before[1])]
    return Simulation(peaks, traffic, low.seconds + high.seconds, more)


def _period(config: PretrainedConfig) -> int:
    """After how many blocks their kinds repeat."""
    kinds = list(getattr(config.get_text_config(), "layer_types", None) or [""])
    for size in range(1, len(kinds) // 2 + 1):
        if all(kinds[i] == kinds[i % size] for i in range(len(kinds))):
            return size
    return 1


def _start(
    config: PretrainedConfig, setting: Setting, work: Work, lora: Mapping[str, Any] | None, layers: int, timeout: float
) -> Simulation:
    request = {
        "config": config.to_dict(),
        "setting": {**asdict(setting), "dims": setting.dims.as_dict()},
        "work": asdict(work),
        "lora": lora,
        "layers": layers,
    }
    done = subprocess.run(
        [sys.executable, "-m", "lightning_nd.planner.simulate"],
        input=json.dumps(request, default=str),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if answer is None:
        raise RuntimeError(f"plan --verify: the simulation ended with code {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(answer)
    if "error" in found:
        raise RuntimeError(f"plan --verify: {found['error']}")
    return Simulation(**found)


# -- in the process of its own ----------------------------------------------------------------------------------------


def play(request: Mapping[str, Any]) -> Simulation:
    """Play a request in this process."""
    from transformers import AutoConfig

    given = dict(request["setting"])
    setting = Setting(**{**given, "dims": ParallelDims(**given["dims"])})
    content = dict(request["config"])
    layers = request["layers"]
    content["num_hidden_layers"] = layers
    if content.get("layer_types"):
        content["layer_types"] = content["layer_types"][:layers]
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    return play_rank(config, setting, Work(**request["work"]), request["lora"])


def play_rank(
    config: PretrainedConfig, setting: Setting, work: Work, lora: Mapping[str, Any] | None, steps: int = 2
) -> Simulation:
    """Two optimizer steps of rank 0 under the strategy's own code; process groups of this process must not exist."""
    import torch

    from lightning_nd.checkpoint.init import NoSource
    from lightning_nd.dryrun import simulated
    from lightning_nd.loss import LossOptions, TokenLedger, install_loss
    from lightning_nd.parallelize import ParallelConfig, ShardingOptions, parallelize, partial_gradients
    from lightning_nd.parallelize.context import ContextParallel
    from lightning_nd.parallelize.data import fsdp_modules
    from lightning_nd.planner.ask import build
    from lightning_nd.planner.patches import patched
    from lightning_nd.planner.tracker import LiveStorages, Traffic
    from lightning_nd.recipes.lora import LoRA

    started = time.perf_counter()
    dims = setting.dims
    with patched(), simulated(dims.world_size) as fake:
        meshes = dims.build_meshes("cpu")
        model: Any = build(config, work.precision, None if lora is None else LoRA.of(dict(lora)), weights=True)
        model._nd_source = NoSource()
        context = None
        if dims.cp > 1:
            multiple = dims.tp if work.sequence_parallel else 1
            context = ContextParallel(meshes.cp.get_group(), multiple=multiple)
        options = ParallelConfig(
            meshes=meshes,
            sequence_parallel=work.sequence_parallel,
            activation_checkpointing=setting.checkpointing,
            context=context,
            sharding=ShardingOptions(_mixed(work), reshard_after_forward=setting.reshard),
        )
        ledger = TokenLedger()
        vocabulary = config.get_text_config().vocab_size // dims.tp
        tokens = round(setting.tokens(work.length))
        chunk = LossOptions().tokens_per_chunk(tokens, vocabulary, torch.device(_CHUNK_DEVICE))
        loss_options = LossOptions(chunk=chunk if work.chunked_loss else None, kernel="torch")
        with fake:
            parallelize(model, options)
            install_loss(model, ledger, meshes.loss.get_group(), sharded=dims.cp > 1, options=loss_options)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        ids = torch.zeros(setting.micro_batch, work.length, dtype=torch.long)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        if context is not None:
            batch = context.shard(batch)
        batch = {key: fake.from_tensor(v) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}
        if context is not None:
            context.remember(batch)
        live, traffic = LiveStorages(fake), Traffic(_axes(meshes))
        units, partial = fsdp_modules(model), partial_gradients(model)
        with fake:
            live.add([*model.parameters(), *model.buffers(), *batch.values()])
            for _ in range(steps):
                live.peaks.clear()
                traffic.found.clear()
                with live, traffic:
                    for micro in range(min(setting.accumulation, 2)):
                        last = micro == min(setting.accumulation, 2) - 1
                        for unit in units:
                            unit.set_requires_gradient_sync(last, recurse=False)
                        live.phase = "forward"
                        loss = model(**batch, use_cache=False).loss
                        live.phase = "backward"
                        loss.backward()
                        del loss
                        ledger.close_micro_batch()
                    live.phase = "optimizer"
                    _finish(model, optimizer, partial, ledger, meshes)
    found = {" ".join(key): [float(v) for v in value] for key, value in traffic.found.items()}
    peaks = {phase: float(live.peaks[phase]) for phase in PHASES}
    return Simulation(peaks, found, time.perf_counter() - started, config.get_text_config().num_hidden_layers)


def _finish(model: Any, optimizer: Any, partial: list[Any], ledger: Any, meshes: Any) -> None:
    from lightning_nd import gradients

    if partial:
        gradients.average_partial_gradients(partial, meshes.tp.get_group())
    ledger.close_window()
    parameters = list(model.parameters())
    gradients.clip_by_norm(parameters, 1.0, gradients.global_norm(parameters))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _mixed(work: Work) -> Any:
    from lightning_nd.precision import NDHalfPrecision, NDMixedPrecision, NDPrecision

    plugins: dict[str, Any] = {"bf16-mixed": NDMixedPrecision, "bf16-true": NDHalfPrecision, "32-true": NDPrecision}
    return plugins[work.precision].sharding


def _axes(meshes: Any) -> dict[str, str]:
    named = {"cp": meshes.cp, "tp": meshes.tp, "loss": meshes.loss, "data": meshes.data}
    axes = {mesh.get_group().group_name: name for name, mesh in named.items()}
    fsdp = meshes.fsdp
    groups = fsdp.get_all_groups()
    names = ["dp_shard"] if len(groups) == 1 else ["dp_replicate", "dp_shard"]
    axes.update({group.group_name: name for group, name in zip(groups, names, strict=True)})
    return axes


def main() -> int:
    """Read a request, print what was found; errors of the run are part of the answer."""
    request = json.load(sys.stdin)
    try:
        print(json.dumps(asdict(play(request))))
    except Exception as error:  # whatever the run would have met is the answer
        if os.environ.get("LIGHTNING_ND_TRACEBACK"):
            raise
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
