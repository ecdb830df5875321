"""What the command line makes of configurations, without building anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_nd.cli.app import NDCLI
from lightning_nd.cli.keys import ConfigError
from lightning_nd.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
BASE = "model: {init_args: {model: gpt2}}\ndata: {init_args: {train: rows.jsonl}}\n"


class Parsed(NDCLI):
    """Stops once the configuration is complete and checked."""

    def instantiate_classes(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")


def parse(text: str, *args: str, **kwargs: str) -> Any:
    return built(text, *args, **kwargs).config


def built(text: str, *args: str, command: str = "fit", name: str = "recipe.yaml") -> Parsed:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return Parsed(command, ["--config", name, *args])


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit):
        Parsed("fit", [*args, "--print_config"])
    return capsys.readouterr().out


def test_defaults() -> None:
    cli = built(BASE)
    config = cli.config
    assert config.seed_everything == 42
    assert config.model.class_path == "lightning_nd.recipes.CausalLM"
    assert config.data.class_path == "lightning_nd.data.ChatDataModule"
    assert config.optimizer.class_path == "torch.optim.AdamW"
    assert config.trainer.default_root_dir == "runs/recipe"
    assert cli.devices == 1
    # what is saved stays open, so that the next run may have another layout
    assert config.trainer.devices == "auto"


def test_numbers_options_and_later_files() -> None:
    Path("more.yaml").write_text("nd: {tp: 2}\noptimizer: {init_args: {lr: 2e-5}}\n")
    text = BASE + "nd: {tp: 4, dp_shard: 2}\noptimizer: {init_args: {lr: 1e-5}}\n"
    cli = built(text, "--config", "more.yaml", "--nd.dp_shard", "1", "--data.micro_batch_size=3")
    config = cli.config
    assert (config.nd.tp, config.nd.dp_shard, cli.devices) == (2, 1, 2)
    assert config.optimizer.init_args.lr == 2e-5
    assert isinstance(parse(text).optimizer.init_args.lr, float)
    assert config.data.init_args.micro_batch_size == 3


def test_a_list_can_be_extended_or_replaced() -> None:
    text = BASE + "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.RichModelSummary},"
    text += " {class_path: lightning.pytorch.callbacks.ModelCheckpoint}]}\n"
    more = "lightning.pytorch.callbacks.LearningRateMonitor"
    longer = parse(text, f"--trainer.callbacks+={more}").trainer.callbacks
    assert [item.class_path.rpartition(".")[2] for item in longer] == [
        "RichModelSummary",
        "ModelCheckpoint",
        "LearningRateMonitor",
    ]
    only = parse(text, f"--trainer.callbacks={more}").trainer.callbacks
    assert (only[0] if isinstance(only, list) else only).class_path == more


def test_options_win_over_files_wherever_they_stand() -> None:
    Path("recipe.yaml").write_text(BASE + "trainer: {max_steps: 1}\n")
    for option in (["--trainer.max_steps", "7"], ["--trainer.max_steps=7"]):
        for file in (["--config", "recipe.yaml"], ["--config=recipe.yaml"], ["-c", "recipe.yaml"]):
            assert Parsed("fit", [*option, *file]).config.trainer.max_steps == 7


def test_print_save_load_print_is_a_fixed_point(capsys: pytest.CaptureFixture[str]) -> None:
    text = BASE + "nd: {tp: 2}\noptimizer: {init_args: {lr: 1e-5}}\ntrainer: {max_steps: 3}\n"
    Path("a.yaml").write_text(text)
    first = printed(capsys, "--config", "a.yaml")
    Path("b.yaml").write_text(first)
    assert printed(capsys, "--config", "b.yaml") == first
    assert yaml.safe_load(first)["nd"]["tp"] == 2


@pytest.mark.parametrize(
    ("extra", "line", "wrong", "right"),
    [
        ("trianer: {max_steps: 1}", 3, "'trianer'", "'trainer'"),
        ("trainer:\n  max_epochs: 1\n  max_step: 1", 5, "'trainer.max_step'", "'max_steps'"),
        ("nd: {qwxz: 3}", 3, "'nd.qwxz'", "allowed here"),
        ("nd: {tensor_parallel: 3}", 3, "'nd.tensor_parallel'", "mean 'tp'?"),
        ("trainer: {gradient_accumulation_steps: 3}", 3, "gradient_accumulation_steps'", "'accumulate_grad_batches'?"),
        ("nd: {dp_shards: 3}", 3, "'nd.dp_shards'", "'dp_shard'"),
        ("optimizer: {class_path: AdamW, init_args: {lrr: 3}}", 3, "'optimizer.init_args.lrr' of AdamW", "'lr'"),
        ("optimizer: {lr: 3}", 3, "'optimizer.lr'", "'optimizer.init_args.lr'"),
        ("lr_scheduler: {init_args: {warm_up: 3}}", 3, "'lr_scheduler.init_args.warm_up'", "'warmup'"),
        ("lr_scheduler: {init_arg: {warmup: 3}}", 3, "'lr_scheduler.init_arg'", "'init_args'"),
        (
            "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n"
            "      init_args: {monitr: x}",
            6,
            "'trainer.callbacks[0].init_args.monitr' of ModelCheckpoint",
            "'monitor'",
        ),
        (
            "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelChekpoint}]}",
            3,
            "'trainer.callbacks[0].class_path'",
            "'ModelCheckpoint'",
        ),
        ("optimizer: {class_path: AdamWW}", 3, "no class 'AdamWW'", "'AdamW'"),
        ("data: {init_args: {val: rows.jsonl}}", 3, "'data' is given twice", "line 2"),
    ],
)
def test_unknown_keys_are_refused_with_line_and_nearest_name(extra: str, line: int, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE + extra + "\n")
    message = str(caught.value)
    assert message.startswith(f"recipe.yaml:{line}: ")
    assert wrong in message
    assert right in message


def test_all_unknown_keys_are_reported_at_once() -> None:
    text = "model: {init_args: {modl: gpt2}}\ndata: {init_args: {train: rows.jsonl, maxlength: 3}}\nnd: {tpp: 2}\n"
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("--nd.tpp=2", "'tp'"),
        ("--model.modl=x", "'model'"),
        ("--model.init_args.modl=x", "'model'"),
        ("--optimizer.lrr=3", "'lr'"),
        ("--trainer.max_step=3", "'max_steps'"),
        ("--trainr.max_steps=3", "'trainer.max_steps'"),
        ("--lr_scheduler.warm=3", "'warmup'"),
    ],
)
def test_unknown_options_are_refused_with_the_nearest_name(option: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE, option)
    assert option.partition("=")[0] in str(caught.value)
    assert right in str(caught.value)


def test_wrong_values_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_steps"):
        parse(BASE + "trainer: {max_steps: abc}\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse(BASE + "nd: {tp: [}\n")
    with pytest.raises(ConfigError, match="a list"):
        parse("- a\n- b\n")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("trainer: {max_steps: abc}", "recipe.yaml:3: trainer.max_steps is 'abc', but it must be an integer."),
        ("optimizer:\n  init_args: {lr: fast}", "recipe.yaml:4: optimizer.lr is 'fast', but it must be a number."),
        ("nd:\n  tp: two", "recipe.yaml:4: nd.tp is 'two', but it must be an integer."),
        ("nd: {cp_method: rng}", "must be one of 'auto', 'direct', 'ring', 'ulysses'."),
        ("nd: {sequence_parallel: 3}", "recipe.yaml:3: nd.sequence_parallel is '3', but it must be true or false."),
    ],
)
def test_wrong_values_in_a_file_are_one_line(extra: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE + extra + "\n")
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer.lr", "fast"], "optimizer.lr is 'fast', but it must be a number."),
        (["--data.micro_batch_size=x"], "data.micro_batch_size is 'x', but it must be an integer."),
        (["--config", "nofile.yaml"], "--config: there is no file"),
        (["--optimizer", "Adamm"], "--optimizer: there is no class 'Adamm': did you mean 'Adam' or"),
        (["--optimizer.class_path=torch.optim.Adamm"], "torch.optim has no 'Adamm': did you mean 'Adam' or"),
        (["--model", "gpt2"], "a model folder or hub id goes to model.model"),
        (["--data", "other.jsonl"], "a file of rows goes to data.train"),
    ],
)
def test_wrong_values_of_options_are_one_line(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE, *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_input_paths_start_at_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model: {init_args: {model: gpt2}}\n"
    text += "data: {init_args: {train: [data.jsonl, rows.jsonl, d*.jsonl], tokenizer: tok}}\n"
    (tmp_path / "sub" / "tok").mkdir(parents=True)
    (tmp_path / "sub" / "data.jsonl").write_text("{}\n")
    data = parse(text, name="sub/run.yaml").data.init_args
    assert data.train == [str(tmp_path / "sub" / "data.jsonl"), "rows.jsonl", str(tmp_path / "sub" / "d*.jsonl")]
    assert data.tokenizer == str(tmp_path / "sub" / "tok")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "sub" / "rows.jsonl").write_text("{}\n")
    again = Parsed("fit", ["--config", "../sub/run.yaml"]).config.data.init_args
    assert again.train == [str(tmp_path / "sub" / name) for name in ("data.jsonl", "rows.jsonl", "d*.jsonl")]


def test_home_folder_and_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    (tmp_path / "a home").mkdir()
    (tmp_path / "a home" / "x.jsonl").write_text("{}\n")
    text = "model: {init_args: {model: gpt2}}\ndata: {init_args: {train: ~/x.jsonl}}\n"
    config = parse(text + 'trainer: {default_root_dir: "~/my out"}\n')
    assert config.data.init_args.train == str(tmp_path / "a home" / "x.jsonl")
    assert config.trainer.default_root_dir == str(tmp_path / "a home" / "my out")


def test_a_missing_file_names_every_path_tried(tmp_path: Path) -> None:
    text = "model: {init_args: {model: ./none}}\ndata: {init_args: {train: gone.jsonl}}\n"
    with pytest.raises(ConfigError) as caught:
        parse(text, name="sub/run.yaml")
    message = str(caught.value)
    for path in ("sub/gone.jsonl", "gone.jsonl", "sub/none", "none"):
        assert str(tmp_path / path) in message


def test_layouts_that_do_not_fit_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"tp=3.*4 ranks"):
        parse(BASE, "--nd.tp=3", "--trainer.devices=4")
    with pytest.raises(ValueError, match="dp_shard"):
        parse(BASE, "--nd.dp_shard=0", "--trainer.devices=2")
    with pytest.raises(ConfigError, match=r"nd\.tp=2 would be ignored.*'ddp'"):
        parse(BASE, "--nd.tp=2", "--trainer.strategy=ddp")


def test_an_explicit_strategy_is_taken() -> None:
    text = BASE + "trainer: {strategy: {class_path: lightning_nd.NDStrategy, init_args: {tp: 2}}, devices: 2}\n"
    assert parse(text).trainer.strategy.init_args.tp == 2


def test_a_folder_with_an_earlier_run_is_refused_with_working_remedies() -> None:
    Path("runs/recipe").mkdir(parents=True)
    Path("runs/recipe/config.yaml").write_text(BASE)
    parse(BASE)  # a fit that was refused in set-up leaves no more than that
    Path("runs/recipe/metrics.csv").write_text("step\n")
    with pytest.raises(ConfigError, match=r"earlier run.*--trainer\.default_root_dir runs/recipe-2.*--overwrite true"):
        parse(BASE)
    assert parse(BASE, "--trainer.default_root_dir", "runs/recipe-2").trainer.default_root_dir == "runs/recipe-2"
    assert parse(BASE, "--overwrite", "true").overwrite is True
    assert parse(BASE, command="validate").trainer.default_root_dir == "runs/recipe"


def test_an_empty_path_of_a_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ckpt_path is empty: give a checkpoint or 'last'"):
        parse(BASE, "--ckpt_path", "")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_parse(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.setattr("lightning_nd.cli.paths.PathResolver.check", lambda *_: None)
    overlay = [] if "model:" in recipe.read_text() else ["--config", str(ROOT / "recipes" / "smollm2.yaml")]
    cli = Parsed("fit", [*overlay, "--config", str(recipe)])
    config = cli.config
    degrees = [config.nd[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp")]
    ranks = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    assert cli.devices * config.trainer.num_nodes == ranks


def test_help_is_short_and_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        page = capsys.readouterr().out
        assert f"lightning-nd {command}" in page
        assert len(page.splitlines()) < 50
        assert max(map(len, page.splitlines())) <= 120
    assert main(["fitt"]) == 2
    assert "did you mean 'fit'?" in capsys.readouterr().err


def test_a_command_without_anything_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-nd fit: error:")
    assert "Traceback" not in error
    assert "model" in error


def test_refusals_are_messages_and_bugs_are_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--nd.tpp", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning-nd fit: error: unknown option --nd.tpp")
    assert "Traceback" not in err
    assert main(["fit", "--config", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err


def test_sources_with_options_are_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text('{"text": "a"}\n')
    text = "model: {init_args: {model: gpt2}}\ndata: {init_args: {train: %s, val: {path: a.jsonl}}}\n"
    data = parse(
        text % "[{path: a.jsonl, weight: 2}, a.jsonl, {hub: a/b, split: c}]", name="sub/run.yaml"
    ).data.init_args
    beside = str(tmp_path / "sub" / "a.jsonl")
    first, second, third = data.train
    assert (first, second, third) == ({"path": beside, "weight": 2}, beside, {"hub": "a/b", "split": "c"})
    assert data.val == {"path": beside}
    with pytest.raises(ConfigError, match=r"data.train: 'none\.csv' does not exist; looked for .*/sub/none\.csv"):
        parse(text % "[{path: none.csv, weight: 2}]", name="sub/run.yaml")


def test_plan_draws_the_attention_of_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("6000\n900x9, 130\n2000\n")
    for documents in ("6000,900x9,130,2000", str(tmp_path / "lengths.txt")):
        picture = tmp_path / "out.png"
        assert main(["plan", "--draw-attention", str(picture), "--cp", "4", "--documents", documents]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
        out = capsys.readouterr().out
        # 6000 * 6001 / 2 + 9 * 900 * 901 / 2 + 130 * 131 / 2 + 2000 * 2001 / 2 pairs over 4 ranks
        pairs = [float(line.split()[1]) for line in out.splitlines()[2:6]]
        assert sum(pairs) == pytest.approx(23.66, abs=0.03)
        assert "zigzag would cost" in out


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "run")
    recipe = str(Path(__file__).parents[1] / "recipes" / "quickstart.yaml")
    assert main(["fit", "--config", recipe, "--trainer.default_root_dir", folder]) == 2
    assert f"--trainer.default_root_dir {folder}: the folder cannot be made" in capsys.readouterr().err


def test_a_folder_that_is_read_only_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    can_write = os.access  # a mount, which root cannot write to either
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and can_write(path, mode))
    recipe = str(Path(__file__).parents[1] / "recipes" / "quickstart.yaml")
    assert main(["fit", "--config", recipe, "--trainer.default_root_dir", str(tmp_path)]) == 2
    assert f"--trainer.default_root_dir {tmp_path}: this user cannot write to the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--cp 2 --tokens 5 --draw-attention x.gif", "must end in .png"),
        ("--cp 2 --draw-attention x.png", "either --tokens N"),
        ("--cp 2 --tokens 9 --documents 9 --draw-attention x.png", "either --tokens N"),
        ("--cp 2 --documents 4,x3 --draw-attention x.png", "'x3' is not a length"),
        ("--cp 2 --documents , --draw-attention x.png", "there are no lengths"),
        ("--cp 0 --tokens 5 --draw-attention x.png", "--cp is 0"),
        ("--cp 2 --tokens 5 --draw-attention none/x.png", "there is no folder none"),
        ("--cp 2 --tokens 5 --layout ring --draw-attention x.png", "invalid choice: 'ring'"),
        ("--tokens 5", "--draw-attention, --cp"),
    ],
)
def test_plan_refuses_with_a_reason(args: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args.split()]) == 2
    assert text in capsys.readouterr().err


def test_a_callback_with_an_enum_for_a_default_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(BASE)
    Path("timer.yaml").write_text("trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.Timer}]}\n")
    append = ("--trainer.callbacks+=lightning.pytorch.callbacks.ModelSummary",)
    out = printed(capsys, "--config", "recipe.yaml", "--config", "timer.yaml", *append)
    assert "interval: step" in out
    assert "ModelSummary" in out
