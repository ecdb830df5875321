"""QLoRA: every layout gives what transformers, bitsandbytes and peft give in one process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from pool import Pool, tiny_trainer
from reference import Run, adamw, make_batches, train
from test_lora import Adapted
from test_lora_recipe import SEED, check, fit, folder, logits, name_of, optimizer
from tiny import tiny_tokenizer
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_nd import NDStrategy
from lightning_nd.parallelize import check_tensor_parallel
from lightning_nd.quantized import check_quantized
from lightning_nd.recipes import CausalLM, LoRA

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
__all__ = ["folder"]


def quantized(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers quantizes it."""
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, device_map="cpu", quantization_config=how
    )


def reference(folder: Path) -> tuple[Run, Any]:
    base = quantized(folder)
    torch.manual_seed(SEED)
    given = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_alpha=8)
    model = peft.get_peft_model(base, given).train()
    run = train(model, make_batches(3) * 2, clip_norm=0.5, optimizer=optimizer)
    strip = "base_model.model."
    run.grads = {name.removeprefix(strip): grad for name, grad in run.grads.items()}
    run.weights = {name.removeprefix(strip): value for name, value in run.weights.items() if not packed(value)}
    return run, model


def packed(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.uint8


def check_all(run: Run, got: Any, steps: slice = slice(None)) -> None:
    losses, norms, grads, weights, saved = got
    assert sum(map(packed, weights.values())) in (14, 21)  # seven layers in each of two or three blocks
    floating = {name: weight for name, weight in weights.items() if not packed(weight)}
    check(run, (losses, norms, grads, floating, saved), steps)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Run, Any]:
    return reference(folder)


@pytest.mark.parametrize("degrees", [{}, {"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}], ids=name_of)
def test_six_steps_and_the_adapter_equal_those_of_peft(
    pool: Pool, folder: Path, expected: tuple[Run, Any], tmp_path: Path, degrees: dict[str, int]
) -> None:
    run, model = expected
    check_all(run, pool.run(fit, 2 if degrees else 1, folder, degrees, out=tmp_path, quantization="nf4")[0])
    loaded = peft.PeftModel.from_pretrained(quantized(folder), tmp_path / "export")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)


def test_biases_checkpointing_and_going_on_with_another_layout(pool: Pool, tmp_path: Path) -> None:
    make_model("qwen2", vocab_size=272).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    run, _ = reference(tmp_path)
    given: Any = {"quantization": "nf4", "export": False}
    shards: Any = {"dp_shard": 2, "activation_checkpointing": "full"}
    pool.run(fit, 2, tmp_path, shards, out=tmp_path, epochs=1, **given)
    held = FileSystemReader(tmp_path / "half.ckpt").read_metadata().state_dict_metadata
    assert not [key for key in held if ".model." in key and "lora_" not in key]
    got = pool.run(fit, 2, tmp_path, {"cp": 2}, out=tmp_path, ckpt_path=tmp_path / "half.ckpt", **given)[0]
    check_all(run, got, slice(3, None))


class Own(Adapted):
    """A module that quantizes as transformers' documentation says."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        torch.manual_seed(SEED)
        given = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_alpha=8)
        super().__init__(peft.get_peft_model(quantized(folder, dtype), given).train(), make_batches(3))


def fit_own(rank: int, world: int, folder: Path, mixed: bool) -> tuple[list[float], list[int]]:
    module = Own(folder, torch.bfloat16 if mixed else torch.float32)
    precision: Any = {"precision": "bf16-mixed"} if mixed else {}
    strategy = NDStrategy(dp_shard=world)
    options: Any = {"max_epochs": 1, "use_distributed_sampler": False, "gradient_clip_val": 0.5}
    tiny_trainer(rank, world, strategy, **options, **precision).fit(module)
    held = [p.to_local().numel() for p in module.parameters() if packed(p)]  # type: ignore[attr-defined]
    return module.losses, held


@pytest.mark.parametrize("mixed", [False, True], ids=["32-true", "bf16-mixed"])
def test_a_model_that_the_user_has_quantized(pool: Pool, folder: Path, mixed: bool) -> None:
    want = train(Own(folder, torch.float32).model, make_batches(3), clip_norm=0.5, optimizer=adamw)
    losses, held = pool.run(fit_own, 2, folder, mixed)[0]
    assert losses == pytest.approx(want.losses, rel=1e-2 if mixed else 1e-5)
    whole = [p.numel() for p in quantized(folder).parameters() if packed(p)]
    assert [2 * size for size in held] == whole  # each rank has half of the bytes


def test_other_formats_are_refused_by_name(folder: Path) -> None:
    how = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", device_map="cpu", quantization_config=how)
    with pytest.raises(ValueError, match=r"q_proj \(Linear8bitLt\) holds quantized weights \(torch.int8\)"):
        check_quantized(model)


def test_refused_with_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(folder / "model")
    with pytest.raises(ValueError, match=r"q_proj is quantized, .* tp=2 would cut them\. Use tp=1 \(dp_shard"):
        check_tensor_parallel(CausalLM(model, lora=LoRA(quantization="nf4")).skeleton(), "auto", 2)
    with pytest.raises(ValueError, match="pairs belong to the stored weights"):
        CausalLM(model, lora=LoRA(quantization="nf4"), export="merged")
    with pytest.raises(ValueError, match=r"lora.quantization is 'int4'; it is nf4"):
        LoRA(quantization="int4")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.45.5")
    with pytest.raises(ValueError, match=r"bitsandbytes is 0\.45\.5, and it takes 0\.46 or newer"):
        LoRA(quantization="nf4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"bitsandbytes is not installed: pip install 'lightning-nd\[qlora\]'"):
        LoRA(quantization="nf4")
