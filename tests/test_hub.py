"""Loading, drawing and saving in one process, and every refusal."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_config, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from lightning_nd import from_config, load_pretrained, save_pretrained
from lightning_nd.checkpoint import _transformers, materialize, recompute_buffers


def contents(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = [n for n in wanted if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]
    assert wrong == []


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_load_equals_from_pretrained(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    make_model(family, vocab_size=257).save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = load_pretrained(tmp_path, dtype=dtype)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu")
    assert_same(contents(model), contents(wanted))
    assert model.training
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()


def test_long_context_rope_is_recomputed_exactly(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    make_model("llama", rope_parameters=rope | {"original_max_position_embeddings": 64}).save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = load_pretrained(tmp_path, dtype=torch.bfloat16)
    materialize(model, "cpu")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert_same(dict(model.named_buffers()), dict(wanted.named_buffers()))


def test_recompute_buffers_undoes_a_cast(llama: Path) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(llama)
    model = AutoModelForCausalLM.from_pretrained(llama).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    recompute_buffers(model, "cpu")
    assert_same(dict(model.named_buffers()), dict(wanted.named_buffers()))


def test_a_model_with_real_weights_is_left_alone() -> None:
    model = make_model("llama")
    before = {n: (id(t), t.clone()) for n, t in contents(model).items()}
    materialize(model, "cpu")
    assert {n: id(t) for n, t in contents(model).items()} == {n: i for n, (i, _) in before.items()}


def test_frozen_parameters_stay_frozen(llama: Path) -> None:
    model = load_pretrained(llama)
    model.model.embed_tokens.requires_grad_(False)
    materialize(model, "cpu")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"model.embed_tokens.weight"}


def test_meta_model_without_a_source_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("llama"))
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM is on meta .*\.load_pretrained"):
        materialize(model, "cpu")


# --- conversions that move more than pieces


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama as if it were stored with gate and up in one tensor and with a transposed down projection."""
    rules = [
        WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(0)]),
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]),
    ]
    monkeypatch.setattr(_transformers, "conversions_of", lambda model: copy.deepcopy(rules))


def test_conversions_of_whole_tensors_both_ways(converted: None, tmp_path: Path) -> None:
    wanted = make_model("llama")
    (tmp_path / "stored").mkdir()
    stored = {n: p.detach() for n, p in wanted.named_parameters()}
    for layer in range(wanted.config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp."
        parts = [stored.pop(f"{mlp}{n}_proj.weight") for n in ("gate", "up")]
        stored[f"{mlp}gate_up.weight"] = torch.cat(parts)
        stored[f"{mlp}down.weight"] = stored.pop(f"{mlp}down_proj.weight").T.contiguous()
    save_file(stored, tmp_path / "stored" / "model.safetensors", metadata={"format": "pt"})
    wanted.config.save_pretrained(tmp_path / "stored")
    model = load_pretrained(tmp_path / "stored")
    materialize(model, "cpu")
    assert_same(contents(model), contents(wanted))
    save_pretrained(model, tmp_path / "saved")
    assert_same(load_file(tmp_path / "saved" / "model.safetensors"), stored)


# --- random weights


def test_random_weights_follow_seed_and_dtype() -> None:
    def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        model = from_config(make_config("qwen2"), seed=seed, dtype=dtype)
        torch.manual_seed(torch.seed() % 1000)  # the global generator has no say
        materialize(model, "cpu")
        return dict(model.named_parameters())

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert_same(again, first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert_same(drawn(1, torch.bfloat16), {n: p.bfloat16() for n, p in first.items()})
    weights = [p for p in first.values() if p.ndim == 2]
    assert all(abs(p.std().item() / 0.1 - 1) < 0.05 for p in weights)  # initializer_range of the families
    assert len({p.flatten()[0].item() for p in weights}) == len(weights)


def test_parents_that_initialise_their_childrens_weights() -> None:
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=8, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = from_config(config)
    materialize(model, "cpu")
    block = model.transformer.h[0].mlp
    assert block.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.c_proj.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    materialize(from_config(make_config("llama")), "cpu")
    assert torch.equal(torch.rand(3), wanted)


# --- refusals, before anything is loaded


def test_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"no folder {tmp_path}/models/nothing\. Give a folder with config"):
        load_pretrained("./models/nothing")
    with pytest.raises(FileNotFoundError, match=rf"no folder {tmp_path}/nothing, and 'nothing' could not be had"):
        load_pretrained("nothing")


def test_folder_without_what_is_needed(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"No model\.safetensors .* holds .*pytorch_model\.bin"):
        load_pretrained(llama)
    (llama / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"No config\.json in .*llama, which holds"):
        load_pretrained(llama)


def test_files_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        load_pretrained(tmp_path)


def test_unknown_override_names_the_nearest(llama: Path) -> None:
    with pytest.raises(ValueError, match="no field 'rms_norm_epps'; the nearest is 'rms_norm_eps'"):
        load_pretrained(llama, rms_norm_epps=1e-5)
    assert load_pretrained(llama, rms_norm_eps=1e-5).config.rms_norm_eps == 1e-5


def test_quantized_weights_are_refused(llama: Path) -> None:
    edit(llama, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantized weights \(fp8\)"):
        load_pretrained(llama)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_weights_that_do_not_fit_are_all_named(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.extra.weight"] = torch.zeros(2)
    weights["lm_head.weight"] = torch.zeros(3, 64)
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        load_pretrained(llama)
    assert "the folder does not: model.norm.weight;" in str(error.value)
    assert "the model does not: model.extra.weight;" in str(error.value)
    assert "lm_head.weight: [3, 64] stored (lm_head.weight), [256, 64] in the model" in str(error.value)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts\.down_proj: \[3, 64, 128\] stored"):
        load_pretrained(tmp_path)


def test_fewer_layers_than_stored_is_not_silent(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"the model does not: model\.layers\.1\."):
        load_pretrained(llama, num_hidden_layers=1)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tie_explains_one_missing_weight(llama: Path, kept: str) -> None:
    weights = load_file(llama / "model.safetensors")
    other = ({"model.embed_tokens.weight", "lm_head.weight"} - {kept}).pop()
    del weights[other]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    model = load_pretrained(llama, tie_word_embeddings=True)
    materialize(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights[kept])


def test_ties_that_the_weights_contradict(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"ties lm_head\.weight .* different values .* tie_word_embeddings=False"):
        load_pretrained(llama, tie_word_embeddings=True)


# --- saving


def test_saved_dtype(tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "mixed")
    original = load_file(tmp_path / "mixed" / "model.safetensors")
    assert {t.dtype for t in original.values()} == {torch.float32, torch.bfloat16}
    model = load_pretrained(tmp_path / "mixed", dtype=torch.float32)
    materialize(model, "cpu")
    save_pretrained(model, tmp_path / "back")
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), original)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    save_pretrained(model, tmp_path / "wide", dtype=torch.float32)
    assert_same(load_file(tmp_path / "wide" / "model.safetensors"), {n: t.float() for n, t in original.items()})


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "gpt_neox"])
def test_folder_equals_that_of_transformers(tmp_path: Path, family: str) -> None:
    model = from_config(make_config(family))
    materialize(model, "cpu")
    before = model.config.to_dict()
    save_pretrained(model, tmp_path / "ours")
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "theirs")
    names = {p.name for p in (tmp_path / "theirs").iterdir()}
    assert {p.name for p in (tmp_path / "ours").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )
    assert_same(*(load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs")))
    assert {p.name for p in tmp_path.iterdir()} == {"ours", "theirs"}  # nothing is left beside them


def test_shards_and_index(tmp_path: Path) -> None:
    model = make_model("llama")
    save_pretrained(model, tmp_path / "ours", max_shard_size="200KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    ours, theirs = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("ours", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert len(set(ours["weight_map"].values())) == 3
    assert_same(contents(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), contents(model))


def test_what_is_replaced(tmp_path: Path) -> None:
    model, target = make_model("llama"), tmp_path / "out"
    save_pretrained(model, target, max_shard_size="100KB")
    with pytest.raises(FileExistsError, match="is not empty"):
        save_pretrained(model, target)
    save_pretrained(model, target, overwrite=True)
    assert len(list(target.glob("*.safetensors*"))) == 1  # the old shards are gone
    (target / "logs").mkdir()
    with pytest.raises(FileExistsError, match=r"holds logs\. Give another folder"):
        save_pretrained(model, target, overwrite=True)
    (target / "config.json").unlink()
    (target / "logs").rmdir()
    with pytest.raises(FileExistsError, match=r"it holds .*model\.safetensors"):
        save_pretrained(model, target, overwrite=True)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = make_model("llama"), tmp_path / "out"
    save_pretrained(model, target)
    before = load_file(target / "model.safetensors")

    def fail(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning_nd.checkpoint.export._write", fail)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, target, overwrite=True)
    assert_same(load_file(target / "model.safetensors"), before)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_undone_ties_are_not_lost_silently(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        save_pretrained(model, tmp_path / "out")


def test_meta_models_are_not_saved(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on meta: call materialize"):
        save_pretrained(load_pretrained(llama), tmp_path / "out")
