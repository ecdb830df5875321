"""The last words of a run: where its results are and what can be tried next."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_nd.callbacks import LossPlot, ScoreWriter

if TYPE_CHECKING:
    from lightning_nd.cli.app import NDCLI


def closing_words(cli: NDCLI) -> str:
    """A few lines for rank 0 to print when a command is done."""
    trainer: Any = cli.trainer
    if cli.command != "fit":
        return _results(cli)
    entries: list[tuple[str, Path | None]] = [
        ("model", getattr(cli.model, "exported_to", None)),
        ("loss plot", next((c.path for c in trainer.callbacks if isinstance(c, LossPlot)), None)),
        ("metrics", _metrics(trainer)),
        ("configuration", cli.run_dir / "config.yaml"),
    ]
    lines = ["", f"Done: {trainer.global_step} optimizer steps."]
    lines += [f"  {name:<14} {_relative(path)}" for name, path in entries if path is not None and path.exists()]
    lines += ["Next:", *(f"  {line}" for line in _suggestions(cli))]
    return "\n".join(lines)


def _suggestions(cli: NDCLI) -> list[str]:
    exported = getattr(cli.model, "exported_to", None)
    config = shlex.quote(_relative(cli.run_dir / "config.yaml"))
    command, python = _commands()
    lines = []
    if exported is not None:
        folder = _relative(exported)
        option = "--model.lora.adapter" if (exported / "adapter_config.json").is_file() else "--model.model"
        lines.append(f"{command} validate --config {config} {option} {shlex.quote(folder)}")
        answer = f"pipeline('text-generation', '{folder}')('Hello', max_new_tokens=20)[0]['generated_text']"
        lines.append(f'{python} -c "from transformers import pipeline; print({answer})"')
    again = shlex.quote(f"{cli.run_dir}-2")
    lines.append(f"{command} fit --config {config} --trainer.default_root_dir {again} --optimizer.lr 3e-5")
    lines.append(f"{command} verify --config {config}   # this layout against one process")
    return lines


def _commands() -> tuple[str, str]:
    """How this shell calls lightning-nd and Python: by name, or by path when the environment is not activated."""
    if shutil.which("lightning-nd"):
        return "lightning-nd", "python"
    python = _relative(Path(sys.executable))
    beside = Path(sys.executable).parent / "lightning-nd"
    return (_relative(beside) if beside.exists() else f"{python} -m lightning_nd.cli"), python


def _results(cli: NDCLI) -> str:
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    lines = [
        f"  {name:<18} {f'{value:,.0f}' if name.endswith('/tokens') else f'{value:.6g}'}"
        for name, value in sorted(metrics.items())
    ]
    if cli.command == "predict":
        callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
        writer = next((c for c in callbacks if isinstance(c, ScoreWriter)), None)
        return f"\nDone: the score of every row is in {_relative(writer.path)}" if writer else ""
    path = _metrics(cli.trainer)
    if path is not None and path.exists():
        lines.append(f"  {'metrics':<18} {_relative(path)}")
    return "\n".join(["", f"Done: {cli.command}.", *lines])


def _metrics(trainer: Any) -> Path | None:
    from lightning.pytorch.loggers import CSVLogger

    logger = next((item for item in trainer.loggers if isinstance(item, CSVLogger)), None)
    return Path(logger.log_dir) / "metrics.csv" if logger else None


def _relative(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
