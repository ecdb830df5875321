"""LoRA in the recipe: from the folder to the adapter, every layout gives what peft gives in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from parity import full, full_grads
from pool import Pool, tiny_trainer
from reference import Run, adamw, compare, make_batches, rows_of, train
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_nd import NDStrategy
from lightning_nd.checkpoint import save_adapter
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM, LoRA

peft = pytest.importorskip("peft")
SEED = 7
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
LAYOUTS = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2, "tp": 2}, {"cp": 2, "tp": 2}]


def optimizer(parameters: Any) -> torch.optim.AdamW:
    """B starts at zero: a larger eps keeps the rounding of its small gradients from deciding its first steps."""
    return adamw(parameters, eps=1e-3, lr=2e-2)


def name_of(degrees: dict[str, int]) -> str:
    return "x".join(f"{axis}{degree}" for axis, degree in degrees.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    tiny_model(initializer_range=0.1).save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    return path


class Recipe(CausalLM):
    """The recipe on given batches, with what it saw."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grads: dict[str, Tensor | None] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train_dataloader(self) -> Any:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(batch, place["rank"], place["num_replicas"]) for batch in make_batches(3)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = self.grads or full_grads(self.model)
        super().on_before_optimizer_step(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.losses.append(float(strategy.step_loss))
        self.norms.append(float(strategy.last_grad_norm))
        super().on_train_batch_end(*args)

    def configure_optimizers(self) -> Any:
        return optimizer(p for p in self.parameters() if p.requires_grad)


def fit(
    rank: int,
    world: int,
    folder: Path,
    degrees: dict[str, int],
    *,
    out: Path,
    epochs: int = 2,
    ckpt_path: Path | None = None,
    export: Any = True,
    dtype: str = "auto",
    trainer: dict[str, Any] | None = None,
    save_distributed_checkpoint: bool = True,
    **lora: Any,
) -> tuple[list[float], list[float], dict[str, Tensor | None], dict[str, Tensor], list[str]]:
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    options: Any = {"dtype": dtype, "export": export, "export_dir": str(out / "export") if export else None}
    module = Recipe(str(folder / "model"), lora=LoRA(**(LORA | lora)), **options)
    made = tiny_trainer(
        rank,
        world,
        NDStrategy(**degrees, save_distributed_checkpoint=save_distributed_checkpoint),  # type: ignore[arg-type]
        max_epochs=epochs,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        enable_checkpointing=False,
        **(trainer or {}),
    )
    made.fit(module, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    if epochs == 1:
        made.save_checkpoint(out / "half.ckpt")
    weights = {name: full(p.detach()) for name, p in module.model.named_parameters()}
    return module.losses, module.norms, module.grads, weights, sorted(module.state_dict())


def reference(folder: Path, epochs: int = 2, **lora: Any) -> tuple[Run, Any]:
    """peft in one process, as its documentation says."""
    given = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, **lora}
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(SEED)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **given)).train()
    run = train(model, make_batches(3) * epochs, clip_norm=0.5, optimizer=optimizer)
    strip = "base_model.model."
    run.grads = {name.removeprefix(strip): grad for name, grad in run.grads.items()}
    run.weights = {name.removeprefix(strip): weight for name, weight in run.weights.items()}
    return run, model


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Run, Any]:
    return reference(folder)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(make_batches(1)[0]["input_ids"]).logits


def check(expected: Run, got: Any, steps: slice = slice(None)) -> None:
    losses, norms, grads, weights, saved = got
    assert losses == pytest.approx(expected.losses[steps], rel=1e-5)
    assert norms == pytest.approx(expected.grad_norms[steps], rel=1e-5)
    pairs = {name for name in expected.weights if "lora_" in name}
    assert saved == sorted(f"model.{name}" for name in pairs)  # and nothing of the base
    if steps == slice(None):
        # B starts at zero, so that the gradients of A are exactly zero
        worst = compare({n: expected.grads[n] for n in pairs}, {n: grads[n] for n in pairs})[0]
        assert worst[0] < 1e-5, worst
    worst = compare(expected.weights, weights)[0]
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("degrees", LAYOUTS, ids=name_of)
def test_six_steps_and_the_adapter_equal_those_of_peft(
    pool: Pool, folder: Path, tmp_path: Path, expected: tuple[Run, Any], degrees: dict[str, int]
) -> None:
    run, model = expected
    world = 1
    for degree in degrees.values():
        world *= degree
    check(run, pool.run(fit, world, folder, degrees, out=tmp_path, timeout=120)[0])

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "export")
    result = loaded.load_adapter(tmp_path / "export", "again")
    assert not [key for key in result.missing_keys if "lora_" in key]
    assert not result.unexpected_keys
    assert (tmp_path / "export" / "tokenizer.json").is_file()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_on_another_layout_and_merges(
    pool: Pool, folder: Path, tmp_path: Path, expected: tuple[Run, Any]
) -> None:
    run, model = expected
    half = tmp_path / "half.ckpt"
    pool.run(fit, 2, folder, {"dp_shard": 2}, out=tmp_path, epochs=1, export=False, timeout=120)
    held = {key for key in FileSystemReader(half).read_metadata().state_dict_metadata if ".model." in key}
    assert any(".exp_avg_sq" in key for key in held)
    assert all("lora_" in key for key in held), held
    for degrees in ({"tp": 2}, {"cp": 2}):
        out = tmp_path / name_of(degrees)
        got = pool.run(fit, 2, folder, degrees, out=out, epochs=2, ckpt_path=half, export="merged", timeout=120)[0]
        check(run, got, slice(3, None))
    merged = AutoModelForCausalLM.from_pretrained(out / "export")
    assert merged.state_dict().keys() == AutoModelForCausalLM.from_pretrained(folder / "model").state_dict().keys()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)


def test_D09_frozen_weights_stay_bfloat16_and_one_file_resumes(pool: Pool, folder: Path, tmp_path: Path) -> None:
    given: Any = {"out": tmp_path, "export": False, "timeout": 120, "rslora": True}
    mixed = {"precision": "bf16-mixed"}
    losses, _, _, weights, _ = pool.run(fit, 2, folder, {"dp_shard": 2}, epochs=2, trainer=mixed, **given)[0]
    half = {"epochs": 1, "trainer": mixed, "save_distributed_checkpoint": False}
    pool.run(fit, 2, folder, {"dp_shard": 2}, **half, **given)
    goes_on = {"epochs": 2, "trainer": mixed, "ckpt_path": tmp_path / "half.ckpt"}
    second = pool.run(fit, 2, folder, {"dp_shard": 2}, **goes_on, **given)[0]
    assert second[0] == losses[3:]
    run, _ = reference(folder, use_rslora=True)
    assert losses == pytest.approx(run.losses, rel=1e-2)
    assert losses != pytest.approx(reference(folder, lora_alpha=4, use_rslora=True)[0].losses, rel=1e-2)
    assert {w.dtype for name, w in weights.items() if "lora_" in name} == {torch.float32}
    stored = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).state_dict()
    for name, weight in weights.items():
        assert torch.equal(second[3][name], weight)
        if "lora_" not in name:
            assert torch.equal(weight, stored[name.replace("base_layer.", "")]), name


def restore(rank: int, world: int, folder: Path, out: Path) -> None:
    """Fill the shards with what tells ranks apart, save, spoil, load."""
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    module = Recipe(str(folder / "model"), lora=LoRA(**LORA), export=False)
    strategy = NDStrategy(dp_shard=2)
    trainer = tiny_trainer(rank, world, strategy, max_steps=1, use_distributed_sampler=False, gradient_clip_val=0.5)
    trainer.fit(module)
    pairs = {name: p for name, p in module.model.named_parameters() if "lora_" in name}
    for number, parameter in enumerate(pairs.values()):
        parameter.data.to_local().fill_(100 * number + rank + 1)
    expected = {name: full(p.detach()) for name, p in pairs.items()}
    trainer.save_checkpoint(out / "filled.ckpt")
    save_adapter(module.model, out / "adapter", base=str(folder / "model"))
    for parameter in pairs.values():
        parameter.data.zero_()
    strategy.load_checkpoint(out / "filled.ckpt")
    for number, (name, parameter) in enumerate(pairs.items()):
        local = parameter.to_local()
        assert torch.equal(local, torch.full_like(local, 100 * number + rank + 1)), name
    exported = load_file(out / "adapter" / "adapter_model.safetensors")
    assert len(exported) == len(expected)
    for name, value in expected.items():
        assert torch.equal(exported["base_model.model." + name.replace(".default.", ".")], value), name
    other = Recipe(str(folder / "model"), lora=LoRA(**(LORA | {"alpha": 4})), export=False)
    goes_on = tiny_trainer(rank, world, NDStrategy(dp_shard=2), max_steps=2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="alpha was 8 and is 4"):
        goes_on.fit(other, ckpt_path=str(out / "filled.ckpt"))


def test_C16_every_rank_gets_its_shards_back_and_the_export_has_all(pool: Pool, folder: Path, tmp_path: Path) -> None:
    pool.run(restore, 2, folder, tmp_path, timeout=120)


ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "ab" * n}]}
    for n in (1, 9, 3, 14, 2, 6, 5, 11)
]


def fit_packed(rank: int, world: int, folder: Path, file: Path, degrees: dict[str, int]) -> list[float]:
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    module = Recipe(str(folder / "model"), lora=LoRA(**LORA), export=False)
    module.train_dataloader = LightningModule.train_dataloader.__get__(module)  # type: ignore[method-assign]
    data = ChatDataModule(str(file), max_length=64, packing=True, micro_batch_size=1)
    # all rows are one step: in which pack they lie, and who reads it, does not matter
    options: Any = {"max_epochs": 3, "accumulate_grad_batches": 100, "gradient_clip_val": 0.5}
    trainer = tiny_trainer(rank, world, NDStrategy(**degrees), use_distributed_sampler=False, **options)  # type: ignore[arg-type]
    losses: list[float] = []
    module.on_train_epoch_end = lambda: losses.append(float(trainer.strategy.step_loss))  # type: ignore[attr-defined, method-assign]
    module.on_train_batch_end = lambda *_: None  # type: ignore[method-assign, assignment]
    trainer.fit(module, datamodule=data)
    return losses


@pytest.mark.parametrize("degrees", LAYOUTS[:3], ids=name_of)
def test_packed_rows_train_pairs_as_single_rows_do(
    pool: Pool, folder: Path, tmp_path: Path, degrees: dict[str, int]
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = ChatDataModule(str(file), max_length=64, tokenizer=str(folder / "model"), shuffle=False)
    data.setup("fit")
    rows = list(data._loader("train", shuffle=False, micro_batch_size=1))
    assert len(rows) == len(ROWS)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(SEED)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    run = train(model, rows * 3, accumulate=len(rows), clip_norm=0.5, optimizer=optimizer)
    losses = pool.run(fit_packed, 2, folder, file, degrees, timeout=120)[0]
    assert losses == pytest.approx(run.losses, rel=1e-5)


def test_an_adapter_is_a_start(pool: Pool, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    adapted.save_pretrained(tmp_path / "start")
    want = train(adapted.train(), make_batches(3), clip_norm=0.5, optimizer=optimizer)
    start = {"target_modules": ["q_proj", "down_proj"], "adapter": str(tmp_path / "start")}
    got = pool.run(fit, 2, folder, {"tp": 2}, out=tmp_path, epochs=1, timeout=120, **start)[0]
    want.weights = {name.removeprefix("base_model.model."): weight for name, weight in want.weights.items()}
    want.grads = {name.removeprefix("base_model.model."): grad for name, grad in want.grads.items()}
    check(want, got)


def adapter(folder: Path, out: Path, **changes: Any) -> str:
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes
    peft.get_peft_model(base, peft.LoraConfig(**given)).save_pretrained(out)
    return str(out)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 4}, "lora has no 'rank': allowed here: adapter, .*, r, "),
        ({"r": 0}, "lora.r is 0"),
        ({"alpha": -1}, "lora.alpha is -1"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["q_proj", "input_layernorm"]}, "'input_layernorm' is a LlamaRMSNorm; pairs go beside"),
        ({"target_modules": ["q_proj", "q_prj"]}, "has no layer 'q_prj': did you mean 'q_proj'"),
        ({"target_modules": "nothing.*"}, "target_modules: .*not found"),
        ({"target_modules": "a(b"}, "target_modules: 'a\\(b' is no regular expression"),
        ({"layers": [0, 7]}, "lora.layers: LlamaForCausalLM has blocks 0 to 1, and no 7"),
        ({"layers": [1], "target_modules": r".*layers\.0.*q_proj"}, r"is no linear layer of the blocks \[1\]"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is a Embedding; a low-rank pair goes beside linear"),
        ({"adapter": "other"}, r"another adapter: it lacks .*down_proj.lora_A.weight and 23 more"),
        (
            {"adapter": "other", "target_modules": ["q_proj"], "r": 2},
            r"lora_A.weight is \[4, 32\] in it, and \[2, 32\]",
        ),
        ({"adapter": "other", "target_modules": ["q_proj"], "alpha": 16}, r"alpha / r\) is 2, and 4 here"),
        ({"adapter": "nothing"}, "has no adapter_config.json, so it is no peft adapter"),
    ],
)
def test_refused_before_processes_start(folder: Path, tmp_path: Path, lora: dict[str, Any], words: str) -> None:
    if "adapter" in lora:
        (tmp_path / "nothing").mkdir()
        adapter(folder, tmp_path / "other")
        lora = lora | {"adapter": str(tmp_path / lora["adapter"])}
    with pytest.raises(ValueError, match=words):
        CausalLM(str(folder / "model"), lora={"r": 4, "alpha": 8} | lora).skeleton()  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q_proj|down_proj)", ["q_proj", "down_proj"]])
def test_pairs_in_some_blocks_only(folder: Path, targets: Any) -> None:
    model = CausalLM(str(folder / "model"), lora=LoRA(r=4, layers=[1], target_modules=targets)).skeleton()
    names = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert len(names) == (7 if targets == "all-linear" else 2)
    assert all(".layers.1." in name for name in names)


def refuse_another_base(rank: int, world: int, folder: Path, other: Path, out: Path) -> None:
    trained = {"export": False, "out": out}
    fit(rank, world, folder, {}, epochs=1, **trained)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pairs were trained beside other weights than those of"):
        fit(rank, world, other, {}, ckpt_path=out / "half.ckpt", **trained)  # type: ignore[arg-type]


def test_pairs_do_not_go_on_beside_other_weights(pool: Pool, folder: Path, tmp_path: Path) -> None:
    tiny_model(initializer_range=0.1, seed=5).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    pool.run(refuse_another_base, 1, folder, tmp_path, tmp_path)


def test_what_cannot_be_right_is_refused(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "model")
    with pytest.raises(ValueError, match="pairs beside random weights"):
        CausalLM(model, lora=LoRA(), from_scratch=True)
    with pytest.raises(ValueError, match="export='merged' is for lora"):
        CausalLM(model, export="merged")
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lm_head shares its weight with another layer"):
        CausalLM(str(tmp_path), lora=LoRA(target_modules=["lm_head"])).skeleton()
