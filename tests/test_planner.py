"""The planner: counts against real modules, legality against the strategy's own checks, recipes, a simulation."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from families import FAMILIES, make_config
from transformers import AutoConfig

from lightning_nd import NDStrategy
from lightning_nd.callbacks.advice import PlanAdvice
from lightning_nd.checkpoint import from_config
from lightning_nd.cli.app import NDCLI
from lightning_nd.cli.keys import ConfigError
from lightning_nd.cli.main import main
from lightning_nd.cli.planning import read_count, read_layout
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import check_tensor_parallel
from lightning_nd.planner.ask import ask
from lightning_nd.planner.calibrate import Measured, hardware_file, known_as
from lightning_nd.planner.child import in_child
from lightning_nd.planner.hardware import GIB, Cluster, find_gpu, read_gpus
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.memory import memory
from lightning_nd.planner.search import Limits, layouts, search, suggestions
from lightning_nd.planner.simulate import play_rank, simulate
from lightning_nd.planner.steptime import CONSTANTS, step_time
from lightning_nd.recipes.lora import LoRA

LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}


def llama(**more: Any) -> Any:
    return AutoConfig.for_model("llama", **{**LLAMA, **more})


@pytest.fixture(scope="module")
def asked() -> Any:
    return ask(llama(), "llama", "bf16-mixed")


def cluster(gpus: int, **more: Any) -> Cluster:
    return Cluster(replace(find_gpu("h100-80gb"), **more), gpus)


@pytest.mark.parametrize("gpus", [1, 6, 64, 1024])
def test_every_layout_is_enumerated_once(gpus: int) -> None:
    found = list(layouts(gpus))
    assert all(dims.world_size == gpus for dims in found)
    assert len(set(found)) == len(found)
    # ordered factorisations into four factors, prime by prime: C(e + 3, 3)
    expected, rest, prime = 1, gpus, 2
    while rest > 1:
        exponent = 0
        while rest % prime == 0:
            rest, exponent = rest // prime, exponent + 1
        expected *= (exponent + 3) * (exponent + 2) * (exponent + 1) // 6
        prime += 1
    assert len(found) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_are_counted_as_the_model_has_them(family: str) -> None:
    config = make_config(family)
    facts, _ = ask(config, family, "bf16-mixed")
    assert facts.parameters.total == sum(p.numel() for p in from_config(config).parameters())
    assert facts.layers == config.get_text_config().num_hidden_layers
    assert all(block.attention and block.saved.on(1, True) > 0 for block in facts.blocks)


def test_a_rank_holds_what_tensor_parallelism_leaves_it(asked: Any) -> None:
    facts, _ = asked
    attention = 2 * 512 * 512  # q and o
    kv, mlp, norms = 2 * 512 * 128, 3 * 512 * 1408, 2 * 512
    (block,) = facts.blocks
    assert block.parameters.on(2) == (attention + kv + mlp) / 2 + norms
    assert block.parameters.on(4) == (attention + mlp) / 4 + kv + norms  # two KV heads, four ranks: whole


def test_activations_of_a_block_are_those_of_the_formula(asked: Any) -> None:
    facts, _ = asked
    (block,) = facts.blocks
    h, kv, inner, heads = 512, 128, 1408, 8
    # Norms: an fp32 copy, the normalised rows and a scale. Split: q, k, v, output, log-sum-exp; gate, up, act, product.
    assert block.saved.residual == 2 * (4 * h + 2 * h + 4)
    assert block.saved.whole == 2 * 2 * h
    assert block.saved.split == 2 * (2 * h + 2 * kv) + 4 * heads + 4 * 2 * inner


def test_layouts_are_legal_exactly_where_fit_runs_them(asked: Any) -> None:
    _, refusal = asked
    skeleton = from_config(llama())
    for dims in layouts(64):
        try:
            check_tensor_parallel(skeleton, "auto", dims.tp)
            refused = False
        except ValueError:
            refused = True
        assert (refusal(dims) is not None) == refused, dims


def _legality(count: int) -> list[tuple[str, int, int]]:
    families = ("llama", "qwen3", "phi3", "olmo2", "gpt_neox", "qwen3_moe", "nemotron", "stablelm")
    every = [(family, tp, cp) for family in families for tp in (1, 2, 3, 4) for cp in (1, 2) if tp * cp > 1]
    return [*random.Random(0).sample(every, count), ("nemotron", 1, 2), ("stablelm", 1, 2)]


@pytest.mark.parametrize(("family", "tp", "cp"), _legality(8))
def test_a_layout_is_refused_exactly_where_a_simulated_rank_fails(family: str, tp: int, cp: int) -> None:
    same = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **same, **more, vocab_size=128, num_key_value_heads=4)
    _, refusal = ask(config, family, "bf16-mixed")
    setting = Setting(ParallelDims(1, 2, cp, tp))
    why = refusal(setting.dims)
    if why is None:
        assert in_child(play_rank, config, setting, Work(48)).peak > 0
    else:
        with pytest.raises((ValueError, RuntimeError)):
            in_child(play_rank, config, setting, Work(48))


def test_experts_rows_are_whole_around_their_split_products() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}  # 2 × 32: as wide as the stream
    facts, _ = ask(AutoConfig.for_model("olmoe", **config, **experts, vocab_size=128), "olmoe", "bf16-mixed")
    (block,) = facts.blocks
    hidden, routed = 64 * 2, 2  # bytes a row in bf16, rows a token
    assert block.saved.whole >= 2 * routed * hidden  # what goes into the first product, and comes out of the second
    assert block.saved.split <= routed * (2 + 1) * hidden + 6 * hidden  # gate and up, their product; attention


def test_pairs_are_counted_in_the_dtype_of_compute() -> None:
    heads = LLAMA["num_attention_heads"]
    kept = [
        ask(llama(), "llama", precision, LoRA(r=8))[0].blocks[-1].kept.split - 4 * heads  # the log-sum-exp is float32
        for precision in ("bf16-mixed", "32-true")
    ]
    assert kept[1] == 2 * kept[0] > 0


def test_search_is_deterministic_ranked_and_within_memory(asked: Any) -> None:
    facts, refusal = asked
    work, gpus = Work(4096, rows=64), cluster(16)
    plan, again = (search(facts, work, gpus, refusal) for _ in range(2))
    assert plan == again
    speeds = [round(c.time.tokens_per_gpu, 6) for c in plan.candidates]
    assert speeds == sorted(speeds, reverse=True)
    for c in plan.candidates:
        assert c.setting.rows == 64
        assert c.memory.reserved <= gpus.gpu.memory_gib * GIB
        assert refusal(c.setting.dims) is None
    assert plan.asked == len(plan.candidates) + sum(r.count for r in plan.rejected)


def test_degrees_that_are_refused_alike_are_one_reason(asked: Any) -> None:
    facts, refusal = asked
    (refused,) = [r for r in search(facts, Work(4096), cluster(64), refusal).rejected if "tp=" in r.reason]
    assert "tp=16, 32, 64 does not divide num_attention_heads=8" in refused.reason
    assert refused.count == sum(dims.tp > 8 for dims in layouts(64))


def test_what_does_not_fit_says_what_would(asked: Any) -> None:
    facts, refusal = asked
    small = cluster(1, memory_gib=1.52)
    plan = search(facts, Work(8192), small, refusal)
    assert not plan.candidates
    assert plan.rejected[0].closest
    hints = suggestions(facts, Work(8192), small, refusal)
    assert any("GPUs of this kind" in hint for hint in hints) or any("1 × " in hint for hint in hints)


def test_state_is_exact_and_categories_add_up(asked: Any) -> None:
    facts, _ = asked
    setting = Setting(ParallelDims(1, 4, 1, 2))
    found = memory(facts, setting, Work(2048))
    local = facts.parameters.on(2) / 4
    assert found.parts["parameters"] == 4 * local
    assert found.parts["optimizer"] == 8 * local
    assert found.moments["optimizer"] == 20 * local  # weights, gradients, two moments and a foreach temporary
    assert sum(found.parts.values()) == found.live == max(found.moments.values())


def test_accumulation_keeps_whole_gradients(asked: Any) -> None:
    facts, _ = asked
    dims = ParallelDims(1, 8, 1, 1)
    one, two = (memory(facts, Setting(dims, accumulation=n), Work(2048)) for n in (1, 2))
    assert two.live - one.live == pytest.approx(4 * facts.parameters.total, rel=0.01)


def test_packed_rows_need_masks_where_torch_attends(asked: Any) -> None:
    facts, _ = asked
    row, packs = Work(2048), Work(2048, documents=256)
    for cp, copies in ((1, facts.layers), (2, 0)):
        setting = Setting(ParallelDims(1, 4, cp, 1))
        more = memory(facts, setting, packs).live - memory(facts, setting, row).live
        keys = 2 * (8 - 2) * 2 * 64 * 2048  # keys and values for every head
        assert more == (copies * (2 * 2048**2 + keys) + 2048**2 if copies else 0)


def test_what_a_block_holds_while_it_works_is_recorded(asked: Any) -> None:
    facts, _ = asked
    (block,) = facts.blocks
    kept, h = block.working.kept, 512
    # at the end of forward: what is saved, and the output
    assert kept.on(1, True) == pytest.approx(block.saved.on(1, True) + 2 * h, abs=0.5)
    most = max(m.activations.total for m in block.working.backward)
    assert most > kept.total
    assert max(m.gradients.total for m in block.working.backward) == pytest.approx(block.parameters.total, rel=1e-3)
    assert max(m.activations.total for m in block.working.checkpointed) < kept.total


def test_experts_are_not_gathered_with_padding() -> None:
    """FSDP2 alone would gather 2 experts over 32 ranks as 32."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
    config = AutoConfig.for_model("mixtral", **{**LLAMA, **sizes})
    facts, _ = ask(config, "mixtral", "bf16-mixed")
    setting, work = Setting(ParallelDims(1, 32, 1, 1)), Work(1024)
    found = in_child(play_rank, config, setting, work)
    assert found.traffic["dp_shard reduce_scatter"][1] == pytest.approx(4 * facts.parameters.total, rel=0.01)
    assert memory(facts, setting, work).live == pytest.approx(found.peak, rel=0.02)


@pytest.mark.parametrize("change", [{"nic_gbs": 5.0}, {"gpus_per_node": 1}])
def test_slower_networks_cost_time(asked: Any, change: dict[str, Any]) -> None:
    facts, _ = asked
    setting, fast = Setting(ParallelDims(1, 4, 1, 4)), cluster(16)
    before = step_time(facts, setting, Work(4096), fast)
    after = step_time(facts, setting, Work(4096), replace(fast, **change))
    assert after.total > before.total
    assert sum(after.exposed.values()) > sum(before.exposed.values())


def test_gpu_files_add_and_correct(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text("[h100-80gb]\nlink_gbs = 400\n[mine]\nmemory_gib = 10\nbf16_tflops = 1\nmatmul_tflops = 1\n"
                    "hbm_gbs = 1\nlink_gbs = 1\npair_gbs = 1\nnic_gbs = 1\n")  # fmt: skip
    assert find_gpu("h100-80", file).link_gbs == 400
    assert read_gpus(file)["mine"].memory_gib == 10
    file.write_text("[mine]\nmemory = 10\n")
    with pytest.raises(ValueError, match="there is no memory"):
        read_gpus(file)
    file.write_text("[mine]\nmemory_gib = 10\n")
    with pytest.raises(ValueError, match=r"bf16_tflops, .* missing"):
        read_gpus(file)


def test_counts_and_layouts_are_read() -> None:
    assert read_count("4M") == 4 * 1024**2
    assert read_count("512k") == 512 * 1024
    with pytest.raises(ConfigError, match="not a number of tokens"):
        read_count("many")
    setting = read_layout("tp=2,cp=4,checkpointing=full", 64, 16)
    assert setting == Setting(ParallelDims(1, 8, 4, 2), 1, 2, "full")
    with pytest.raises(ConfigError, match="does not fit 64 ranks"):
        read_layout("tp=3", 64, None)
    with pytest.raises(ConfigError, match="written like tp=2"):
        read_layout("pp=3", 64, None)


class Parsed(NDCLI):
    """Stops once the configuration is complete and checked."""

    def instantiate_classes(self) -> None:
        pass


def test_the_command_writes_what_fit_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama().to_dict()))
    request = [
        "plan",
        "--model",
        str(tmp_path / "config.json"),
        "--gpus",
        "16",
        "--gpu",
        "a100-80gb",
        "--seq-len",
        "2048",
    ]
    recipe, picture = tmp_path / "recipe.yaml", tmp_path / "plan.png"
    options = ["--global-batch-tokens", "512k", "--top", "3", "--write", str(recipe), "--plot", str(picture)]
    assert main([*request, *options]) == 0
    shown = capsys.readouterr().out
    assert "tok/s/GPU" in shown
    assert "settings fit" in shown
    assert picture.stat().st_size > 10_000
    written = yaml.safe_load(recipe.read_text())
    dims = ParallelDims(**{k: v for k, v in written["nd"].items() if k != "activation_checkpointing"})
    assert dims.world_size == 16 == written["trainer"]["devices"] * written["trainer"]["num_nodes"]
    micro, accumulate = written["data"]["init_args"]["micro_batch_size"], written["trainer"]["accumulate_grad_batches"]
    assert micro * accumulate * dims.data == 512 * 1024 // 2048
    (tmp_path / "rows.jsonl").write_text("{}\n")
    read = Parsed("fit", ["--config", str(recipe), "--data.train", str(tmp_path / "rows.jsonl"),
                          "--model.model", str(tmp_path)]).config  # fmt: skip
    assert read.nd.tp == dims.tp
    assert read.trainer.accumulate_grad_batches == accumulate
    assert main([*request, "--json", "--top", "1"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["candidates"][0]["time"]["step"] > 0
    assert main([*request, "--explain", "tp=2"]) == 0
    assert "Memory of one rank" in capsys.readouterr().out
    assert main([*request[:-4], "--gpu", "b100", "--seq-len", "2048"]) == 2
    assert "b100: allowed here: a100-40gb, a100-80gb" in capsys.readouterr().err


def test_one_rank_of_many_is_simulated() -> None:
    config = llama()
    facts, _ = ask(config, "llama", "bf16-mixed")
    setting, work = Setting(ParallelDims(1, 32, 1, 2), checkpointing="full"), Work(4096)
    found = simulate(config, setting, work)
    local = facts.parameters.on(2) / 32
    assert found.peaks["optimizer"] == pytest.approx(20 * local, abs=2**18)  # and the batch
    assert memory(facts, setting, work).live == pytest.approx(found.peak, rel=0.08)
    # every parameter is reduced once, in fp32
    assert found.traffic["dp_shard reduce_scatter"][1] == pytest.approx(4 * facts.parameters.on(2), rel=0.01)


def test_a_simulated_run_meets_the_real_runs_errors() -> None:
    with pytest.raises(ValueError, match="tp=3 does not divide num_attention_heads=8"):
        simulate(llama(), Setting(ParallelDims(1, 2, 1, 3)), Work(512))


def test_limits_are_kept(asked: Any) -> None:
    facts, refusal = asked
    limits = Limits(micro_batch=2, checkpointing="full", degrees={"tp": 2})
    plan = search(facts, Work(1024), cluster(8), refusal, limits)
    assert {(c.setting.micro_batch, c.setting.checkpointing, c.setting.dims.tp) for c in plan.candidates} == {
        (2, "full", 2)
    }


def test_a_calibrated_machine_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    assert main(["calibrate", "--quick", "--device", "cpu", "--output", str(file)]) == 0
    assert "TFLOP/s" in capsys.readouterr().out
    found = find_gpu("this-cpu", file)
    assert 0 < found.matmul_tflops < 100
    assert found.hbm_gbs > 0.1
    assert main(["calibrate", "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "must end in .toml" in capsys.readouterr().err


def test_what_was_measured_corrects_the_table(tmp_path: Path) -> None:
    base = known_as("NVIDIA H100 80GB HBM3", 79.2)
    assert base == find_gpu("h100-80gb")
    names = {"NVIDIA A100-SXM4-40GB": 39.4, "NVIDIA GeForce RTX 4090": 23.5, "NVIDIA H200": 140, "NVIDIA GB200": 185}
    assert [known_as(*device).name for device in names.items()] == [  # type: ignore[union-attr]
        "a100-40gb", "rtx4090", "h200-141gb", "gb200-186gb",
    ]  # fmt: skip
    assert known_as("Tesla V100", 31.7) is None
    assert base is not None
    measured = Measured("NVIDIA H100 80GB HBM3", 79.2, 700.0, 500.0, 8192, 2600.0, 380.0, 8)
    file = tmp_path / "mine.toml"
    file.write_text(hardware_file(measured, base.name, base))
    found = find_gpu("h100-80gb", file)
    assert found.matmul_tflops == 700
    assert found.bf16_tflops == base.bf16_tflops
    # the planner's own formulas give the measured rates back
    assert found.hbm_gbs * CONSTANTS.traffic == pytest.approx(2600, rel=1e-3)
    assert found.link_gbs * CONSTANTS.link == pytest.approx(380, rel=1e-3)
    reached = found.bf16_tflops * found.attention_share
    reached /= (1 + CONSTANTS.attention_length / 8192) * (1 + CONSTANTS.attention_head / 128)
    assert reached == pytest.approx(500, rel=1e-3)


class Steps:
    """Enough of a module for the planner to know it."""

    def __init__(self) -> None:
        self.config, self.lora, self.device = llama(), None, torch.device("cpu")


def test_a_run_that_is_far_from_its_plan_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_nd.callbacks.advice.rank_zero_info", said.append)
    data = SimpleNamespace(micro_batch_size=1)
    strategy = NDStrategy(dp_shard=8)
    strategy._dims = ParallelDims(1, 8, 1, 1)
    trainer: Any = SimpleNamespace(
        strategy=strategy, datamodule=data, is_global_zero=True, accumulate_grad_batches=1, precision="bf16-mixed",
        num_devices=8, fit_loop=SimpleNamespace(_should_accumulate=lambda: False),
    )  # fmt: skip
    batch = {"input_ids": torch.zeros(1, 2048)}
    module: Any = Steps()
    clock = iter([0.0, 20.0] * 2)
    monkeypatch.setattr("lightning_nd.callbacks.clock.time.perf_counter", lambda: next(clock))
    for advice in (PlanAdvice(after=1, steps=2), PlanAdvice("h100-80gb", after=1, steps=2)):
        advice.on_train_start(trainer, module)
        for _ in range(6):
            advice.on_train_batch_end(trainer, module, None, batch, 0)
    assert len(said) == 1  # not on a CPU of which nothing is known
    assert "205 tokens/s/GPU" in said[0]
    assert "(10 s a step" in said[0]
