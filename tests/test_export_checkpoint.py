"""``lightning-nd export``: the folder made of a checkpoint is the one that the run itself exports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from pool import Pool, tiny_trainer
from resuming import write_rows
from safetensors import safe_open
from tiny import TEMPLATE, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_nd import NDStrategy
from lightning_nd.checkpoint import load_pretrained, materialize
from lightning_nd.checkpoint.merge import stored_weights
from lightning_nd.cli.main import main
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_rows(path / "rows.jsonl", 8)
    for name, overrides in FAMILIES.items():
        tiny_model(**overrides).to(torch.bfloat16).save_pretrained(path / name)
        tiny_tokenizer().save_pretrained(path / name)
    return path


def fit(rank: int, world: int, folder: Path, name: str, lora: Any, sharded: bool) -> None:
    """Train on tp2, save a checkpoint, and export what is in memory."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    out = folder / f"out-{name}"
    export: Any = "merged" if lora else True
    module = CausalLM(str(folder / name), lora=lora, export=export, export_dir=str(out / "own"))
    strategy = NDStrategy(dp_shard=1, tp=2, save_distributed_checkpoint=sharded)
    trainer = tiny_trainer(rank, world, strategy, max_steps=2, precision="bf16-mixed")
    template = folder / "template.jinja"
    template.write_text("{# trained with #}" + TEMPLATE)
    rows = str(folder / "rows.jsonl")
    trainer.fit(module, ChatDataModule(rows, micro_batch_size=4, chat_template=str(template)))
    trainer.save_checkpoint(out / "run.ckpt")


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def logits(folder: Path) -> Tensor:
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits.float()


@pytest.mark.parametrize(("name", "sharded"), [("llama", True), ("tied", False), ("experts", True)])
def test_c07_c09_the_folder_is_that_of_the_run(pool: Pool, folder: Path, name: str, sharded: bool) -> None:
    pool.run(fit, 2, folder, name, None, sharded)
    out, base = folder / f"out-{name}", folder / name
    assert main(["export", "--checkpoint", str(out / "run.ckpt"), "--output", str(out / "made")]) == 0
    own, made, start = tensors(out / "own"), tensors(out / "made"), tensors(base)
    kind = {key: (value.shape, value.dtype) for key, value in start.items()}
    assert {key: (value.shape, value.dtype) for key, value in made.items()} == kind  # nothing lost, empty or widened
    for key, value in own.items():
        assert torch.equal(made[key], value), key
    assert any(not torch.equal(made[key], start[key]) for key in made)
    assert torch.equal(logits(out / "made"), logits(out / "own"))
    config = json.loads((out / "made" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is (name == "tied")
    assert AutoTokenizer.from_pretrained(out / "made").chat_template.startswith("{# trained with #}")
    if name != "experts":  # held as they are trained
        read = CausalLM.load_from_checkpoint(str(out / "run.ckpt")).model.state_dict()
        for key, value in made.items():
            assert torch.equal(read[key].to(value.dtype), value), key


def test_dtype_shards_and_a_folder_that_is_not_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = str(folder / "out-llama" / "run.ckpt"), folder / "small"
    arguments = ["export", "--checkpoint", checkpoint, "--output", str(out), "--dtype", "fp32", "--shard-size", "40KB"]
    assert main(arguments) == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    assert {value.dtype for value in tensors(out).values()} == {torch.float32}
    assert main(arguments) != 0
    assert "is not empty" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert main(["export", "--checkpoint", checkpoint, "--output", str(folder / "x"), "--adapter"]) == 2
    assert "not of a LoRA run" in capsys.readouterr().err


def test_c16_lora_adapter_and_merged(pool: Pool, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = folder / "lora"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    pool.run(fit, 2, folder, "lora", {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}, True)
    out = folder / "out-lora"
    checkpoint = str(out / "run.ckpt")
    assert main(["export", "--checkpoint", checkpoint, "--output", str(out / "adapter")]) == 0
    assert main(["export", "--checkpoint", checkpoint, "--output", str(out / "merged"), "--merge"]) == 0
    merged, own = tensors(out / "merged"), tensors(out / "own")
    assert merged.keys() == own.keys()
    for key, value in own.items():
        assert (merged[key].float() - value.float()).abs().max() <= 1e-2 * value.float().abs().max(), key
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        beside = model(input_ids=ids).logits
        read = CausalLM.load_from_checkpoint(checkpoint).model(input_ids=ids).logits
    assert (beside - logits(out / "merged")).abs().max() <= 1e-4 * beside.abs().max()
    assert (beside - read).abs().max() <= 1e-4 * beside.abs().max()
    for key, value in model.merge_and_unload().state_dict().items():
        assert torch.equal(merged[key], value), key


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"tie_word_embeddings": True}), ("mixtral", {}), ("phi3", {}), ("gpt_oss", {}), ("gemma3", {})],
)
def test_stored_weights_one_by_one_are_those_of_a_load(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    make_model(family, **overrides).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    with stored_weights(loaded) as read:
        found = {name: read(name).clone() for name in loaded.state_dict()}
    materialize(loaded, "cpu")
    wanted = loaded.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name].float(), wanted[name])] == []
