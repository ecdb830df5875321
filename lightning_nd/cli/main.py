"""Entry point: picks the command, shows help, and turns expected errors into messages."""

from __future__ import annotations

import importlib
import linecache
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

COMMANDS = {
    "fit": ("lightning_nd.cli.app:main_command", "train, validate along the way, export a Hugging Face folder"),
    "validate": ("lightning_nd.cli.app:main_command", "loss and perplexity on data.val"),
    "test": ("lightning_nd.cli.app:main_command", "loss, perplexity, tokens and accuracy on data.test"),
    "predict": ("lightning_nd.cli.app:main_command", "score every row of data.predict"),
    "export": (
        "lightning_nd.cli.checkpoint:export_command",
        "write the model of a checkpoint as a Hugging Face folder",
    ),
    "checkpoint": ("lightning_nd.cli.checkpoint:main_command", "list, check and compare checkpoints; loads nothing"),
    "doctor": ("lightning_nd.cli.doctor:main_command", "what is wrong with this machine, and what to do"),
    "plan": ("lightning_nd.cli.plan:main_command", "which layout fits, how fast it is and why; needs no GPU"),
    "calibrate": ("lightning_nd.cli.calibrate:main_command", "measure this machine's GPU, for plan --gpu-file"),
    "convert-config": ("lightning_nd.cli.convert:main_command", "an Axolotl configuration as a recipe"),
    "schema": ("lightning_nd.cli.schema:main_command", "a JSON schema of recipes, for editors"),
    "completion": ("lightning_nd.cli.completion:main_command", "completion of commands and options, for bash and zsh"),
    "plot": ("lightning_nd.cli.plot:main_command", "a run's loss, throughput and memory as a picture"),
    "profile": ("lightning_nd.cli.profile:main_command", "where the time of a few steps goes: phases, axes, a trace"),
    "verify": ("lightning_nd.cli.verify:main_command", "compare this layout with one process, number by number"),
}

_READER_GONE = 128 + 13  # as a shell tells of a process that SIGPIPE has ended
_REFUSALS = (ValueError, TypeError, FileNotFoundError, FileExistsError, NotImplementedError, RuntimeError)

_HELP = """usage: lightning-nd COMMAND --config RECIPE.yaml [--key value ...]

commands:
{commands}

lightning-nd COMMAND --help    the options of a command
"""

_COMMAND_HELP = """usage: lightning-nd {command} --config RECIPE.yaml [--key value ...]

{what}.

Every key of a configuration file is also an option: --nd.tp 2 --data.micro_batch_size 4{example}.
Options win over files, and later files over earlier ones.

{options}
  --print_config             the complete configuration of this command, and exit
  --model.help CLASS, --data.help CLASS, --optimizer.help CLASS   the arguments of a class
  --help-all                 every option of the Trainer and the strategy
"""

#: Options of all commands that read a recipe, and of some.
_COMMON = """  -c, --config FILE          a recipe; can be given several times
  --model.model PATH         model folder or hub id
{data}
  --nd.tp, --nd.dp_shard,    the layout: how many ranks share a layer, share the parameters,
  --nd.dp_replicate, --nd.cp   hold replicas, share a sequence
  --nd.activation_checkpointing HOW   none, full, selective or every n-th block
  --trainer.devices N        processes on this machine; the product of the degrees when left out
  --trainer.precision P      32-true, bf16-mixed, bf16-true
  --trainer.default_root_dir DIR   where results go (runs/<name of the recipe>)"""
_DATA = {
    "fit": """  --data.train FILE          rows to train on (JSONL: messages, prompt + completion, or text)
  --data.val FILE            rows to validate on""",
    "validate": "  --data.val FILE            rows to validate on",
    "test": "  --data.test FILE           rows to test on",
    "predict": "  --data.predict FILE        rows to score",
}
_FIT_OPTIONS = """
  --trainer.max_steps N      length of the run
  --optimizer CLASS          a torch optimizer class; --optimizer.lr 1e-5 sets its arguments
  --lr_scheduler CLASS       a schedule, stepped once per optimizer step
  --trainer.callbacks+=CLASS add to the list of the file (= replaces it)
  --ckpt_path PATH           resume from a checkpoint; last takes the newest complete one
  --auto-resume              go on from the newest complete checkpoint of the folder, or start if there is none
  --overwrite true           replace an earlier run in the same folder
  --dry-run                  play one rank of this layout on fake tensors instead: live memory by phase, bytes by axis,
                             and what the run would refuse; needs no GPU, no weights and no data, starts no process"""
_EVALUATION_OPTIONS = """
  --ckpt_path PATH           evaluate a checkpoint"""


def command_help(command: str, what: str, extra: str = "") -> str:
    """The help of a command that reads a recipe: the options that people change."""
    options = _COMMON.format(data=_DATA.get(command, _DATA["fit"]))
    own = "\n" + extra.rstrip("\n") if extra else ""
    options += _FIT_OPTIONS if command == "fit" else _EVALUATION_OPTIONS if command in _DATA else own
    example = " --optimizer.lr 2e-5" if command in ("fit", "verify") else ""
    return _COMMAND_HELP.format(command=command, what=what, example=example, options=options)


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 failed, 2 refused)."""
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return _READER_GONE
    return code


def _reader_is_gone() -> bool:
    """Whether nobody reads what is printed any more, as behind ``| head``; if so, print into the void from here on."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(args: list[str] | None) -> int:
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(_HELP.format(commands="\n".join(f"  {n:<{width}}  {what}" for n, (_, what) in COMMANDS.items())))
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("lightning-nd"))
        return 0
    command, *rest = args
    if command not in COMMANDS:
        from lightning_nd.names import nearest

        print(f"lightning-nd: there is no command {command!r}: {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    target, what = COMMANDS[command]
    module_name, _, function = target.partition(":")
    if "--help" in rest or "-h" in rest:
        module = importlib.import_module(module_name)
        extra = getattr(module, "HELP", "") if command in ("verify", "profile") else ""
        # of a command that takes no recipe
        usage = getattr(module, "EXPORT_USAGE" if command == "export" else "USAGE", None)
        print(usage or command_help(command, what[0].upper() + what[1:], extra))
        return 0
    _quiet()
    rest = ["--help" if option == "--help-all" else option for option in rest]
    try:
        return int(getattr(importlib.import_module(module_name), function)(command, rest))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return _READER_GONE
        return _explain(error, command)


def _quiet() -> None:
    """Leave out messages that no user can act on."""
    # FSDP2 warns of views among a module's outputs; nothing here changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # torch and Lightning warn about names inside torch and Lightning
    warnings.filterwarnings(
        "ignore", message=".*all_gather_into_tensor|.*reduce_scatter_tensor", category=FutureWarning
    )
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.")
    # a data module without validation rows has no loaders for them
    warnings.filterwarnings("ignore", message="Total length of `dict` across ranks is zero")
    # at its small default sizes the CPU loader needs no worker processes
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    from lightning_nd.launch import is_child

    if is_child():  # rank 0 says it for all
        logging.getLogger("lightning").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "litlogger" not in r.getMessage())


def _explain(error: Exception, command: str) -> int:
    """Print a refusal as its message, anything else with its traceback; a child process leaves that to rank 0."""
    from lightning_nd.launch import RankFailedError, is_child

    if is_child():
        return 1
    sys.stdout.flush()
    if isinstance(error, RankFailedError):
        print(f"lightning-nd {command}: {error}", file=sys.stderr, flush=True)
        return 1
    refusal = _refusal(error)
    if refusal is not None and not os.environ.get("LIGHTNING_ND_TRACEBACK"):
        print(f"lightning-nd {command}: error: {refusal}", file=sys.stderr, flush=True)
        return 2
    traceback.print_exception(error)
    return 1


def _refusal(error: BaseException | None) -> BaseException | None:
    """The error that this package raised on purpose: of a known kind, with one of our frames innermost.

    The parser wraps what a constructor raises, so such errors are looked for below its own.
    """
    while error is not None:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        if frame is None:
            return None
        file = Path(frame.tb_frame.f_code.co_filename).resolve()
        if file.is_relative_to(Path(__file__).resolve().parents[1]):
            on_purpose = linecache.getline(str(file), traceback.extract_tb(error.__traceback__)[-1].lineno or 0)
            is_raised = on_purpose.strip().startswith("raise ")
            return error if is_raised and isinstance(error, _REFUSALS) else None
        if "jsonargparse" not in file.parts:
            return None
        error = error.__cause__ or error.__context__
    return None
