"""Fine-tuning of a Hugging Face causal language model as a LightningModule."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics.aggregation import SumMetric
from typing_extensions import override

from lightning_nd.assets import resolve
from lightning_nd.checkpoint.convert import FromEitherFormat
from lightning_nd.data.isolation import check_isolation
from lightning_nd.loss import CausalLMLoss, shift_labels, token_nll, token_scores
from lightning_nd.parallelize.context import gather_sequence
from lightning_nd.recipes.lora import LoRA
from lightning_nd.recipes.neftune import noise
from lightning_nd.recipes.optim import DEFAULT_OPTIMIZER, DEFAULT_SCHEDULER, configure_optimizers
from lightning_nd.recipes.overrides import apply_overrides, check_length
from lightning_nd.recipes.rate import Scaling

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Batch = dict[str, Tensor]


class CausalLM(FromEitherFormat):
    """Trains a causal LM on the supervised tokens of its batches, and exports a Hugging Face folder.

    All weights are trained, or with ``lora`` low-rank pairs beside frozen ones.

    The logged numbers are global and token-weighted, the same for every layout: ``train/loss``, ``train/grad_norm``
    (before clipping), ``train/supervised_tokens`` and ``lr`` for each optimizer step (a step without a supervised token
    logs loss 0 of 0 tokens); ``val/loss`` and
    ``val/perplexity`` for each validation, as sum of nll over sum of tokens; ``test/accuracy`` (the supervised tokens
    that are the likeliest) and ``test/tokens`` besides for a test.

    Args:
        model: folder or hub id of the model; ``lightning_nd://quickstart/model`` is a small one of the package.
        tokenizer: folder or hub id of its tokenizer; the model's own when None.
        dtype: of the weights; ``"auto"`` is float32, or the format of ``Trainer(precision="bf16-true"/"16-true")``.
        attn_implementation: ``"sdpa"``, ``"eager"`` or another name that transformers knows; its choice when None.
        config_overrides: values that replace those of the model's configuration, e.g. ``{"rope_parameters":
            {"rope_type": "yarn", "factor": 4.0}}``; see `apply_overrides`.
        from_scratch: random weights from ``seed_everything`` instead of the stored ones.
        lora: train low-rank pairs beside frozen layers; a `LoRA`, or a mapping of its fields.
        trust_remote_code: run model code that comes with the weights.
        lr_scaling: ``"linear"`` or ``"sqrt"``: the optimizer's rate is for ``reference_batch``, and follows the rows of
            an optimizer step (micro-batch × accumulation × data ranks; packs, where rows are packed).
        reference_batch: rows per optimizer step for which the rate was found.
        neftune: size of the noise on the embeddings of training rows (Jain et al. 2023), 5 to 15; the same for a row on
            every data rank, refused under tp and cp.
        export: write the model as a Hugging Face folder when the fit ends. With ``lora`` that is a peft adapter, or
            the whole model with the pairs added to its weights for ``"merged"``.
        export_dir: where; ``<default_root_dir>/export`` when None.

    Raises:
        ValueError: before weights are loaded, for a path that does not exist or holds no model, for a tokenizer with
            ids that have no embedding, or for an ``export_dir`` that already holds files.
    """

    # the command line may set optimizer and schedule in place of the defaults of configure_optimizers
    optimizer_from_cli = True

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        attn_implementation: str | None = None,
        config_overrides: dict[str, Any] | None = None,
        from_scratch: bool = False,
        lora: LoRA | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        reference_batch: int | None = None,
        neftune: float | None = None,
        trust_remote_code: bool = False,
        export: bool | Literal["merged"] = True,
        export_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.lora = None if lora is None else LoRA.of(lora)
        self.save_hyperparameters(logger=False)
        self.hparams["lora"] = self.lora.as_dict() if self.lora else None  # checkpoints hold plain values
        if self.lora is not None and from_scratch:
            raise ValueError("lora with from_scratch would train pairs beside random weights, which stay as they are.")
        if self.lora is None and export == "merged":
            raise ValueError("export='merged' is for lora; without it export=True writes the whole model.")
        if self.lora is not None and self.lora.quantization is not None and export == "merged":
            raise ValueError(
                "export='merged' with lora.quantization: the pairs belong to the stored weights, which are not in"
                " memory. Export the adapter, and merge it with `lightning-nd export --checkpoint ... --merge`."
            )
        self.source = resolve_source(model)
        self.model: PreTrainedModel | None = None
        self.lr_scaling = Scaling(lr_scaling, reference_batch)
        self.config = read_config(self.source, trust_remote_code=trust_remote_code)
        self.overrides = apply_overrides(self.config, config_overrides or {})
        vocabulary = resolve(os.path.expanduser(tokenizer)) if tokenizer else self.source
        self.tokenizer = read_tokenizer(vocabulary, trust_remote_code=trust_remote_code)
        check_vocabulary(self.config, self.tokenizer, vocabulary)
        if neftune is not None and neftune <= 0:
            raise ValueError(f"neftune is {neftune}; the noise is a positive number, 5 to 15 in the paper, or none.")
        self._noise: Tensor | None = None
        if self.lora is not None:
            self.strict_loading = (
                False  # of the names that checkpoints leave out; load_state_dict is strict on the rest
            )
        self.exported_to: Path | None = None
        self._window: tuple[Tensor, Tensor] | None = None
        self._step: dict[str, Any] = {}
        self._packing_checked = False
        self._nll = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._tokens = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._right = SumMetric(nan_strategy="disable").set_dtype(torch.float64)

    # ---- life cycle

    @override
    def setup(self, stage: str) -> None:
        self.preflight(getattr(self._trainer, "datamodule", None))
        dims = getattr(getattr(self._trainer, "strategy", None), "dims", None)
        if stage == "fit" and self.hparams["neftune"] is not None and dims is not None and dims.cp * dims.tp > 1:
            raise ValueError(
                f"neftune: under cp={dims.cp}, tp={dims.tp} ranks hold parts of the embeddings, and the noise of one"
                " process would not come out. Use dp_shard, or leave it out."
            )
        if stage == "fit" and self.hparams["export"] and self.hparams["export_dir"]:
            folder = Path(self.hparams["export_dir"]).expanduser()
            if folder.is_dir() and any(folder.iterdir()):
                raise ValueError(
                    f"export_dir {folder.absolute()} already holds files; give another folder or empty it."
                )

    def skeleton(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model without weights, for checks before any process is started."""
        from lightning_nd.checkpoint import from_config

        try:
            model = from_config(self.config, dtype=dtype)
        except Exception as error:  # whatever a model class meets in values that nobody has checked
            if not self.overrides:
                raise
            raise ValueError(
                f"config_overrides: {type(self.config).__name__} with {self.overrides} gives no model:"
                f" {type(error).__name__}: {error}"
            ) from error
        self._add_pairs(model)
        return model

    def preflight(self, data: Any) -> None:
        """Refuse data that do not fit the model, before any process is started."""
        check_length(self.config, getattr(data, "max_length", None))

    def _add_pairs(self, model: PreTrainedModel) -> None:
        if self.lora is None:
            return
        from lightning_nd.checkpoint import add_adapters
        from lightning_nd.quantized import quantize_linears

        if self.lora.quantization is not None:
            quantize_linears(model)
        start = None if self.lora.adapter is None else Path(self.lora.adapter).expanduser()
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        add_adapters(model, self.lora.config(), layers=self.lora.layers, seed=seed, start=start)

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        from lightning_nd.checkpoint import from_config, load_pretrained, materialize
        from lightning_nd.strategy import NDStrategy

        dtype = self._weight_dtype()
        if self.hparams["from_scratch"]:
            if self.hparams["attn_implementation"]:
                self.config._attn_implementation = self.hparams["attn_implementation"]
            self.model = from_config(self.config, dtype=dtype, seed=int(os.environ.get("PL_GLOBAL_SEED", "0")))
        else:
            self.model = load_pretrained(
                self.source,
                dtype=dtype,
                attn_implementation=self.hparams["attn_implementation"],
                trust_remote_code=self.hparams["trust_remote_code"],
                **self.overrides,
            )
        kept = {n: getattr(self.model.config, n) for n, value in self.overrides.items()}
        if kept != self.overrides:
            lost = next(n for n in kept if kept[n] != self.overrides[n])
            raise ValueError(
                f"config_overrides: {type(self.model).__name__} turned {lost}={self.overrides[lost]!r} into"
                f" {kept[lost]!r}. Give it in the form that its config.json has."
            )
        self._add_pairs(self.model)
        if self.hparams["neftune"] is not None:
            self.model.get_input_embeddings().register_forward_hook(self._add_noise)
        self.model.train()
        strategy = getattr(self._trainer, "strategy", None)  # none in load_from_checkpoint
        if not isinstance(strategy, NDStrategy):
            # NDStrategy fills the weights after it has sharded the empty model
            materialize(self.model, getattr(strategy, "root_device", torch.device("cpu")))

    def _weight_dtype(self) -> torch.dtype:
        name = self.hparams["dtype"]
        if name == "auto":
            precision = getattr(self._trainer, "precision", None)
            name = {"bf16-true": "bfloat16", "16-true": "float16"}.get(str(precision), "float32")
            if self.lora is not None and precision == "bf16-mixed":
                name = "bfloat16"  # weights that no step changes need no float32 copy
        return getattr(torch, name)

    @override
    def configure_optimizers(self) -> Any:
        return configure_optimizers(self, DEFAULT_OPTIMIZER, DEFAULT_SCHEDULER)

    # ---- checkpoints: with lora they hold what is trained; the rest comes from the model folder

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self.lora is not None:
            trained = {n for n, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}
            state = {name: value for name, value in state.items() if name in trained}
        return state

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self.lora is not None:
            trained = {n for n, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}
            if differ := trained ^ set(state_dict):
                raise RuntimeError(f"The checkpoint is of other pairs: {sorted(differ)[0]} is not in both.")
            return super().load_state_dict(state_dict, strict=False, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.lora is not None:
            checkpoint["lora_base"] = self._base()

    def _base(self) -> str | None:
        """What tells the weights beside the pairs from others; None for weights that were not read from files."""
        from lightning_nd.checkpoint.source import WeightSource

        source = getattr(self.model, "_nd_source", None)
        return source.fingerprint() if isinstance(source, WeightSource) else None

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        base = self._base() if checkpoint.get("lora_base") and self.lora is not None else None
        if base is not None and base != checkpoint["lora_base"]:
            raise ValueError(
                f"The checkpoint's low-rank pairs were trained beside other weights than those of {self.source}."
                " Resume with the model that the run began with."
            )
        saved = (checkpoint.get("hyper_parameters") or {}).get("lora")
        ours = self.hparams["lora"]
        names = ("r", "alpha", "target_modules", "rslora", "layers", "quantization")
        was, now = saved or {}, ours or {}
        differ = [n for n in names if saved and ours and n in was and was[n] != now[n]]
        if bool(saved) != bool(ours) or differ:
            given = ", ".join(f"{n} was {was[n]} and is {now[n]}" for n in differ)
            raise ValueError(
                f"The checkpoint is of a run with{'' if saved else 'out'} lora"
                + (f", where {given}" if differ else f", and this one has {'one' if ours else 'none'}")
                + ". Use the same lora, or start a new run from its export."
            )

    # ---- steps

    def forward(self, **inputs: Any) -> Any:
        """The transformers model's forward, without a cache."""
        assert self.model is not None
        return self.model(**inputs, use_cache=False)

    @override
    def on_train_start(self) -> None:
        self._check_packing()

    @override
    def on_validation_start(self) -> None:
        self._check_packing()

    @override
    def on_test_start(self) -> None:
        self._check_packing()

    def _check_packing(self) -> None:
        """Once, with the weights in place: the documents of packs do not see each other."""
        data, strategy = getattr(self.trainer, "datamodule", None), self.trainer.strategy
        known = getattr(strategy, "attends_by_document", False)
        if self._packing_checked or data is None or not getattr(data, "packing", False) or known:
            return
        assert self.model is not None
        self._packing_checked = True
        with self.trainer.precision_plugin.forward_context():
            check_isolation(
                self.model,
                max(data.micro_batch_size, data.eval_micro_batch_size),
                strategy.root_device,
                exact=self.trainer.precision in ("32-true", "64-true") and self.hparams["dtype"] in ("auto", "float32"),
            )

    def _add_noise(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        return None if self._noise is None else output + self._noise.to(output.dtype)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if (alpha := self.hparams["neftune"]) is not None:
            width = self.config.get_text_config().hidden_size
            seed, mask = int(os.environ.get("PL_GLOBAL_SEED", "0")), batch.get("attention_mask")
            starts, step = batch.get("position_ids"), self.trainer.global_step
            self._noise = noise(batch["input_ids"], mask, width, alpha, seed, step, starts)
        loss: Tensor = self(**batch).loss
        self._noise = None
        count = supervised_tokens(batch)
        nll = weighted(loss.detach(), count)
        self._window = (nll, count) if self._window is None else (self._window[0] + nll, self._window[1] + count)
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # before the schedule moves on: the rate of this step
        self._step = {"lr": optimizer.param_groups[0]["lr"]}
        if hasattr(self.trainer.strategy, "grad_norm"):
            self._step["train/grad_norm"] = self.trainer.strategy.grad_norm()
        else:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self._step["train/grad_norm"] = torch.nn.utils.get_total_norm(grads)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if not self._step or self._window is None:
            return  # inside an accumulation window
        (nll, count), strategy = self._window, self.trainer.strategy
        values: dict[str, Any] = {
            "train/loss": getattr(strategy, "step_loss", None),
            "train/supervised_tokens": getattr(strategy, "step_supervised_tokens", None),
        }
        own = {"train/loss": nll / count, "train/supervised_tokens": count}
        values = {name: own[name] if value is None else value for name, value in values.items()}
        tokens = values["train/supervised_tokens"]
        values["train/loss"] = torch.where(tokens > 0, values["train/loss"], 0.0)  # of nothing, there is no mean
        for name, value in {**values, **self._step}.items():
            self.log(name, value.float() if isinstance(value, Tensor) else float(value), batch_size=1)
        self._window, self._step = None, {}

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._add(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_sums("val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits, targets = self._logits_and_targets(batch)
        nll, right = token_scores(logits, targets)
        self._nll.update(nll.sum(dtype=torch.float64))
        self._right.update(right.sum())
        self._tokens.update((targets != -100).sum())

    @override
    def on_test_epoch_end(self) -> None:
        self._log_sums("test")

    def _add(self, batch: Batch) -> None:
        # where the loss is already the mean over all data ranks, the ranks' shares of it still add up to the sum of nll
        count = supervised_tokens(batch)
        self._nll.update(weighted(self(**batch).loss, count))
        self._tokens.update(count)

    def _log_sums(self, name: str) -> None:
        tokens = self._tokens.compute()
        loss = self._nll.compute() / tokens
        values = {f"{name}/loss": loss.float(), f"{name}/perplexity": loss.exp().float()}
        if name == "test":
            values |= {"test/tokens": tokens.float(), "test/accuracy": (self._right.compute() / tokens).float()}
        for metric in (self._nll, self._tokens, self._right):
            metric.reset()
        self.log_dict(values, sync_dist=True, batch_size=1)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Score each row: ``nll`` [rows], summed over its supervised tokens, and their number ``supervised_tokens``."""
        logits, targets = self._logits_and_targets(batch)
        nll = token_nll(logits, targets)
        # where rows are split over ranks, each has the terms of its own tokens
        nll, counted = gather_sequence(nll, batch), gather_sequence(targets != -100, batch)
        return {"nll": nll.sum(1), "supervised_tokens": counted.sum(1)}

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["shift_labels"] if "shift_labels" in batch else shift_labels(batch["labels"])
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels")}
        if isinstance(getattr(self.model, "loss_function", None), CausalLMLoss):
            # With labels the strategy's loss makes logits only when they are read; these ask for no loss.
            inputs |= {"labels": (nothing := torch.full_like(targets, -100)), "shift_labels": nothing}
        logits = self(**inputs).logits
        return (logits.full_tensor() if hasattr(logits, "full_tensor") else logits), targets

    # ---- export

    @override
    def on_fit_end(self) -> None:
        if not self.hparams["export"] or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        from lightning_nd.checkpoint import save_adapter, save_pretrained

        assert self.model is not None
        given = self.hparams["export_dir"]
        folder = Path(given).expanduser() if given else Path(self.trainer.default_root_dir) / "export"
        # the data module's tokenizer carries the chat template that was trained with
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", self.tokenizer)
        if length := self.overrides.get("max_position_embeddings"):
            tokenizer.model_max_length = max(tokenizer.model_max_length, length)
        kind = "adapter" if self.lora is not None and self.hparams["export"] != "merged" else "model"
        if kind == "adapter":
            base = str(Path(self.source).absolute()) if Path(self.source).is_dir() else self.source
            save_adapter(self.model, folder, base=base, tokenizer=tokenizer, overwrite=True)
        else:
            save_pretrained(self.model, folder, tokenizer=tokenizer, overwrite=True)
        self.exported_to = folder
        if self.trainer.is_global_zero:
            dtype = json.loads((folder / "config.json").read_text()).get("dtype") if kind == "model" else None
            stored = f" in {dtype}" if dtype else ""
            rank_zero_info(f"Exported the {kind}{stored} to {folder.absolute()}")


def supervised_tokens(batch: Batch) -> Tensor:
    """The number of tokens of this rank's batch that the loss counts: every label that has a token before it."""
    if "shift_labels" in batch:  # under cp: shifted over whole rows before they were split
        return (batch["shift_labels"] != -100).sum()
    return (batch["labels"][:, 1:] != -100).sum()


def weighted(mean: Tensor, count: Tensor) -> Tensor:
    """``mean × count`` in float64, exactly zero when there is nothing to count (the mean of nothing is NaN)."""
    return torch.where(count > 0, mean.double() * count, 0.0)


def resolve_source(name: str) -> str:
    """A model folder or hub id as given: ``~`` and ``lightning_nd://`` resolved.

    Raises:
        ValueError: if it can only be a folder and there is none, or the folder holds no model.
    """
    path = resolve(os.path.expanduser(name))
    if path.startswith((".", "/")) and not Path(path).is_dir():
        raise ValueError(f"model: there is no folder {Path(path).absolute()}; give a model folder or a hub id.")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"model: {Path(path).absolute()} has no config.json, so it is not a Hugging Face model folder."
        )
    return path


def read_config(source: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model folder or hub id.

    Raises:
        ValueError: if it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot read the configuration of {source!r}: {error}") from error


def read_tokenizer(source: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Raises:
        ValueError: if it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer: cannot read a tokenizer from {source!r}: {error}\n"
            "Set model.init_args.tokenizer to a folder or hub id that has one."
        ) from error


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Refuse a tokenizer that can give ids without an embedding.

    Raises:
        ValueError: with the largest id and the number of embeddings.
    """
    rows = config.get_text_config().vocab_size
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise ValueError(
            f"tokenizer: {source!r} has ids up to {largest} ({token!r}), but the model has {rows} embeddings"
            " (vocab_size). Use the tokenizer that the model was trained with, or resize the model's"
            " embeddings first and save it."
        )
