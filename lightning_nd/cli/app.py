"""The Trainer commands: one configuration becomes a Trainer, a model and data, on LightningCLI."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentError
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.enums import LightningEnum
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_nd.callbacks import LossPlot, MetricsLog, PlanAdvice, ProgressBar, ScoreWriter, StartBanner, Throughput
from lightning_nd.checkpoint.last import was_restarted
from lightning_nd.cli.keys import ConfigError, KeyChecker
from lightning_nd.cli.messages import explain, shorten
from lightning_nd.cli.paths import PathResolver
from lightning_nd.devices import sees_only_its_own
from lightning_nd.launch import check_world, is_interactive, resolve_devices
from lightning_nd.precision import check_precision
from lightning_nd.recipes.optim import (
    DEFAULT_OPTIMIZER,
    DEFAULT_SCHEDULER,
    check_optimizer,
    check_schedule,
    configure_optimizers,
)
from lightning_nd.strategy import NDStrategy

# Some arguments of Lightning's callbacks (Timer's interval) have such defaults, and configurations are saved.
yaml.SafeDumper.add_multi_representer(LightningEnum, lambda dumper, value: dumper.represent_str(str(value.value)))

MODEL = "lightning_nd.recipes.CausalLM"
DATA = "lightning_nd.data.ChatDataModule"
CLASSES: dict[str, str | None] = {
    "model": MODEL,
    "data": DATA,
    "optimizer": DEFAULT_OPTIMIZER["class_path"],
    "lr_scheduler": DEFAULT_SCHEDULER["class_path"],
}
BASES: dict[str, type] = {
    "model": LightningModule,
    "data": LightningDataModule,
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": LRScheduler,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
    "trainer.strategy": Strategy,
}
HINTS = {
    "model": "this is the class; a model folder or hub id goes to model.model",
    "data": "this is the class; a file of rows goes to data.train",
}
# the values of a fresh Trainer that a fine-tuning run wants otherwise; all can be set again
_DRY_RUN = ("--nd.dry_run=true", "--trainer.accelerator=cpu")  # no GPU needs to be there
TRAINER_DEFAULTS = {"strategy": "nd", "log_every_n_steps": 1, "use_distributed_sampler": False}


class NDArgumentParser(LightningArgumentParser):
    """A parser that checks every key of a configuration file and resolves its relative paths."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.paths = PathResolver(Path.cwd())
        self.checker: KeyChecker | None = None
        self.config_files: list[str] = []

    @override
    def parse_string(self, content: str, path: str | os.PathLike = "", *args: Any, **kwargs: Any) -> Namespace:
        source = os.path.join(os.getcwd(), path) if path else "configuration text"
        if self.checker is not None:
            self.checker.check_text(content, shorten(source, self.paths.start))
        if path:  # jsonargparse reads a file from within its folder
            self.config_files.append(source)
            config = yaml.safe_load(content)
            if self.paths.rewrite(config, Path.cwd()):
                # the loader of the parser reads numbers such as 1e-5 and is kept; only paths are replaced
                content = yaml.safe_dump(config, sort_keys=False)
        return super().parse_string(content, path, *args, **kwargs)


class SaveRunConfig(SaveConfigCallback):
    """Writes the complete configuration of a fit into its run folder; feeding it back repeats the run."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pass  # a run that goes on may still be refused, and its folder then keeps what it was trained with

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.already_saved and trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            saved = self.config.clone()
            saved.overwrite, saved.ckpt_path, saved.auto_resume = False, None, False
            self.parser.save(saved, folder / self.config_filename, skip_none=False, overwrite=True, multifile=False)
        self.already_saved = True


class NDCLI(LightningCLI):
    """Parses one command's configuration and builds the Trainer, the model and the data.

    Args:
        command: ``fit``, ``validate``, ``test``, ``predict``, or another command that reads the same configuration.
        args: the arguments after the command.
    """

    def __init__(self, command: str, args: list[str]) -> None:
        self.command = command
        args = [f"--auto_resume={a.partition('=')[2] or 'true'}" if a.startswith("--auto-resume") else a for a in args]
        args = [option for a in args for option in (_DRY_RUN if a == "--dry-run" else (a,))]
        self.arguments = args = _files_first(args)
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveRunConfig,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=42,
            parser_class=NDArgumentParser,
            parser_kwargs={
                "prog": f"lightning-nd {command}",
                "description": None,
                "exit_on_error": False,
                "allow_abbrev": False,
            },
            auto_configure_optimizers=False,
            args=args,
            run=False,
        )

    # ---- parsing

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, NDArgumentParser)
        parser.add_class_arguments(NDStrategy, "nd", instantiate=False)
        parser.add_subclass_arguments(
            torch.optim.Optimizer, "optimizer", instantiate=False, skip={"params"}, fail_untyped=False, required=False
        )
        parser.add_subclass_arguments(
            LRScheduler, "lr_scheduler", instantiate=False, skip={"optimizer"}, fail_untyped=False, required=False
        )
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="Checkpoint to resume from or evaluate, or 'last'."
        )
        parser.add_argument(
            "--auto_resume", type=bool, default=False, help="Go on from the last checkpoint of this folder, if any."
        )
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace an earlier run in the same folder.")
        parser.set_defaults(
            {
                "model": {"class_path": MODEL},
                "data": {"class_path": DATA},
                "optimizer": DEFAULT_OPTIMIZER,
                "lr_scheduler": DEFAULT_SCHEDULER,
            }
        )
        defaults = parser.get_defaults().as_dict()
        groups = {name: list(defaults[name]) for name in ("trainer", "nd")}
        others = [name for name in defaults if name not in groups and name not in CLASSES]
        parser.checker = KeyChecker(
            groups=groups, classes=CLASSES, bases=BASES, hints=HINTS, others=[*others, "config"]
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, NDArgumentParser)
        assert parser.checker is not None
        _check_files(args)
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            parser.checker.check_options(args)
            raise ConfigError(explain(error.message or str(error), parser.config_files, parser.paths.start)) from error

    @override
    def before_instantiate_classes(self) -> None:
        parser, config = self.parser, self.config
        assert isinstance(parser, NDArgumentParser)
        self.check_inputs()
        if config.trainer.default_root_dir is None:
            stem = Path(parser.config_files[-1]).stem if parser.config_files else "lightning-nd"
            config.trainer.default_root_dir = os.path.join("runs", stem)
        self.run_dir = Path(config.trainer.default_root_dir)
        self._check_strategy()
        self._check_run_dir()

    def check_inputs(self) -> None:
        """Refuse input files that do not exist, before anything is built."""
        if self.config.ckpt_path == "":
            raise ConfigError("--ckpt_path is empty: give a checkpoint or 'last', or leave it out.")
        if not self.is_dry:  # which reads no row
            self.parser.paths.check(self.config)  # type: ignore[attr-defined]

    @property
    def is_dry(self) -> bool:
        """Whether one rank is played in place of a run."""
        return self.config.trainer.strategy == "nd" and bool(self.config.nd.dry_run)

    def _check_strategy(self) -> None:
        config = self.config
        self.devices = config.trainer.devices
        defaults = self.parser.get_defaults().nd.as_dict()
        changed = {key: value for key, value in config.nd.as_dict().items() if value != defaults[key]}
        if config.trainer.strategy != "nd" and changed:
            given = ", ".join(f"nd.{key}={value}" for key, value in changed.items())
            raise ConfigError(
                f"{given} would be ignored, because trainer.strategy is {_name(config.trainer.strategy)}."
                " Leave trainer.strategy at 'nd', or put the settings into the strategy's init_args."
            )
        if config.trainer.strategy == "nd":
            if config.trainer.precision is not None:
                check_precision(str(config.trainer.precision))
            degrees = {key: config.nd[key] for key in ("dp_replicate", "dp_shard", "cp", "tp")}
            on_gpu = config.trainer.accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
            nodes = config.trainer.num_nodes
            given = config.trainer.devices
            environ: Any = {} if self.is_dry else os.environ
            self.devices = resolve_devices(
                environ,
                devices=int(given) if isinstance(given, str) and given.isdigit() else given,
                num_nodes=nodes,
                accelerator_devices=torch.cuda.device_count() if on_gpu else None,
                **degrees,
            )
            if isinstance(self.devices, int) and self.devices > 0:
                check_world(environ, devices=self.devices, num_nodes=nodes, interactive=is_interactive(), **degrees)
                if on_gpu and sees_only_its_own(os.environ):
                    self.devices = 1  # what this process can be told to use

    def _check_run_dir(self) -> None:
        saved = self.run_dir / "config.yaml"
        # a fit that was refused in set-up has left its configuration only
        is_run = saved.exists() and any(p.name not in ("config.yaml", ".progress") for p in self.run_dir.iterdir())
        if self.command == "fit" and is_run and not self.is_dry and not self._may_use_folder():
            another = shlex.quote(f"{self.run_dir}-2")
            raise ConfigError(
                f"{saved.absolute()} exists: this folder holds an earlier run. Give a new folder with"
                f" --trainer.default_root_dir {another}, or replace the run with --overwrite true."
            )
        if self.is_dry:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--trainer.default_root_dir {self.run_dir}: the folder cannot be made ({error.strerror}). Give one"
                " that this user can write to."
            ) from None
        if self.command == "fit" and not os.access(self.run_dir, os.W_OK | os.X_OK):
            raise ConfigError(
                f"--trainer.default_root_dir {self.run_dir}: this user cannot write to the folder, or its disk is"
                " mounted read-only. Give another one."
            )

    def _may_use_folder(self) -> bool:
        return self.config.overwrite or self.config.ckpt_path or self.config.auto_resume or was_restarted()

    # ---- building

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        optimizer, scheduler = (_as_dict(self.config.get(key)) for key in ("optimizer", "lr_scheduler"))
        own = is_overridden("configure_optimizers", self.model)
        if own and not getattr(self.model, "optimizer_from_cli", False):
            defaults = self.parser.get_defaults()
            if optimizer != _as_dict(defaults.optimizer) or scheduler != _as_dict(defaults.lr_scheduler):
                raise ConfigError(
                    f"{type(self.model).__name__} makes its own optimizer in configure_optimizers, so optimizer and"
                    " lr_scheduler in the configuration would be ignored. Remove them, or that method."
                )
        elif optimizer is not None:
            check_optimizer(optimizer)
            steps = self.config.trainer.max_steps
            if self.command == "fit" and isinstance(steps, int) and steps > 0:
                check_schedule(scheduler, steps)

            def configure(module: LightningModule) -> Any:
                return configure_optimizers(module, optimizer, scheduler)

            # a method and not a finished optimizer: it must see the parameters as they are after sharding
            self.model.configure_optimizers = MethodType(configure, self.model)

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        config["devices"] = self.devices
        if config["strategy"] == "nd":
            config["strategy"] = NDStrategy(**self.config.nd.as_dict())
        if config["logger"] in (None, True):
            folder = self.run_dir if self.command == "fit" else self.run_dir / self.command
            config["logger"] = MetricsLog(str(folder), name="", version="")
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        defaults: list[Callback] = []
        if config["logger"]:
            defaults += [Throughput(), LossPlot()]
        if self.command == "fit":
            defaults += [StartBanner(), PlanAdvice()]
        if self.command == "predict":
            defaults.append(ScoreWriter(str(self.run_dir / "predict" / "scores.jsonl")))
        if config["enable_progress_bar"] is not False:
            defaults.append(ProgressBar())
        config["callbacks"] = given + [d for d in defaults if not any(isinstance(g, _kind(d)) for g in given)]
        return super()._instantiate_trainer(config, callbacks)

    # ---- running

    def run(self) -> Any:
        """Call the Trainer method of the command."""
        method = getattr(self.trainer, self.command)
        # predictions go to a file, row by row; kept in memory they would only pile up
        options = {"return_predictions": False} if self.command == "predict" else {}
        path = self.config.ckpt_path
        if self.command == "fit" and self.config.auto_resume:
            path = "last"
        return method(self.model, datamodule=self.datamodule, ckpt_path=path, **options)


def parser_of(command: str) -> NDArgumentParser:
    """The parser of a command that reads a recipe; nothing is parsed."""

    class OnlyParser(NDCLI):
        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            raise _Made(parser)

    try:
        OnlyParser(command, [])
    except _Made as made:
        return made.args[0]
    raise AssertionError("NDCLI makes its parser before it parses")


class _Made(Exception):
    """Carries a parser out of LightningCLI's constructor."""


def _kind(default: Callback) -> type[Callback]:
    """What counts as the user's own choice in place of a default callback."""
    return LightningProgressBar if isinstance(default, ProgressBar) else type(default)


def _check_files(args: list[str]) -> None:
    """Refuse configuration files that do not exist."""
    following = [*args[1:], ""] if args else []
    given = [after for argument, after in zip(args, following, strict=True) if argument in ("--config", "-c")]
    given += [argument.partition("=")[2] for argument in args if argument.startswith("--config=")]
    for file in given:
        # text in place of a file's name is allowed
        if file and "\n" not in file and ":" not in file and not Path(file).expanduser().is_file():
            raise ConfigError(f"--config: there is no file {Path(file).expanduser().absolute()}.")


def _files_first(args: list[str]) -> list[str]:
    """The arguments with the configuration files before the options, which win over files wherever they stand."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for argument in rest:
        if argument in ("--config", "-c"):
            files += [argument, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            (files if argument.startswith("--config=") else others).append(argument)
    return files + others


def _as_dict(value: Any) -> dict[str, Any] | None:
    return value.as_dict() if isinstance(value, Namespace) else value


def _name(strategy: Any) -> str:
    return repr(strategy if isinstance(strategy, str) else strategy.class_path)


def main_command(command: str, args: list[str]) -> int:
    """Run one Trainer command and say where its results are."""
    from lightning_nd.cli.summary import closing_words

    cli = NDCLI(command, args)
    cli.run()
    if cli.trainer.is_global_zero and not cli.is_dry:
        sys.stdout.flush()
        print(closing_words(cli), flush=True)
    return 0
