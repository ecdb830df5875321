"""Faults in reading data that users of other tools have reported, where no other file has them."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from pool import Pool, tiny_trainer
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports")
    tiny_model().save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    documents = json.loads((CASES / "A20.json").read_text())["documents"]
    (path / "A20.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    return path


# -- A20, D12: documents of a pack ------------------------------------------------------------------------------------


def second_document(rank: int, world_size: int, folder: str, degrees: dict[str, int]) -> list[torch.Tensor]:
    """Logits of document 1 of the pack as it is, and with the probed token of document 0 replaced."""
    case = json.loads((CASES / "A20.json").read_text())
    probe, size = case["probe"], len(case["documents"][0])
    data = ChatDataModule(predict=str(Path(folder) / "A20.jsonl"), tokenizer=str(Path(folder) / "model"))
    data.setup("predict")
    rows = data.dataset("predict")
    pack = {name: value[None] for name, value in rows[0, 1].items()}
    other = {**pack, "input_ids": pack["input_ids"].clone()}
    other["input_ids"][0, probe["position"]] = probe["replace_with"]

    class Logits(CausalLM):
        def predict_step(self, batch: Any, index: int) -> Any:
            from lightning_nd import gather_sequence

            inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
            logits = self(**inputs).logits
            return gather_sequence(logits.full_tensor() if hasattr(logits, "full_tensor") else logits, batch)

    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees), use_distributed_sampler=False)
    loader = torch.utils.data.DataLoader([pack, other], batch_size=None)  # type: ignore[arg-type]
    found: Any = trainer.predict(Logits(str(Path(folder) / "model"), export=False), loader)
    return [logits[0, size:].clone() for logits in found]


@pytest.mark.parametrize("degrees", [{}, {"cp": 2}, {"tp": 2}], ids=str)
def test_a20_d12_no_logit_of_the_second_document_moves(pool: Pool, folder: Path, degrees: dict[str, int]) -> None:
    second = json.loads((CASES / "A20.json").read_text())["documents"][1]
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        alone = model(torch.tensor([second])).logits[0]
    for before, after in pool.run(second_document, 2 if degrees else 1, str(folder), degrees):
        assert torch.equal(before, after)
        torch.testing.assert_close(before, alone, atol=1e-5, rtol=1e-5)


# -- D14: who reads which row -----------------------------------------------------------------------------------------


def rows_read(rank: int, world_size: int, folder: str, options: dict[str, Any], degrees: dict[str, int]) -> list[str]:
    data = ChatDataModule(str(CASES / "A14.jsonl"), max_length=128, seed=5, **options)
    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees), max_steps=1)
    trainer.fit(CausalLM(str(Path(folder) / "model"), export=False), data)
    batches = list(data.train_dataloader())
    return [data.tokenizer.decode(row[row != 258]) for batch in batches for row in batch["input_ids"]]


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"micro_batch_size": 1, "streaming": True}], ids=str)
@pytest.mark.parametrize(
    ("degrees", "data_rank_of"),
    [({"dp_shard": 2}, [0, 1]), ({"tp": 2}, [0, 0]), ({"cp": 2}, [0, 0]), ({"dp_shard": 2, "tp": 2}, [0, 0, 1, 1])],
    ids=str,
)
def test_d14_peers_read_the_same_rows_and_data_ranks_others(pool, folder, options, degrees, data_rank_of):
    read = pool.run(rows_read, len(data_rank_of), str(folder), options, degrees)
    of_data_rank = {}
    for rows, data_rank in zip(read, data_rank_of, strict=True):
        assert of_data_rank.setdefault(data_rank, rows) == rows
    together = [row for rows in of_data_rank.values() for row in rows]
    assert sorted(together) == [f"<|user|>row{i:02}<|end|><|assistant|>ok<|end|>" for i in range(1, 13)]
    assert together != sorted(together)  # shuffled


# -- G03, G05: uneven validation ---------------------------------------------------------------------------------------


def validate(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, float]:
    data = ChatDataModule(val=str(CASES / "G02.jsonl"), max_length=64, **options)
    trainer = tiny_trainer(rank, world_size, NDStrategy())
    (metrics,) = trainer.validate(CausalLM(str(Path(folder) / "model"), export=False), data, verbose=False)
    return dict(metrics)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"packing": True}], ids=str)
def test_g03_g05_five_rows_on_ranks_that_they_do_not_divide_by(pool: Pool, folder: Path, options: Any) -> None:
    data = ChatDataModule(val=str(CASES / "G02.jsonl"), tokenizer=str(folder / "model"))
    data.setup("validate")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").double().eval()
    nll, count = 0.0, 0
    for row in map(data.dataset("val").__getitem__, range(5)):
        with torch.no_grad():
            logits = model(row["input_ids"][None]).logits[0, :-1]
        nll += torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="sum").item()
        count += int((row["labels"][1:] != -100).sum())
    for ranks in (2, 3):
        for metrics in pool.run(validate, ranks, str(folder), options):
            assert metrics["val/loss"] == pytest.approx(nll / count, rel=1e-6)


# -- A04, A07: the template in force is the one that is exported ------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"system": "fold"}], ids=str)
def test_a_template_file_is_exported_with_the_model(folder: Path, tmp_path: Path, options: Any) -> None:
    template = CASES / "A04.template.jinja"
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    data = ChatDataModule(str(tmp_path / "rows.jsonl"), chat_template=str(template), max_length=64, **options)
    module = CausalLM(str(folder / "model"), export_dir=str(tmp_path / "export"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    L.Trainer(max_steps=1, accelerator="cpu", **quiet).fit(module, data)
    exported = AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
    assert exported == data.tokenizer.chat_template
    assert exported.endswith(template.read_text())
    assert exported != tiny_tokenizer().chat_template
