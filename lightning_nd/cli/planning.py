"""The planner at the command line: options, refusals, and what is printed and written."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_nd.cli.keys import ConfigError
from lightning_nd.mesh import AXES, ParallelDims
from lightning_nd.planner.hardware import Cluster, find_gpu
from lightning_nd.planner.layout import Checkpointing, Setting, Work
from lightning_nd.planner.memory import memory
from lightning_nd.planner.report import as_json, candidate_json, describe_request, explain, packed_rows, table, verified
from lightning_nd.planner.search import Candidate, Limits, Plan, Refusal, notes_on, search, suggestions
from lightning_nd.planner.steptime import step_time

if TYPE_CHECKING:
    from lightning_nd.planner.model import ModelFacts
    from lightning_nd.recipes.lora import LoRA

_PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")
_PICTURES = (".png", ".svg", ".pdf")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd plan --help.")


def _parser(command: str) -> _Parser:
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--gpu-file", type=Path)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--inter-gbps", type=float)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--global-batch-tokens")
    parser.add_argument("--documents-mean", type=int)
    parser.add_argument("--lora", type=int, nargs="?", const=16)
    parser.add_argument("--precision", choices=_PRECISIONS, default="bf16-mixed")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--checkpointing")
    parser.add_argument("--compile", action="store_true")
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--explain", metavar="LAYOUT")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verify", action="store_true")
    return parser


def plan_command(command: str, args: list[str]) -> int:
    """Search, print, and write what was asked for; 0 if something fits.

    Raises:
        ConfigError: for options that cannot be right, and for requests that nothing meets, with what would meet them.
    """
    given = _parser(command).parse_args(args)
    _check(given)
    work, cluster, limits = _work(given), _cluster(given), _limits(given)
    lora = _lora(given)
    from lightning_nd.planner.ask import ask, read_model_config

    config = read_model_config(given.model)
    model, refusal = ask(config, given.model, given.precision, lora)
    if model.max_length is not None and given.seq_len > model.max_length:
        print(f"Note: {given.model} was made for {model.max_length:,} tokens; --seq-len is {given.seq_len:,}.")
    plan = search(model, work, cluster, refusal, limits)
    chosen = _chosen(given.explain, plan, model, work, cluster, refusal) if given.explain else None
    if not plan.candidates and chosen is None:
        raise ConfigError(_nothing(model, work, cluster, refusal, limits, plan))
    picked = chosen or plan.candidates[0]
    if given.json:
        content = candidate_json(picked) if chosen else as_json(plan, model, work, cluster, given.top)
        print(json.dumps(content, indent=2))
    else:
        print(describe_request(model, work, cluster), end="\n\n")
        print(explain(chosen, model, work, cluster) if chosen else table(plan, cluster, given.top))
        print("\n" + packed_rows(picked, work))
    if given.verify:
        from lightning_nd.planner.simulate import simulate

        pairs = None if lora is None else lora.as_dict()
        _say(given, "\n" + verified(picked, simulate(config, picked.setting, work, pairs)))
    if given.write:
        from lightning_nd.planner.recipe import recipe

        pairs = None if lora is None else {"r": lora.r, "alpha": lora.alpha}
        given.write.write_text(recipe(picked, given.model, work, cluster, pairs), encoding="utf-8")
        _say(given, f"\nRecipe: {given.write.absolute()}")
    if given.plot:
        from lightning_nd.planner.plot import draw

        if not plan.candidates:
            raise ConfigError("--plot: nothing fits, so there is nothing to draw.")
        title = f"{given.model} on {cluster.gpus} × {cluster.gpu.name}, rows of {work.length:,} tokens"
        draw(plan, cluster, title, given.plot)
        _say(given, f"\nPicture: {given.plot.absolute()}")
    return 0


def _say(given: Any, text: str) -> None:
    if not given.json:
        print(text)


def _check(given: Any) -> None:
    for name in ("gpus", "gpus_per_node", "seq_len", "micro_batch", "top", "documents_mean", "lora", *AXES):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be 1 or more.")
    if given.inter_gbps is not None and given.inter_gbps <= 0:
        raise ConfigError(f"--inter-gbps is {given.inter_gbps:g}: it must be positive.")
    if given.gpu_file and not given.gpu_file.is_file():
        raise ConfigError(f"--gpu-file: there is no file {given.gpu_file.absolute()}.")
    for name in ("plot", "write"):
        path = getattr(given, name)
        if path and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}.")
    if given.plot and given.plot.suffix not in _PICTURES:
        raise ConfigError(f"--plot {given.plot}: the file must end in {', '.join(_PICTURES)}.")
    fixed = {axis: getattr(given, axis) for axis in AXES if getattr(given, axis) is not None}
    if given.gpus % math.prod(fixed.values()):
        picture = " × ".join(f"{axis}={degree}" for axis, degree in fixed.items())
        raise ConfigError(f"{picture} does not divide --gpus {given.gpus}.")


def _work(given: Any) -> Work:
    rows = None
    if given.global_batch_tokens is not None:
        tokens = read_count(given.global_batch_tokens)
        rows = round(tokens / given.seq_len)
        if rows < 1:
            raise ConfigError(
                f"--global-batch-tokens {given.global_batch_tokens} is less than one row of {given.seq_len:,} tokens."
            )
    return Work(given.seq_len, rows, given.precision, compiled=given.compile, documents=given.documents_mean)


def read_count(text: str) -> int:
    """``4M``, ``512k`` or ``65536``; k and M are 1024 and 1024².

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]?)", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a number of tokens; write 4M, 512k or 65536.")
    return round(float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()])


def _cluster(given: Any) -> Cluster:
    gpu = find_gpu(given.gpu, given.gpu_file)
    nic = gpu.nic_gbs if given.inter_gbps is None else given.inter_gbps / 8
    return Cluster(gpu, given.gpus, given.gpus_per_node, nic)


def _limits(given: Any) -> Limits:
    checkpointing = None if given.checkpointing is None else read_checkpointing(given.checkpointing)
    degrees = {axis: getattr(given, axis) for axis in AXES if getattr(given, axis) is not None}
    return Limits(given.micro_batch, checkpointing, degrees)


def read_checkpointing(text: str) -> Checkpointing:
    """A kind of checkpointing, as `NDStrategy` takes it.

    Raises:
        ValueError: for others, with those that there are.
    """
    from lightning_nd.parallelize.activation import check_activation_checkpointing

    kind: Any = int(text) if text.isdigit() else text
    check_activation_checkpointing(kind)
    return kind


def _lora(given: Any) -> LoRA | None:
    if given.lora is None:
        return None
    from lightning_nd.recipes.lora import LoRA

    return LoRA(r=given.lora)


def read_layout(text: str, gpus: int, rows: int | None) -> Setting:
    """A setting from ``tp=2,cp=4,dp_shard=8,micro_batch=1,accumulation=4,checkpointing=full``.

    Raises:
        ConfigError: naming the part that is wrong.
    """
    known = (*AXES, "micro_batch", "accumulation", "checkpointing")
    values: dict[str, Any] = {}
    for part in text.replace(" ", ",").split(","):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known:
            raise ConfigError(f"--explain: {part!r} is not one of {', '.join(known)}, written like tp=2.")
        if key != "checkpointing" and not value.isdigit():
            raise ConfigError(f"--explain: {part!r}: {key} must be a whole number.")
        values[key] = read_checkpointing(value) if key == "checkpointing" else int(value)
    degrees: dict[str, Any] = {axis: values[axis] for axis in AXES if axis in values}
    degrees.setdefault("dp_shard", "auto")
    try:
        dims = ParallelDims.resolve(world_size=gpus, **degrees)
    except ValueError as error:
        raise ConfigError(f"--explain: {error}") from None
    micro_batch = values.get("micro_batch", 1)
    accumulation = values.get("accumulation") or max(1, (rows or 0) // (dims.data * micro_batch))
    setting = Setting(dims, micro_batch, accumulation, values.get("checkpointing", "none"))
    if rows is not None and setting.rows != rows:
        raise ConfigError(
            f"--explain: {setting} makes {setting.rows} rows a step, and --global-batch-tokens asks for {rows}."
        )
    return setting


def _chosen(text: str, plan: Plan, model: ModelFacts, work: Work, cluster: Cluster, refusal: Refusal) -> Candidate:
    if text.isdigit():
        place = int(text)
        if not 1 <= place <= len(plan.candidates):
            raise ConfigError(f"--explain {place}: {len(plan.candidates)} settings fit; give a place from 1 on.")
        return plan.candidates[place - 1]
    setting = read_layout(text, cluster.gpus, work.rows)
    if (why := refusal(setting.dims)) is not None:
        raise ConfigError(f"--explain: fit refuses this layout. {why}")
    found = memory(model, setting, work)
    return Candidate(setting, found, step_time(model, setting, work, cluster), notes_on(model, setting, cluster))


def _nothing(model: ModelFacts, work: Work, cluster: Cluster, refusal: Refusal, limits: Limits, plan: Plan) -> str:
    lines = ["Nothing fits.", describe_request(model, work, cluster)]
    lines += [
        f"  {r.count} settings: {r.reason}" + (f" (closest: {r.closest})" if r.closest else "") for r in plan.rejected
    ]
    hints = suggestions(model, work, cluster, refusal, limits)
    if limits.degrees:
        free = search(model, work, cluster, refusal, replace(limits, degrees={})).candidates
        if free:
            hints.insert(0, f"another layout: {free[0].setting}")
    lines.append(
        "What would fit: " + "; or ".join(hints) + "." if hints else "No small change that was tried would fit."
    )
    return "\n".join(lines)
