"""Values of a model's configuration that a recipe replaces take effect, down to the export, or are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_nd.checkpoint import load_pretrained, materialize, save_pretrained
from lightning_nd.recipes import CausalLM
from lightning_nd.recipes.overrides import apply_overrides, check_length

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that was made for long rows: a scaling of its own, another base frequency (old names, as on the hub)."""
    tiny_model(max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}))
    return tmp_path / "model"


def frequencies(model: Any) -> torch.Tensor:
    return model.model.rotary_emb.inv_freq


def loaded(folder: Path, overrides: dict[str, Any]) -> Any:
    module = CausalLM(str(folder), config_overrides=overrides)
    model = load_pretrained(folder, **module.overrides)
    materialize(model, "cpu")
    return model


def test_H04_a_models_own_scaling_is_kept_unless_another_is_asked_for(folder: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.config.rope_parameters["rope_theta"] == 500000.0
    assert torch.equal(frequencies(loaded(folder, {})), frequencies(plain))
    model = loaded(folder, {"max_position_embeddings": 4096})  # a longer limit is no scaling
    assert torch.equal(frequencies(model), frequencies(plain))
    save_pretrained(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.rope_parameters == plain.config.rope_parameters
    assert again.config.max_position_embeddings == 4096
    assert torch.equal(frequencies(again), frequencies(plain))


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_another_scaling_keeps_the_base_frequency(folder: Path, name: str) -> None:
    model = loaded(folder, {name: {"rope_type": "linear", "factor": 4.0}})
    exponents = torch.arange(0, 8, 2).float() / 8
    torch.testing.assert_close(frequencies(model), 500000.0**-exponents / 4)
    assert model.config.max_position_embeddings == 256 * 4  # the length before its own scaling × the new factor


def test_a_base_frequency_takes_effect(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = loaded(tmp_path, {"rope_theta": 1e6})
    torch.testing.assert_close(frequencies(model), 1e6 ** -(torch.arange(0, 8, 2).float() / 8))


def test_H05_rows_beyond_the_limit_need_a_scaling_and_the_export_carries_it(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 256
    tokenizer.save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"max_length=1024 is beyond the 256 positions.*factor: 4.0"):
        check_length(config, 1024)
    apply_overrides(config, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    check_length(config, 1024)

    from lightning.pytorch import Trainer

    module = CausalLM(
        str(tmp_path / "model"),
        config_overrides={"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        export_dir=str(tmp_path / "out"),
    )
    ids = torch.randint(3, 250, (1, 1024), generator=torch.Generator().manual_seed(0))
    Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).fit(module, DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None))  # type: ignore[arg-type]
    out = AutoConfig.from_pretrained(tmp_path / "out")
    assert out.max_position_embeddings == 1024
    assert out.rope_parameters["rope_type"] == "yarn"
    assert out.rope_parameters["original_max_position_embeddings"] == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 1024


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarnn", "factor": 2.0}}, "no rope_type 'yarnn': did you mean 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' cannot be computed from"),
        ({"rope_scaling": 4.0}, "rope_scaling is 4.0; it must be a mapping"),
        ({"rope_thetta": 1.0}, "LlamaConfig has no 'rope_thetta'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor of the rotary embedding is -1"),
        ({"rope_theta": "x"}, "rope_theta of the rotary embedding is 'x'"),
        ({"rope_parameters": {"rope_type": "yarn", "facter": 2.0}}, "no 'facter': did you mean 'factor'"),
        ({"dtype": "bfloat16"}, "'dtype' has no effect here; the weights' dtype is model.dtype"),
        ({"architectures": ["X"]}, "it says what the model is"),
        ({"hidden_act": "nope"}, r"\{'hidden_act': 'nope'\} gives no model: KeyError"),
        ({"pad_token_id": 999}, "gives no model: AssertionError"),
    ],
)
def test_refused(folder: Path, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CausalLM(str(folder), config_overrides=overrides).skeleton()


def test_the_factor_that_is_advised_is_enough(folder: Path) -> None:
    module = CausalLM(str(folder))
    reach = module.config.max_position_embeddings
    with pytest.raises(ValueError, match=r"rope_type: yarn, factor: \d+\.0") as refused:
        module.preflight(SimpleNamespace(max_length=2 * reach))
    factor = float(re.search(r"factor: ([\d.]+)\}", str(refused.value)).group(1))  # type: ignore[union-attr]
    scaled = CausalLM(str(folder), config_overrides={"rope_parameters": {"rope_type": "yarn", "factor": factor}})
    scaled.preflight(SimpleNamespace(max_length=2 * reach))
    assert scaled.config.max_position_embeddings == 2 * reach


def test_a_model_without_rotary_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2Config has no rotary embedding"):
        apply_overrides(AutoConfig.for_model("gpt2"), {"rope_theta": 1e6})
