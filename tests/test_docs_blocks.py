"""Every block of code in README and docs is run or parsed: what a page says to type is what the code takes.

Python blocks of a page run one after the other in one namespace. Hub models are stood in for by a tiny one, and a
layout of several ranks is checked against the Trainer's devices and then trained by one process. Commands go through
the real parsers of the command line, which stop once everything is parsed and checked; YAML through the recipe's.
"""

from __future__ import annotations

import argparse
import builtins
import copy
import dis
import json
import re
import shlex
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import transformers
import yaml
from pool import Pool
from tiny import tiny_model, tiny_tokenizer
from torch.utils.data import DataLoader

import lightning_nd
from lightning_nd.attention.layout import zigzag
from lightning_nd.checkpoint import inspect
from lightning_nd.cli.app import NDCLI
from lightning_nd.cli.main import COMMANDS, main
from lightning_nd.cli.paths import PathResolver
from lightning_nd.data import ChatDataModule
from lightning_nd.data.rows import parse_row
from lightning_nd.data.sources import read_rows
from lightning_nd.mesh import ParallelDims
from lightning_nd.recipes import CausalLM

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
#: What shell blocks use beside our commands, torchrun, make, python and pip.
SHELL = {"source", "cd", "git", "export", "set", "exit", "if", "then", "fi", "scontrol"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        body = "".join(line[len(found[1]) :] for line in found[3].splitlines(keepends=True))
        yield Block(str(page.relative_to(ROOT)), text[: found.start()].count("\n") + 1, found[2], body)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_there_is_no_block_that_nobody_looks_at() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "bash", "yaml", "json", "csv", ""}
    assert len(of("python")) > 15
    assert len(of("bash")) > 25


# ---- Python


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def stand_ins(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny model under every name, one process in place of many, and the names that pages leave to the reader."""
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}]} for n in (2, 3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("runs/mine/export", "path/or/id"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(model_folder)
    for cls in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(cls, "from_pretrained", _of_the_hub(cls.from_pretrained, model_folder))
    read_slices = lightning_nd.load_pretrained
    monkeypatch.setattr(lightning_nd, "load_pretrained", lambda _: read_slices(model_folder))
    trainer = pl.Trainer

    def one_process(*, strategy: Any, devices: int = 4, num_nodes: int = 1, **given: Any) -> pl.Trainer:
        ParallelDims.resolve(world_size=devices * num_nodes, **strategy._degrees)
        strategy._degrees, strategy._dry_run = {}, False
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1}
        saves = {} if "callbacks" in given else {"enable_checkpointing": False}
        here = {"accelerator": "cpu", "devices": 1, "default_root_dir": str(tmp_path), "strategy": strategy}
        return trainer(**given | quiet | saves | here)

    monkeypatch.setattr(pl, "Trainer", one_process)
    ids = torch.arange(8)[None].repeat(2, 1)
    context = SimpleNamespace(layout=zigzag(16, 2), documents=((0, 16),))
    return {
        "my_dataloader": DataLoader([{"input_ids": i, "labels": i} for i in ids]),
        "module": CausalLM(str(model_folder), export=False),
        "data": ChatDataModule("train.jsonl", max_length=64),
        "batch": {"input_ids": ids, "position_ids": ids, "cp_context": context},
        "self": SimpleNamespace(net=lambda *_: None),
        # what snippets in the middle of a page take for imported
        "lightning_nd": lightning_nd, "pl": pl, "Trainer": one_process, "LightningModule": pl.LightningModule,
        "NDStrategy": lightning_nd.NDStrategy, "ModelCheckpoint": pl.callbacks.ModelCheckpoint,
        "ChatDataModule": ChatDataModule, "nn": torch.nn, "F": torch.nn.functional,
        "causal_lm_loss": lightning_nd.loss.causal_lm_loss,
    }  # fmt: skip


def _of_the_hub(read: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    return lambda name, **options: read(name if Path(name).exists() else folder, **options)


def _adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)


def _give_weights(names: dict[str, Any]) -> None:
    names["module"] = SimpleNamespace(model=tiny_model())


def _save(names: dict[str, Any]) -> None:
    names["trainer"].save_checkpoint("runs/mine/checkpoints/epoch=0-step=500.ckpt")
    names["MyModule"] = CausalLM


def _fit(names: dict[str, Any]) -> None:
    names["trainer"].fit(names["FineTune"]("some/model"), names["my_dataloader"])


def _fit_large(names: dict[str, Any]) -> None:
    trainer = names["Trainer"](devices=8, strategy=names["NDStrategy"](dp_shard=4, tp=2))
    trainer.fit(names["FineTuneLarge"](), names["my_dataloader"])
    assert trainer.global_step == 1


#: Before and after the n-th Python block of a page.
BEFORE: dict[tuple[str, int], Callable[[dict[str, Any]], None]] = {
    ("docs/lora.md", 0): lambda _: _adapter(Path("runs/llama-8b-lora/export")),
    ("docs/howto/export.md", 1): _give_weights,
    ("docs/checkpoints.md", 1): _save,
}
AFTER: dict[tuple[str, int], Callable[[dict[str, Any]], None]] = {
    ("docs/strategy.md", 0): _fit,
    ("docs/howto/lightning-project.md", 1): _fit_large,
}


def run_page(rank: int, world: int, page: str, model_folder: Path, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_blocks(page, {"__name__": "page", **stand_ins(model_folder, folder, patch)})


def run_blocks(page: str, names: dict[str, Any]) -> None:
    for number, block in enumerate(b for b in of("python") if b.page == page):
        BEFORE.get((page, number), lambda _: None)(names)
        code = compile(block.text, str(block), "exec")
        exec(code, names)
        assert not _unknown(code, names), f"{block} uses names that nothing defines"
        AFTER.get((page, number), lambda _: None)(names)
    trained = names.get("trainer")
    assert trained is None or trained.global_step in (0, 1)


@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_python(pool: Pool, page: str, model_folder: Path, tmp_path: Path) -> None:
    # not in this process: it would keep the threads of a process group, and others are forked from it
    pool.run(run_page, 1, page, model_folder, tmp_path)


def _unknown(code: types.CodeType, names: dict[str, Any]) -> set[str]:
    """Global names that a block's functions would not find when they are called."""
    loads = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    inner = {name for c in code.co_consts if isinstance(c, types.CodeType) for name in _unknown(c, names)}
    return {name for name in loads | inner if name not in names and not hasattr(builtins, name)}


# ---- the shell


class Parsed(Exception):
    """Everything was parsed."""


class Reader(NDCLI):
    """Parses and checks, and builds nothing; parsers are made once a kind of command."""

    parsers: ClassVar[dict[type, Any]] = {}

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        kind = next(c for c in type(self).__mro__ if not issubclass(c, Reader))
        if kind not in self.parsers:
            super().setup_parser(*args, **kwargs)
            self.parsers[kind] = self.parser, copy.deepcopy(self.parser.checker)  # type: ignore[attr-defined]
        parser, checker = self.parsers[kind]
        parser.checker, parser.config_files, parser.paths = copy.deepcopy(checker), [], PathResolver(Path.cwd())
        self.parser = parser

    def instantiate_classes(self) -> None:
        pass


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which commands are read: that of the repository, with a recipe and rows of one's own."""
    for entry in ("recipes", "benchmarks"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    (tmp_path / "recipe.yaml").symlink_to(ROOT / "recipes" / "quickstart.yaml")
    (tmp_path / "my_gpu.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PathResolver, "check", lambda *_: None)
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        given = parse(self, args, namespace)
        if type(self).__module__.startswith("lightning_nd.cli"):
            raise Parsed
        return given

    def found(path: Path) -> None:
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(inspect, "find", found)
    monkeypatch.setattr(inspect.Contents, "of", found)


READ: dict[tuple[str, ...], bool] = {}


def lightning_nd_command(words: list[str]) -> None:
    if tuple(words) in READ:
        return
    command, *args = words
    if command.startswith("--") or command == "completion":  # which has no options
        assert main(words) == 0
        return
    assert command in COMMANDS, command
    module, _, function = COMMANDS[command][0].partition(":")
    entry = getattr(__import__(module, fromlist=[function]), function)
    if function == "main_command" and hasattr(__import__(module, fromlist=["NDCLI"]), "NDCLI"):
        reader = next((c for c in vars(__import__(module, fromlist=["NDCLI"])).values() if _extends(c)), NDCLI)
        type("Reading", (Reader, reader) if reader is not NDCLI else (Reader,), {})(command, args)
    else:
        with pytest.raises(Parsed):
            entry(command, args)
    READ[tuple(words)] = True


def _extends(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, NDCLI) and candidate is not NDCLI


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, variables replaced by a number."""
    text = re.sub(r"\$\{?\w+\}?", "0", text.replace("\\\n", " "))
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "||", ";")), len(words))
            command, words = words[:end], words[end + 1 :]
            command = command[: command.index(">")] if ">" in command else command
            while command and (re.fullmatch(r"\w+=.*", command[0]) or command[0] in ("srun", "then")):
                command = command[1:]
            if command:
                yield command


def check_command(program: str, words: list[str], targets: set[str], extras: set[str]) -> None:
    if program == "lightning-nd":
        lightning_nd_command(words)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words)
        if given.module:
            assert given.training_script == "lightning_nd.cli"
            lightning_nd_command(given.training_script_args)
    elif program == "make":
        assert {word for word in words if "=" not in word} <= targets
    elif program == "python":
        script, *options = words
        if script != "train.py":
            source = (ROOT / script).read_text()
            assert all(f'"{option}"' in source for option in options if option.startswith("--"))
    elif program == "pip":
        assert set(re.findall(r"\[([\w,]+)\]", " ".join(words))) <= extras
    else:
        assert program in SHELL, f"{program} is not known to this test"


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("page", sorted({block.page for block in of("bash")}))
def test_shell(page: str) -> None:
    import tomllib

    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for block in (b for b in of("bash") if b.page == page):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, capture_output=True)
        for program, *words in commands(block.text):
            check_command(program, words, targets, extras)


@pytest.mark.parametrize("block", [b for b in of("") if "lightning-nd " in b.text], ids=str)
def test_synopsis(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("lightning-nd ") and (command := line.split()[1]) in COMMANDS:
            main([command, "--help"])
            page = capsys.readouterr().out
            options = set(re.findall(r"(--[a-z][\w.-]*)", line)) - {"--key"}
            assert all(option in page for option in options), options


def test_the_slurm_script_asks_for_the_ranks_of_its_recipe() -> None:
    script = next(b.text for b in of("bash") if "#SBATCH" in b.text)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert len(asked) == script.count("#SBATCH")
    recipe = yaml.safe_load((ROOT / re.search(r"--config (\S+)", script)[1]).read_text())  # type: ignore[index]
    assert int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == recipe["trainer"]["devices"]
    assert int(asked["nodes"]) == recipe["trainer"]["num_nodes"]


# ---- YAML and rows


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml(block: Block, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(block.text))
    if "apiVersion" in documents[0]:
        return check_manifest(documents)
    content = documents[0]
    if not set(content) & {"nd", "trainer", "model", "data"}:
        content = {"data": {"init_args": content}}  # settings of the data module by themselves
    Path("block.yaml").write_text(block.text if content is documents[0] else yaml.safe_dump(content))
    Reader("fit", ["--config", "recipe.yaml", "--config", "block.yaml", "--nd.dp_shard", "auto", "--nd.tp", "1"])
    return None


def check_manifest(documents: list[dict[str, Any]]) -> None:
    by_kind = {document["kind"]: document for document in documents}
    service, job = by_kind["Service"], by_kind["Job"]["spec"]
    assert (by_kind["Service"]["apiVersion"], by_kind["Job"]["apiVersion"]) == ("v1", "batch/v1")
    name, pod = by_kind["Job"]["metadata"]["name"], job["template"]["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert job["completionMode"] == "Indexed"
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args([re.sub(r"\$\(JOB_COMPLETION_INDEX\)", "0", a) for a in container["args"]])
    assert given.master_addr == f"{name}-0.{pod['subdomain']}"
    recipe = yaml.safe_load((ROOT / given.training_script_args[2]).read_text())["trainer"]
    assert int(given.nnodes) == job["completions"] == job["parallelism"] == recipe["num_nodes"]
    ranks = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(given.nproc_per_node) == ranks == recipe["devices"]
    lightning_nd_command(given.training_script_args)


@pytest.mark.parametrize("block", of("json", "csv"), ids=str)
def test_rows(block: Block, tmp_path: Path) -> None:
    path = tmp_path / ("rows.jsonl" if block.language == "json" else "rows.csv")
    path.write_text(block.text)
    found = list(read_rows(path))
    assert found
    for row in found:
        assert row.value is not None
        parse_row(row.value)
