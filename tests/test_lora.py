"""LoRA through peft: every layout gives the numbers of peft in one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import make_model
from parity import full_grads, full_weights
from pool import Pool, tiny_trainer
from reference import adamw, compare, make_batches, rows_of, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy
from lightning_nd.parallelize import check_tensor_parallel

peft = pytest.importorskip("peft")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def with_adapters(family: str, targets: list[str], *, base: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A frozen model with float32 low-rank pairs, both of them random: as peft starts them, B is zero."""
    model = make_model(family, **overrides).to(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return model.train()


class Adapted(pl.LightningModule):
    def __init__(self, model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.model, self.batches = model, batches
        self.grads: dict[str, Tensor | None] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train_dataloader(self) -> Any:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(batch, place["rank"], place["num_replicas"]) for batch in self.batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = self.grads or full_grads(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(float(self.trainer.strategy.last_grad_norm))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return adamw(p for p in self.parameters() if p.requires_grad)


def adapt(
    rank: int, world_size: int, degrees: dict[str, int], family: str, targets: list[str], options: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    module = Adapted(with_adapters(family, targets, **options), make_batches(3))
    strategy = NDStrategy(**degrees)  # type: ignore[arg-type]
    tiny_trainer(rank, world_size, strategy, max_epochs=1, use_distributed_sampler=False, gradient_clip_val=0.5).fit(
        module
    )
    return module.losses, module.norms, module.grads, full_weights(module.model)


def mean_error(want: dict[str, Tensor | None], got: dict[str, Tensor | None], names: set[str]) -> float:
    errors = compare({n: want[n] for n in names}, {n: got[n] for n in names})
    return sum(error for error, _ in errors) / len(errors)


@pytest.mark.parametrize(
    ("degrees", "family", "targets", "options"),
    [
        ({"dp_shard": 2}, "llama", LINEAR, {}),
        ({"dp_shard": 2}, "llama", ATTENTION, {"base": torch.bfloat16}),
        ({"tp": 2}, "llama", LINEAR, {}),
        ({"tp": 2, "sequence_parallel": False}, "llama", LINEAR, {}),
        ({"tp": 2}, "qwen2", ATTENTION, {}),
        ({"tp": 2}, "llama", [*LINEAR, "lm_head"], {}),
        ({"tp": 2}, "phi3", PHI3, {}),
        ({"tp": 2}, "llama", LINEAR, {"num_key_value_heads": 1}),
        ({"cp": 2}, "llama", LINEAR, {}),
        ({"dp_shard": 2, "tp": 2}, "llama", ATTENTION, {"base": torch.bfloat16}),
        ({"dp_shard": 2, "tp": 2}, "qwen3", LINEAR, {}),
    ],
)
def test_adapters_train_as_in_one_process(
    pool: Pool, degrees: dict[str, int], family: str, targets: list[str], options: dict[str, Any]
) -> None:
    model = with_adapters(family, targets, **options)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    want = train(model, make_batches(3), clip_norm=0.5, optimizer=adamw)
    ranks = 1
    for axis in ("dp_shard", "tp", "cp"):
        ranks *= degrees.get(axis, 1)
    losses, norms, grads, weights = pool.run(adapt, ranks, degrees, family, targets, options, timeout=120)[0]
    pairs = {name for name in want.grads if "lora_" in name}
    assert {name for name, grad in grads.items() if grad is not None} == pairs
    if options.get("base") == torch.bfloat16:
        exact = with_adapters(family, targets, base=torch.bfloat16).float()  # the same weights, float32 arithmetic
        truth = train(exact, make_batches(3), clip_norm=0.5, optimizer=adamw)
        assert losses == pytest.approx(truth.losses, rel=2e-3)
        theirs, ours = (mean_error(truth.grads, run, pairs) for run in (want.grads, grads))
        assert ours < 1.3 * theirs  # rounding of one process, in another order
    else:
        assert losses == pytest.approx(want.losses, rel=1e-5)
        assert norms == pytest.approx(want.grad_norms, rel=1e-5)
        worst = compare({n: want.grads[n] for n in pairs}, {n: grads[n] for n in pairs})[0]
        assert worst[0] < 1e-5, worst
        worst = compare(want.weights, weights)[0]
        assert worst[0] < 1e-4, worst
    for name, value in frozen.items():
        assert torch.equal(weights[name], value), name
        assert weights[name].dtype == options.get("base", torch.float32)
    assert {weights[name].dtype for name in pairs} == {torch.float32}


def test_other_adapters_are_refused_by_name() -> None:
    model = make_model("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"q_proj is a layer with an adapter \(lora_magnitude_vector\)"):
        check_tensor_parallel(peft.get_peft_model(model, config).base_model.model, "auto", 2)
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"embed_tokens is a layer with an adapter"):
        check_tensor_parallel(peft.get_peft_model(make_model("llama"), config).base_model.model, "auto", 2)
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"q_proj is a layer with an adapter"):
        check_tensor_parallel(peft.get_peft_model(make_model("llama"), config).base_model.model, "auto", 2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="dropout"):
        check_tensor_parallel(peft.get_peft_model(make_model("llama"), config).base_model.model, "auto", 2)
