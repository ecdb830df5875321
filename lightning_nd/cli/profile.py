"""``lightning-nd profile``: a few steps of a recipe, and where their time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_nd.cli.app import MODEL, NDCLI
from lightning_nd.cli.keys import ConfigError
from lightning_nd.profiling import Phases, ProfileSteps

HELP = """  --steps N                  optimizer steps that are timed by phase (3)
  --warmup N                 optimizer steps before them (2)

Then the bytes of one step are counted by axis and collective, and one step is traced. Results of rank 0 are in
RUN_DIR/profile: profile.json, and trace.json for ui.perfetto.dev or chrome://tracing. Nothing is saved or exported;
validation and the recipe's callbacks are left out."""


class ProfileCLI(NDCLI):
    """Reads the recipe for a run that leaves nothing behind but its profile."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=3, help="Optimizer steps that are timed.")
        parser.add_argument("--warmup", type=int, default=2, help="Optimizer steps before them.")
        super().add_arguments_to_parser(parser)

    @override
    def before_instantiate_classes(self) -> None:
        if self.config.steps < 1 or self.config.warmup < 0:
            raise ConfigError("profile needs --steps of at least 1 and --warmup of at least 0.")
        super().before_instantiate_classes()
        self.save_config_callback = None
        if self.config.model.class_path == MODEL:
            self.config.model.init_args.export = False
            self.config.lr_scheduler = None  # one for a run of a few steps may not exist

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        phases = Phases()
        self.profile = ProfileSteps(phases, self.config.warmup, self.config.steps, self.run_dir / "profile")
        config.update(
            callbacks=[self.profile], profiler=phases, max_steps=self.profile.length, max_epochs=-1, max_time=None,
            limit_val_batches=0, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        return super()._instantiate_trainer(config, callbacks)


def main_command(command: str, args: list[str]) -> int:
    """Run the steps and print what they were spent on."""
    cli = ProfileCLI(command, args)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    found = cli.profile.found
    if not cli.trainer.is_global_zero or found is None:
        return 0
    strategy: Any = cli.trainer.strategy
    layout = getattr(strategy, "dims", type(strategy).__name__)
    print(f"\nRank 0 of {layout}: {cli.config.steps} steps after {cli.config.warmup}\n\n{found.words()}\n")
    print(f"  {'trace':<10} {_shown(cli.profile.trace)}   (ui.perfetto.dev)", flush=True)
    print(f"  {'numbers':<10} {_shown(cli.profile.folder / 'profile.json')}", flush=True)
    return 0


def _shown(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
