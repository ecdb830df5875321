"""Every recipe is parsed, checked and played through by one rank of its own layout, on models of the real widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_tokenizer
from transformers import AutoConfig

from lightning_nd.cli.app import NDCLI
from lightning_nd.dryrun import dry_run

ROOT = Path(__file__).resolve().parents[1]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": LLAMA3_ROPE,
    "tie_word_embeddings": False,
}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_70B = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
# widths, heads and vocabulary of what the hub has under the recipe's name; depth is cut to two layers
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
    "Qwen/Qwen3-8B": QWEN3
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
    "Qwen/Qwen3-30B-A3B": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
LARGE = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if "accelerator: gpu" in path.read_text()]


def test_there_is_a_recipe_for_every_size() -> None:
    assert {path.stem for path in LARGE} >= {
        "llama-8b-full",
        "llama-8b-lora",
        "llama-8b-128k",
        "llama-70b-full",
        "qwen3-8b-hsdp",
        "qwen3-30b-moe",
    }


@pytest.mark.parametrize("recipe", LARGE, ids=lambda path: path.stem)
def test_a_rank_of_the_recipe_takes_a_step(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(recipe.read_text())
    config = AutoConfig.for_model(**CONFIGS[given["model"]["init_args"]["model"]], num_hidden_layers=2)
    config.architectures = None
    config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    cli = NDCLI(
        "fit",
        ["--config", str(recipe), "--model.model", str(tmp_path / "model"), "--trainer.accelerator", "cpu"],
    )
    data, trainer = given["data"]["init_args"], given["trainer"]
    cli.trainer.accumulate_grad_batches = 1
    seen = dry_run(cli.trainer, cli.model, cli.datamodule, steps=1)
    ranks = trainer["devices"] * trainer.get("num_nodes", 1)
    dims = cli.trainer.strategy.dims  # type: ignore[attr-defined]
    assert dims.world_size == ranks
    assert seen.tokens == data["micro_batch_size"] * data["max_length"] // dims.cp
    held = seen.sizes["parameters"] / (dims.dp_shard * dims.cp * dims.tp)
    assert held <= seen.sizes["local"] <= 1.01 * held  # norms are whole on every tp rank
