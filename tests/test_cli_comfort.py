"""Converted configurations, the schema of recipes, and completion: made from the code, and so complete."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_nd.cli.app import NDCLI
from lightning_nd.cli.completion import script
from lightning_nd.cli.convert import PLAIN, UNNEEDED, convert
from lightning_nd.cli.main import COMMANDS, main
from lightning_nd.cli.paths import PathResolver
from lightning_nd.cli.schema import of_type, recipe_schema

ROOT = Path(__file__).resolve().parents[1]
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "model_type": "LlamaForCausalLM",
    "trust_remote_code": True,
    "datasets": [
        {"path": "data/a.jsonl", "type": "chat_template", "roles_to_train": ["assistant"]},
        {"path": "org/set", "name": "small", "split": "train_sft", "type": "sharegpt"},
    ],
    "test_datasets": [{"path": "data/val.jsonl", "type": "chat_template"}],
    "dataset_prepared_path": "prepared",
    "output_dir": "out",
    "chat_template": "chatml",
    "train_on_inputs": True,
    "sequence_len": 4096,
    "sample_packing": True,
    "excess_length_strategy": "truncate",
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_fan_in_fan_out": True,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 3,
    "optimizer": "adamw_torch_fused",
    "adam_beta2": 0.95,
    "lr_scheduler": "linear",
    "warmup_steps": 10,
    "cosine_min_lr_ratio": 0.1,
    "learning_rate": 2e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "bf16": "auto",
    "fp16": True,
    "gradient_checkpointing": "offload",
    "flash_attention": True,
    "evals_per_epoch": 4,
    "save_steps": 100,
    "save_total_limit": 2,
    "resume_from_checkpoint": "out/checkpoint-100",
    "tensor_parallel_size": 2,
    "fsdp_version": 2,
    "fsdp_config": {"offload_params": True, "reshard_after_forward": False},
    "wandb_project": "mine",
    "hub_model_id": "org/mine",
    "rl": "dpo",
    "something_new": 7,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Parsed(NDCLI):
    def instantiate_classes(self) -> None:
        pass


def test_a_converted_configuration_is_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathResolver, "check", lambda *_: None)
    out = convert(AXOLOTL)
    Path("recipe.yaml").write_text(yaml.safe_dump(out.recipe))
    config = Parsed("fit", ["--config", "recipe.yaml", "--nd.dp_shard", "1"]).config
    assert config.nd.tp == 2
    assert config.nd.cpu_offload
    assert config.nd.reshard_after_forward is False
    assert config.nd.activation_checkpointing == "full"
    data, optimizer = config.data.init_args, config.optimizer
    assert data.train[1] == {"hub": "org/set", "split": "train_sft", "config": "small"}
    assert (data.max_length, data.packing, data.train_on, data.on_too_long) == (4096, True, "all", "truncate")
    assert optimizer.class_path == "torch.optim.AdamW"
    assert (optimizer.init_args.lr, list(optimizer.init_args.betas)) == (2e-4, [0.9, 0.95])
    assert (config.trainer.gradient_clip_val, config.trainer.val_check_interval) == (0.5, 0.25)
    assert config.lr_scheduler.init_args.as_dict().items() >= {"warmup": 10, "decay": "linear", "final": 0.1}.items()
    assert config.model.init_args.lora.as_dict().items() >= {"r": 8, "alpha": 16.0, "dropout": 0.05}.items()
    assert set(out.lost) == {
        "datasets[1].type", "chat_template", "fp16", "gradient_checkpointing", "save_total_limit", "wandb_project",
        "hub_model_id", "rl", "something_new", "resume_from_checkpoint", "lora_fan_in_fan_out",
    }  # fmt: skip


def everything_said(given: dict[str, Any]) -> tuple[Any, ...]:
    out = convert(given)
    return out.recipe, out.lost, out.unneeded, out.notes


@pytest.mark.parametrize("key", [*AXOLOTL, *(PLAIN.keys() | UNNEEDED.keys()) - AXOLOTL.keys()])
def test_no_setting_is_dropped_in_silence(key: str) -> None:
    without = {name: value for name, value in AXOLOTL.items() if name != key}
    assert everything_said(without | {key: AXOLOTL.get(key, 3)}) != everything_said(without)


def test_what_the_trainer_of_transformers_takes_by_default_is_written_down() -> None:
    recipe = convert({"base_model": "x"}).recipe
    assert recipe["optimizer"]["init_args"]["betas"] == [0.9, 0.999]
    assert recipe["trainer"]["gradient_clip_val"] == 1.0
    assert recipe["lr_scheduler"]["init_args"] == {"decay": "cosine", "warmup": 0.0}
    assert convert({"base_model": "x", "adapter": "qlora", "load_in_4bit": True}).lost == {}


def test_the_command_writes_the_list_into_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("axolotl.yml").write_text(yaml.safe_dump(AXOLOTL))
    assert main(["convert-config", "axolotl.yml", "--output", "recipe.yaml"]) == 0
    assert "something_new: there is no such setting here" in capsys.readouterr().out
    assert "#   something_new: there is no such setting here\n" in Path("recipe.yaml").read_text()
    assert yaml.safe_load(Path("recipe.yaml").read_text()) == convert(AXOLOTL).recipe
    assert main(["convert-config", "axolotl.yml", "--strict"]) == 1
    Path("other.yml").write_text("model: x\n")
    for file, words in (("other.yml", "no base_model"), ("none.yml", "There is no file")):
        assert main(["convert-config", file]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


def test_the_schema_knows_every_key(schema: dict[str, Any]) -> None:
    assert {"nd", "trainer", "model", "data", "optimizer", "lr_scheduler"} <= schema["properties"].keys()
    assert schema["properties"]["nd"]["properties"]["tp"]["type"] == "integer"
    assert of_type(int | None) == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert of_type(list[str]) == {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_takes_every_recipe(recipe: Path, schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    content = yaml.load(recipe.read_text(), _Yaml12)
    jsonschema.Draft202012Validator(schema).validate(content)
    for path, value in (("nd", {"tpp": 2}), ("data", {"init_args": {"max_len": 2}}), ("nd", {"tp": "two"})):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(content | {path: value})


class _Yaml12(yaml.SafeLoader):
    """Reads 1e-5 as editors do."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        value = super().construct_object(node, deep)
        if isinstance(node, yaml.ScalarNode) and isinstance(value, str) and node.style is None:
            try:
                return float(value)
            except ValueError:
                return value
        return value


def completed(source: Path, *words: str) -> list[str]:
    line = f"COMP_WORDS=(lightning-nd {' '.join(repr(w) for w in words)}); COMP_CWORD={len(words)}; _lightning_nd"
    command = f'source {source}; {line}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()


def test_completion_knows_commands_options_and_choices(tmp_path: Path) -> None:
    source = tmp_path / "completion.sh"
    source.write_text(script("bash"))
    assert set(completed(source, "")) == set(COMMANDS)
    assert completed(source, "fit", "--nd.tp") == ["--nd.tp", "--nd.tp_plan"]
    assert "--data.packing" in completed(source, "fit", "--data.")
    assert completed(source, "fit", "--nd.cp_method", "") == ["auto", "direct", "ring", "ulysses"]
    assert completed(source, "export", "--m") == ["--merge"]
    (tmp_path / "recipe.yaml").touch()
    assert completed(source, "fit", "--config", "reci") == ["recipe.yaml"]
    assert script("zsh").splitlines()[1].startswith("autoload")
    assert main(["completion", "fish"]) == 2


def test_the_schema_can_be_written(tmp_path: Path) -> None:
    assert main(["schema", "--output", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"] == "lightning-nd recipe"
