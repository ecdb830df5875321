"""``lightning-nd verify``: this recipe's layout against one process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_nd.cli.app import MODEL, NDCLI
from lightning_nd.cli.keys import ConfigError
from lightning_nd.recipes.causal_lm import read_config, resolve_source
from lightning_nd.strategy import NDStrategy
from lightning_nd.verify import Plan, VerifyModule, compare, shrink, table, train_reference

HELP = """  --full true                the model as it is, not a small one of its architecture
  --steps N                  optimizer steps (3)
  --tolerance X              largest relative error of loss, norm and gradients (1e-5); weights: ten times that
"""


class VerifyCLI(NDCLI):
    """Reads the recipe, but builds neither its data nor its Trainer."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--full", type=bool, default=False, help="The model as it is, not shrunk.")
        parser.add_argument("--steps", type=int, default=3, help="Optimizer steps.")
        parser.add_argument("--tolerance", type=float, default=1e-5, help="Largest relative error.")
        super().add_arguments_to_parser(parser)

    @override
    def check_inputs(self) -> None:
        """Rows are made up, so the recipe's data files need not exist."""

    @override
    def instantiate_classes(self) -> None:
        pass


def main_command(command: str, args: list[str]) -> int:
    """Train the recipe's architecture both ways and print the comparison; 0 when it holds, 1 on a mismatch."""
    cli = VerifyCLI(command, args)
    config = cli.config
    if config.model.class_path != MODEL:
        raise ConfigError(f"verify knows how to train {MODEL}; the recipe's model is {config.model.class_path}.")
    if config.trainer.strategy != "nd" or config.steps < 1:
        raise ConfigError("verify needs trainer.strategy 'nd' and --steps of at least 1.")
    options = config.model.init_args
    source = resolve_source(options.model)
    model = read_config(source, trust_remote_code=options.trust_remote_code, **(options.config_overrides or {}))
    small = None if config.full else shrink(model)
    vocabulary = (small or model).get_text_config().vocab_size
    strategy = NDStrategy(**config.nd.as_dict())
    accumulate, clip = config.trainer.accumulate_grad_batches, config.trainer.gradient_clip_val
    if config.trainer.gradient_clip_algorithm not in (None, "norm"):
        raise ConfigError("verify compares clipping by norm; set trainer.gradient_clip_algorithm to 'norm'.")
    trainer = Trainer(
        accelerator=config.trainer.accelerator,
        devices=cli.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy,
        precision="32-true",
        max_steps=config.steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    plan = Plan(
        optimizer=_optimizer(config.optimizer.as_dict()),
        steps=config.steps,
        accumulate=accumulate,
        clip=clip,
        rows=2 * strategy.dims.data,
        vocabulary=vocabulary,
        label_smoothing=strategy.loss.label_smoothing,
        z_loss=strategy.loss.z_loss,
    )
    module = VerifyModule(plan, None if small else Path(source), small)
    trainer.fit(module)
    if not trainer.is_global_zero:
        return 0
    assert module.folder is not None
    try:
        lines = compare(train_reference(module.folder, plan), module.numbers, config.tolerance)
    finally:
        if small is not None:
            shutil.rmtree(module.folder, ignore_errors=True)
    size = "the model as it is" if small is None else "a small model of its architecture"
    print(f"\n{strategy.dims} against one process, {type(model).__name__}, {size}, {plan.steps} steps in float32:\n")
    print(table(lines), flush=True)
    wrong = [line for line in lines if not line.ok]
    if wrong:
        names = "; ".join(f"{line.what} at {line.where}" for line in wrong)
        print(f"\nMISMATCH: {names}", file=sys.stderr, flush=True)
        return 1
    print("\nThis layout gives one process's numbers.", flush=True)
    return 0


def _optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The recipe's, with an eps under which rounding noise of a gradient that is almost zero makes no full step."""
    init_args = dict(optimizer.get("init_args") or {})
    if "eps" in init_args:
        init_args["eps"] = max(init_args["eps"], 1e-6)
    return {**optimizer, "init_args": init_args}
