"""One-rank runs on a GPU; skipped where there is none."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import make_model
from reference import compare
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _Module(pl.LightningModule):
    def __init__(self, family: str, rows: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.model = make_model(family)
        self.rows = rows

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)


def _rows(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (steps, 4, 24), generator=generator)
    labels = ids.clone()
    labels[:, 1, :9] = -100
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_fp32_training_equals_plain_torch(family: str, tmp_path: Any) -> None:
    rows = _rows(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(family).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for row in rows:
        model(**{k: v.cuda() for k, v in row.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=NDStrategy(activation_checkpointing="full"),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = _Module(family, rows)
    trainer.fit(module)
    got = {name: p.full_tensor().cpu() for name, p in module.model.named_parameters()}  # type: ignore[operator]
    want = {name: p.detach().cpu() for name, p in model.named_parameters()}
    assert compare(want, got)[0][0] < 1e-4


def test_bf16_mixed_keeps_fp32_master_weights(tmp_path: Any) -> None:
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=NDStrategy(),
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = _Module("llama", _rows(2))
    trainer.fit(module)
    assert {p.dtype for p in module.model.parameters()} == {torch.float32}
