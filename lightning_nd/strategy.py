"""The Lightning strategy: it speaks Lightning and delegates everything else."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_nd.checkpoint.saver import Saver
from lightning_nd.devices import claim, device_of, one_each
from lightning_nd.dryrun import DryRunLauncher
from lightning_nd.faults import Progress
from lightning_nd.launch import InProcess, LocalLauncher, RankFailedError, check_world, is_interactive
from lightning_nd.loaders import SameRows, behind, split_loader, warn_of_masks
from lightning_nd.loss import LossOptions, install_loss, read_real_logits
from lightning_nd.mesh import Degree, Meshes, ParallelDims, check_timeout
from lightning_nd.names import warn_of_the_other_package
from lightning_nd.parallelize import (
    ActivationCheckpointing,
    ParallelConfig,
    ShardingOptions,
    TPPlan,
    check_layout,
    parallelize,
    partial_gradients,
    roots,
)
from lightning_nd.parallelize.activation import check_activation_checkpointing
from lightning_nd.parallelize.context import ContextParallel, check_options
from lightning_nd.precision import NDPrecision, adapt_precision
from lightning_nd.preflight import preflight
from lightning_nd.stepping import SteppingStrategy
from lightning_nd.watch import REPORTS

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


class NDStrategy(SteppingStrategy):
    """Train one model over ``dp_replicate × dp_shard × cp × tp`` ranks with the numbers of one process.

    A `LightningModule` that holds a transformers causal LM and returns ``self.model(**batch).loss`` runs unchanged: the
    strategy splits the model after `configure_model`. A module that wants control calls
    ``lightning_nd.parallelize(self.model, self.trainer.strategy)`` in `configure_model`.

    Args:
        dp_replicate: replicas of the sharded model. With ``dp_shard=1`` this is DDP, else HSDP.
        dp_shard: ranks over which parameters, gradients and optimizer state are sharded. ``"auto"`` takes the ranks
            that the other degrees leave.
        cp: ranks that share a sequence: each keeps some tokens of every row, and attention sees them all.
        tp: ranks that share every layer.
        sequence_parallel: with ``tp`` > 1, split activations between attention and MLP along the sequence.
        tp_plan: ``"auto"`` takes transformers' plan of the model's family; else styles by module name, relative to the
            model: ``{"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise"}``.
        activation_checkpointing: ``"none"``, ``"full"``, ``"selective"``, or ``n`` for every n-th block.
        offload_activations: keep in host memory what blocks save for the backward pass.
        cp_method: how keys and values travel: ``"direct"``, ``"ring"``, ``"ulysses"`` or ``"auto"``.
        cp_layout: which tokens a cp rank keeps: ``"zigzag"``, ``"chunks"``, ``"contiguous"`` or ``"auto"``, which
            balances the work of each batch.
        cp_kernel: what computes attention on a rank: ``"cuda-flash"``, ``"flash-attn"``, ``"cpu-flash"``, ``"tiled"``,
            ``"flex"``, or ``"auto"``, which takes the first of these but the last that can.
        cp_sdpa: with ``cp`` > 1, a hand-written model's ``F.scaled_dot_product_attention(..., is_causal=True)`` sees
            all ranks' tokens.
        document_attention: with ``cp`` = 1, too, attend document by document with the kernels of context parallelism:
            padded and packed batches need no mask of all pairs of tokens.
        loss: chunks, label smoothing, z-loss; see `LossOptions`.
        compile: `torch.compile` each block.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: free gathered parameters after forward; see `torch.distributed.fsdp.fully_shard`.
        save_distributed_checkpoint: each rank saves its shards (a folder), or rank 0 saves all (one file).
        async_checkpoint: training goes on while a checkpoint is written; at most one at a time, and what goes wrong is
            raised at the next step.
        process_group_backend: default: NCCL on CUDA, gloo on CPU.
        timeout: of every process group, those of the meshes included.
        error_if_nonfinite: stop all ranks before the optimizer step if a gradient is not finite, naming step and
            parameter.
        dry_run: `Trainer.fit` plays one rank on fake tensors in place of the run, and prints what it would hold and
            send; no process is started and no weight loaded. See `lightning_nd.dryrun`.

    Raises:
        ValueError: for degrees or options that are not allowed; for a number of ranks that does not fit, when the
            Trainer is made.
    """

    strategy_name = "nd"

    def __init__(
        self,
        dp_replicate: Degree = 1,
        dp_shard: Degree = "auto",
        cp: int = 1,
        tp: int = 1,
        *,
        sequence_parallel: bool = True,
        tp_plan: TPPlan | Literal["auto"] = "auto",
        activation_checkpointing: ActivationCheckpointing = "none",
        offload_activations: bool = False,
        cp_method: Literal["auto", "direct", "ring", "ulysses"] = "auto",
        cp_layout: Literal["auto", "zigzag", "chunks", "contiguous"] = "auto",
        cp_kernel: Literal["auto", "cuda-flash", "flash-attn", "cpu-flash", "tiled", "flex"] = "auto",
        cp_sdpa: bool = False,
        document_attention: bool = False,
        loss: LossOptions | None = None,
        compile: bool = False,
        cpu_offload: bool = False,
        reshard_after_forward: bool | int = True,
        save_distributed_checkpoint: bool = True,
        async_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        error_if_nonfinite: bool = False,
        dry_run: bool = False,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        warn_of_the_other_package()
        self._degrees: dict[str, Any] = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        check_activation_checkpointing(activation_checkpointing, offload_activations)
        check_options(cp_method, cp_layout, cp_kernel)
        check_timeout(timeout)
        self._cp_method, self._cp_layout, self._cp_sdpa = cp_method, cp_layout, cp_sdpa
        self._cp_kernel = None if cp_kernel == "auto" else cp_kernel
        self._document_attention = document_attention
        self._sequence_parallel = sequence_parallel
        self._tp_plan = tp_plan
        self._activation_checkpointing, self._offload_activations = activation_checkpointing, offload_activations
        self._compile = compile
        self._cpu_offload = cpu_offload
        self._reshard_after_forward = reshard_after_forward
        self._error_if_nonfinite = error_if_nonfinite
        self._dry_run = dry_run
        self._async_checkpoint = async_checkpoint
        self.checkpoints_to_try = []
        self._dims: ParallelDims | None = None
        self._meshes: Meshes | None = None
        self._context: ContextParallel | None = None
        self._inject_samplers = False
        self._progress: Progress | None = None
        self._same_rows: SameRows | None = None
        self._partial: list[nn.Parameter] = []
        self.loss = LossOptions.of(loss)

    # -- layout ---------------------------------------------------------------------------------------------------

    @property
    def dims(self) -> ParallelDims:
        """The degree of every axis, known once the Trainer has been made."""
        if self._dims is None:
            raise RuntimeError("NDStrategy: the layout is known once the Trainer has been made.")
        return self._dims

    @property
    def attends_by_document(self) -> bool:
        """Whether attention is the strategy's: it then knows the documents of a batch, and needs no mask."""
        return self.dims.cp > 1 or self._document_attention

    @property
    def meshes(self) -> Meshes:
        """The device meshes by purpose, known once the processes are connected."""
        if self._meshes is None:
            raise RuntimeError("NDStrategy: the meshes are made when the processes are connected, before setup.")
        return self._meshes

    @property
    def parallel_config(self) -> ParallelConfig:
        """What `lightning_nd.parallelize` does under this strategy."""
        plugin = self.precision_plugin
        assert isinstance(plugin, NDPrecision | Precision)
        return ParallelConfig(
            meshes=self.meshes,
            tp_plan=self._tp_plan,
            sequence_parallel=self._sequence_parallel,
            activation_checkpointing=self._activation_checkpointing,
            offload_activations=self._offload_activations,
            context=self._context,
            compile=self._compile,
            sharding=ShardingOptions(
                mixed_precision=plugin.sharding,  # type: ignore[attr-defined]
                cpu_offload=self._cpu_offload,
                reshard_after_forward=self._reshard_after_forward,
            ),
        )

    @property
    @override
    def root_device(self) -> torch.device:
        return device_of(self.parallel_devices or [], self.local_rank)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = one_each(os.environ, devices) if devices else devices

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that differ only in cp or tp read the same rows."""
        return {"num_replicas": self.meshes.data.size(), "rank": self.meshes.data.get_local_rank()}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._dry_run:
            self._launcher = DryRunLauncher()
        elif self.dims.world_size > 1 or self.cluster_environment.creates_processes_externally:
            check = partial(preflight, dims=self.dims, tp_plan=self._tp_plan, by_document=self.attends_by_document)
            self._launcher = LocalLauncher(self.cluster_environment, self.num_processes, self.num_nodes, check)
        else:
            self._launcher = InProcess()

    @override
    def set_world_ranks(self) -> None:
        # Lightning calls this first once the number of ranks is known; nothing has been started or loaded.
        self._dims = check_world(
            {} if self._dry_run else os.environ,
            devices=self.num_processes,
            num_nodes=self.num_nodes,
            interactive=is_interactive() and not self._dry_run,
            **self._degrees,
        )
        super().set_world_ranks()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        claim(dist.distributed_c10d._get_default_store(), self.root_device, self.global_rank)
        self._meshes = self.dims.build_meshes(self.root_device.type, self._timeout)
        self._device_mesh = self._meshes.axes
        sharded, in_background = self._save_distributed_checkpoint, self._async_checkpoint
        self._saver = Saver(self.dims.as_dict(), sharded, in_background, self._timeout)
        if self.attends_by_document and self._context is None:  # a second stage keeps what the model has told the first
            self._context = ContextParallel(
                self._meshes.cp.get_group(),
                self._cp_method,
                self._cp_layout,
                multiple=self.dims.tp if self._sequence_parallel else 1,
                inside_node=self.num_processes % (self.dims.cp * self.dims.tp) == 0,
                sdpa=self._cp_sdpa,
                kernel=self._cp_kernel,
            )
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all four axes."""
        return self.meshes.axes

    # -- model and optimizers -------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        # Under the local launcher the ranks share a folder of its own; else the run's, which nodes share if they can.
        shared = os.environ.get(REPORTS)
        folder = Path(shared or os.path.join(trainer.default_root_dir, ".progress"))
        self._progress = Progress(folder, self.global_rank, remember=bool(shared))
        self._launcher.listen(self._progress, self)  # type: ignore[union-attr]
        self._take_over_samplers(trainer)
        self._same_rows = SameRows(self.meshes, self.root_device)
        check_layout(self.lightning_module, self.dims)
        for root in roots.find_roots(self.lightning_module, self.dims.tp):
            parallelize(root, self)
            if not roots.is_causal_lm(root):
                read_real_logits(root)
        for module in self.lightning_module.modules():
            if roots.is_causal_lm(module):
                roots.check_objective(module, self.dims)
                group = self.meshes.loss.get_group()
                install_loss(module, self.ledger, group, sharded=self.attends_by_document, options=self.loss)
        self._partial = partial_gradients(self.lightning_module)
        roots.sync_metrics_over(self.lightning_module, self.meshes.loss.get_group())
        self.model_to_device()
        self.barrier()
        rank_zero_info(roots.describe(self.lightning_module, self.dims))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            roots.check_optimizers(self.lightning_module, self.optimizers)
            if words := roots.small_steps(self.optimizers):
                rank_zero_warn(words)
            self.saver.check_target(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else adapt_precision(plugin, self)

    # -- loaders --------------------------------------------------------------------------------------------------

    def _take_over_samplers(self, trainer: pl.Trainer) -> None:
        """In fit, give loaders their samplers ourselves: Lightning's shuffles every training loader it touches."""
        connector = trainer._accelerator_connector
        self._inject_samplers = self._inject_samplers or connector.use_distributed_sampler
        connector.use_distributed_sampler = self._inject_samplers and trainer.state.fn != TrainerFn.FITTING

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Split a loader over the data ranks in the order that the user gave it: shuffled only if it was."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        if self._inject_samplers and trainer.state.fn == TrainerFn.FITTING:
            dataloader = split_loader(dataloader, trainer.overfit_batches, self.distributed_sampler_kwargs)
        return behind(dataloader, trainer)

    # -- batches --------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Under cp, keep this rank's tokens (on the host, before anything is copied); then move to the device."""
        if self._same_rows is not None:
            assert self.lightning_module is not None
            self._same_rows.check(batch, self.lightning_module.trainer.training)
        if self._context is None:
            warn_of_masks(batch)
            return super().batch_to_device(batch, device, dataloader_idx)
        moved = super().batch_to_device(self._context.shard(batch), device, dataloader_idx)
        self._context.remember(moved)
        return moved

    # -- faults ---------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add to an error where it happened, who is behind, and what to change."""
        self.save_before_the_end(exception)
        if isinstance(exception, RankFailedError) or getattr(exception, "__notes__", None):
            return  # another rank's story, or told already: the launcher asks first, for its report
        if self._progress is not None and isinstance(exception, Exception):
            exception.add_note(self._progress.explain(exception, self.lightning_module))
            self._progress.keep = True  # the other ranks are about to read it

    @override
    def teardown(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        super().teardown()

    # -- numbers over ranks ---------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce over the ranks that hold different tokens; tp peers hold the same and are not counted."""
        if not isinstance(tensor, Tensor):
            return tensor
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()  # a number over all shards already
        averages = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if averages and not tensor.is_floating_point():
            # An integer mean would be floored: Lightning averages batch counts, which ranks may have unequal.
            tensor = tensor.double() if self.root_device.type != "mps" else tensor.float()
        group = self.meshes.loss.get_group() if group is None else group
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the whole world, so that no rank takes another way."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)


if "nd" not in StrategyRegistry:  # Lightning has no entry point for strategies
    StrategyRegistry.register("nd", NDStrategy, description="dp_replicate × dp_shard × cp × tp parallelism")
