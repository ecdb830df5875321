"""How long a save stops training, in the background against in the foreground, and its peak memory; in one run.

python benchmarks/checkpoint_save.py [--hidden 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from memory import Peak
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_nd import NDStrategy


class Model(LightningModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randint(0, 8192, (2, 1, 16)), batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    folder = Path(tempfile.mkdtemp(prefix="saves-"))
    strategy = NDStrategy(async_checkpoint=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    never = ModelCheckpoint(folder, every_n_train_steps=1000)  # but it makes the strategy take memory for it
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, callbacks=[never], **quiet)
    module = Model(given.hidden)
    found: dict[str, list[float]] = {"foreground": [], "background": []}
    peaks: dict[str, int] = {}

    def measure() -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        first: dict[str, float] = {}
        for round_ in range(given.rounds + 1):
            for kind in found:
                strategy.saver.in_background = kind == "background"
                with Peak() as peak:
                    began = time.perf_counter()
                    trainer.save_checkpoint(folder / "x.ckpt")
                    stopped = time.perf_counter() - began
                    strategy.saver.wait()
                    whole = time.perf_counter() - began
                print(f"{kind}: stopped for {1e3 * stopped:.0f} ms, written in {1e3 * whole:.0f} ms", flush=True)
                if not round_:
                    first[kind] = stopped
                    continue
                found[kind].append(stopped)
                peaks[kind] = max(peaks.get(kind, 0), peak.most)
        with Peak() as peak:
            strategy.saver.load(trainer, folder / "x.ckpt", strategy.optimizers, None)
        tensor = max(p.numel() * p.element_size() for p in module.parameters())
        middle = {kind: sorted(times)[len(times) // 2] for kind, times in found.items()}
        pairs = [b / f for f, b in zip(found["foreground"], found["background"], strict=True)]
        print(
            f"state of {3 * size / 1e6:.0f} MB, its largest tensor {tensor / 1e6:.0f} MB: stopped for"
            f" {1e3 * middle['foreground']:.0f} ms in the foreground and {1e3 * middle['background']:.0f} ms in the"
            f" background ({middle['background'] / middle['foreground']:.3f}; single pairs {min(pairs):.3f} to"
            f" {max(pairs):.3f}, the first of all {first['background'] / first['foreground']:.3f});"
            " peak memory above that of training:"
            f" {peaks['foreground'] / 1e6:.0f} MB, {peaks['background'] / 1e6:.0f} MB, and {peak.most / 1e6:.0f} MB to"
            " load"
        )

    module.on_train_end = measure  # type: ignore[method-assign]
    trainer.fit(module)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
