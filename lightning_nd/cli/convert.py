"""``lightning-nd convert-config``: an Axolotl configuration as a recipe, and what of it has no counterpart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd convert-config AXOLOTL.yml [--output RECIPE.yaml]

Write a recipe from an Axolotl configuration. Every setting is either in the recipe, or in a list with the reason why it
is not: nothing is dropped in silence. The list is printed, and stands at the head of the recipe.

  --output FILE           the recipe to write, which must not exist; left out, it is printed
  --strict                exit code 1 if a setting that changes training has no counterpart
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd convert-config --help.")


@dataclass
class Converted:
    """A recipe, and what is to be said of it.

    Attributes:
        recipe: for ``lightning-nd fit``.
        lost: settings without counterpart, with a reason; they change training.
        unneeded: settings that mean nothing here, with a reason.
        notes: what is to be looked at.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    unneeded: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set a key of the recipe, written with dots."""
        *groups, last = path.split(".")
        into = self.recipe
        for group in groups:
            into = into.setdefault(group, {})
        into[last] = value


_MODEL, _DATA, _OPTIMIZER, _LORA = "model.init_args", "data.init_args", "optimizer.init_args", "model.init_args.lora"
#: One key to one key, with the same values.
PLAIN = {
    "base_model": f"{_MODEL}.model",
    "tokenizer_config": f"{_MODEL}.tokenizer",
    "trust_remote_code": f"{_MODEL}.trust_remote_code",
    "neftune_noise_alpha": f"{_MODEL}.neftune",
    "sequence_len": f"{_DATA}.max_length",
    "sample_packing": f"{_DATA}.packing",
    "micro_batch_size": f"{_DATA}.micro_batch_size",
    "eval_batch_size": f"{_DATA}.eval_micro_batch_size",
    "dataloader_num_workers": f"{_DATA}.num_workers",
    "dataset_processes": f"{_DATA}.num_proc",
    "dataset_num_proc": f"{_DATA}.num_proc",
    "dataset_prepared_path": f"{_DATA}.cache_dir",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "num_epochs": "trainer.max_epochs",
    "max_steps": "trainer.max_steps",
    "max_grad_norm": "trainer.gradient_clip_val",
    "output_dir": "trainer.default_root_dir",
    "logging_steps": "trainer.log_every_n_steps",
    "seed": "seed_everything",
    "learning_rate": f"{_OPTIMIZER}.lr",
    "weight_decay": f"{_OPTIMIZER}.weight_decay",
    "adam_epsilon": f"{_OPTIMIZER}.eps",
    "lora_r": f"{_LORA}.r",
    "lora_alpha": f"{_LORA}.alpha",
    "lora_dropout": f"{_LORA}.dropout",
    "peft_use_rslora": f"{_LORA}.rslora",
    "lora_model_dir": f"{_LORA}.adapter",
    "peft_layers_to_transform": f"{_LORA}.layers",
    "dp_replicate_size": "nd.dp_replicate",
    "dp_shard_size": "nd.dp_shard",
    "context_parallel_size": "nd.cp",
    "sequence_parallel_degree": "nd.cp",
    "tensor_parallel_size": "nd.tp",
    "torch_compile": "nd.compile",
    "auto_resume_from_checkpoints": "auto_resume",
}
_TOKENIZER = "the model folder's tokenizer is used; change it there"
_FOUND = "found from the model"
#: Keys that mean nothing here.
UNNEEDED = {
    **dict.fromkeys(("model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived_model"), _FOUND),
    **dict.fromkeys(("pad_to_sequence_len", "eval_sample_packing", "group_by_length"), "the data module decides"),
    **dict.fromkeys(("fsdp", "fsdp_version", "deepspeed"), "nd.dp_shard shards parameters, gradients and optimizer"),
    "fsdp_config": "the repeated blocks of the model are found; see coming-from.md",
    "flash_attention": "kernels are chosen by what is installed; nd.document_attention for packed rows",
    "sdp_attention": "the default",
    "xformers_attention": "kernels are chosen by what is installed",
    "eager_attention": "set model.attn_implementation if it is wanted",
    "tf32": "set torch.set_float32_matmul_precision in code",
    "local_rank": "set by who starts the processes",
    "ddp_timeout": "nd.timeout",
    "strict": "unknown keys are always refused",
    "special_tokens": _TOKENIZER,
    "tokens": _TOKENIZER,
    "gradient_checkpointing_kwargs": "nd.activation_checkpointing has no others",
    "logging_first_step": "every step is logged",
    "ring_attn_func": "nd.cp_method",
    "heads_k_stride": "nd.cp_method",
    "debug": "use --dry-run",
}  # fmt: skip
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "torch.optim.AdamW"),
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}


def convert(given: dict[str, Any]) -> Converted:
    """A recipe from an Axolotl configuration; every key ends in the recipe or in a list."""
    out = Converted()
    rest = {key: value for key, value in given.items() if value is not None and value != ""}
    is_lora = str(rest.get("adapter", "")).lower() in ("lora", "qlora")
    for rule in _RULES:
        rule(rest, out)
    for key in list(rest):
        if key.startswith(("lora_", "peft_")) and not is_lora:
            out.unneeded[key] = "there is no adapter"
        elif key in PLAIN:
            out.put(PLAIN[key], rest[key])
        elif key in UNNEEDED:
            out.unneeded[key] = UNNEEDED[key]
        elif rest[key] is False or rest[key] in ([], {}):
            out.unneeded[key] = "switched off"
        else:
            out.lost[key] = _reason(key)
    return out


def _reason(key: str) -> str:
    if key.startswith(("wandb_", "mlflow_", "comet_", "use_wandb", "swanlab_")):
        return "set trainer.logger to one of lightning.pytorch.loggers"
    if key == "resume_from_checkpoint":
        return "checkpoints of other tools are not read: start from a model folder"
    if key.startswith("hub_"):
        return "upload the export afterwards"
    if key in ("rl", "trl", "reward_model", "process_reward_model", "dpo_beta", "rl_beta"):
        return "only supervised fine-tuning has a recipe"
    if key.startswith(("load_in_", "gptq", "bnb_")):
        return "only qlora quantizes: model.lora.quantization"
    if key.startswith("liger_") or key in ("plugins", "cut_cross_entropy"):
        return "the loss is made in chunks; nd.loss.kernel names other packages' kernels"
    return "there is no such setting here"


# ---- settings that are not one to one; each rule takes its keys out


def _data(rest: dict[str, Any], out: Converted) -> None:
    for key, role in (("datasets", "train"), ("test_datasets", "val")):
        sources = rest.pop(key, None)
        if not sources:
            continue
        sources = sources if isinstance(sources, list) else [sources]
        found = [_source(source, f"{key}[{i}]", out) for i, source in enumerate(sources)]
        out.put(f"{_DATA}.{role}", found[0] if len(found) == 1 else found)
    if (share := rest.pop("val_set_size", None)) and "test_datasets" not in rest:
        out.lost["val_set_size"] = f"{share:g} of the training rows: split the file, and name the part in data.val"
    if "pretraining_dataset" in rest:
        out.lost["pretraining_dataset"] = "data.train with streaming: true, over rows with text"
        rest.pop("pretraining_dataset")


def _source(source: Any, where: str, out: Converted) -> Any:
    source = {"path": source} if isinstance(source, str) else dict(source)
    path, kind = str(source.pop("path", "")), source.pop("type", None)
    files, split = source.pop("data_files", None), source.pop("split", None)
    name = source.pop("name", None)
    if source.get("ds_type") in (None, "json", "jsonl", "csv", "parquet"):
        source.pop("ds_type", None)  # told by the file's ending
    if source.get("field") == "text":
        source.pop("field")
    if kind not in (None, "chat_template", "completion", "pretrain"):
        out.lost[f"{where}.type"] = (
            f"{kind if isinstance(kind, str) else 'a template of its own'}: write rows with messages, or prompt and"
            " completion (docs/data.md)"
        )
    roles = source.pop("roles_to_train", None)
    if roles not in (None, ["assistant"], ["gpt"]):
        out.lost[f"{where}.roles_to_train"] = "assistant turns are trained; data.train_on: all trains every token"
    if (field_name := source.pop("field_messages", "messages")) != "messages":
        out.lost[f"{where}.field_messages"] = f"rename the column {field_name!r} to messages"
    if (template := source.pop("chat_template", None)) not in (None, "tokenizer_default"):
        out.lost[f"{where}.chat_template"] = f"{template}: the tokenizer's template is used, or data.chat_template"
    for key in source:
        out.lost[f"{where}.{key}"] = "sources have path, weight, hub, config and split only"
    is_file = bool(files or Path(path).suffix or path.startswith((".", "/", "~")))
    if is_file and (split not in (None, "train") or name):
        out.lost[f"{where}.split"] = "files are read whole"
    if is_file:
        return files or path
    hub = {"hub": path, "split": split or "train"}
    return {**hub, "config": name} if name else hub


def _supervision(rest: dict[str, Any], out: Converted) -> None:
    if rest.pop("train_on_inputs", None):
        out.put(f"{_DATA}.train_on", "all")
    template = rest.pop("chat_template", None)
    if isinstance(template, str) and template not in ("tokenizer_default", "jinja"):
        out.lost["chat_template"] = f"{template}: the tokenizer's own is used; data.chat_template names a .jinja file"
    if jinja := rest.pop("chat_template_jinja", None):
        out.lost["chat_template_jinja"] = f"save it ({len(str(jinja))} characters) as a file for data.chat_template"
    what = rest.pop("excess_length_strategy", "drop")
    if what in ("drop", "truncate"):
        out.put(f"{_DATA}.on_too_long", what)  # Axolotl leaves long rows out without a word
    else:
        out.notes.append("rows that are too long stop the run, as in the configuration")


_NAMES_OF_16 = (("bf16", "bfloat16"), ("fp16", "float16"))


def _precision(rest: dict[str, Any], out: Converted) -> None:
    bf16, fp16 = (rest.pop(short, None) or rest.pop(long, None) for short, long in _NAMES_OF_16)
    if fp16:
        out.lost["fp16"] = "bf16 and float32 only"
    if bf16 == "full":
        out.put("trainer.precision", "bf16-true")
    elif bf16:
        out.put("trainer.precision", "bf16-mixed")
        out.notes.append("trainer.precision: bf16-mixed keeps float32 master weights; bf16-true has none")


def _checkpointing(rest: dict[str, Any], out: Converted) -> None:
    how = rest.pop("gradient_checkpointing", None)
    if how:
        out.put("nd.activation_checkpointing", "full")
        if how is not True:
            out.lost["gradient_checkpointing"] = f"{how}: full checkpointing is set, without offload"
    config = rest.get("fsdp_config")
    if isinstance(config, dict):
        config = {key.removeprefix("fsdp_"): value for key, value in config.items()}
        if config.get("offload_params"):
            out.put("nd.cpu_offload", True)
        if "reshard_after_forward" in config:
            out.put("nd.reshard_after_forward", config["reshard_after_forward"])
        if config.get("activation_checkpointing"):
            out.put("nd.activation_checkpointing", "full")


def _optimizer(rest: dict[str, Any], out: Converted) -> None:
    if (name := rest.pop("optimizer", None)) is not None:
        if name in _OPTIMIZERS:
            out.put("optimizer.class_path", _OPTIMIZERS[name])
            if name.endswith("fused"):
                out.put(f"{_OPTIMIZER}.fused", True)
        else:
            out.lost["optimizer"] = f"{name}: AdamW is used; optimizer.class_path names a class"
    if args := rest.pop("optim_args", None):
        out.lost["optim_args"] = f"{args}: put them into optimizer.init_args"
    betas = [rest.pop(key, None) for key in ("adam_beta1", "adam_beta2")]
    if name is None or "adam" in str(name):  # where nothing is said the Trainer of transformers decides
        default = (0.9, 0.999)
        out.put(f"{_OPTIMIZER}.betas", [b if b is not None else d for b, d in zip(betas, default, strict=True)])
    elif any(beta is not None for beta in betas):
        out.lost["adam_beta1, adam_beta2"] = f"{name} has none"
    rest.setdefault("max_grad_norm", 1.0)
    schedule, steps, ratio = (rest.pop(key, None) for key in ("lr_scheduler", "warmup_steps", "warmup_ratio"))
    if schedule is not None and schedule not in _SCHEDULES:
        out.lost["lr_scheduler"] = f"{schedule}: cosine is used; lr_scheduler.class_path names a class"
    out.put("lr_scheduler.class_path", "lightning_nd.recipes.WarmupDecay")
    out.put("lr_scheduler.init_args.decay", _SCHEDULES.get(schedule or "cosine", "cosine"))
    out.put("lr_scheduler.init_args.warmup", int(steps) if steps is not None else float(ratio or 0.0))
    if steps is not None and ratio is not None:
        out.unneeded["warmup_ratio"] = "warmup_steps is given"
    if (least := rest.pop("cosine_min_lr_ratio", None)) is not None:
        out.put("lr_scheduler.init_args.final", least)


def _lora(rest: dict[str, Any], out: Converted) -> None:
    kind = rest.pop("adapter", None)
    if kind is None:
        return
    if str(kind).lower() not in ("lora", "qlora"):
        out.lost["adapter"] = f"{kind}: lora is the one that there is"
        return
    if str(kind).lower() == "qlora" or rest.get("load_in_4bit"):
        rest.pop("load_in_4bit", None)
        out.put(f"{_LORA}.quantization", "nf4")
    targets, linear = rest.pop("lora_target_modules", None), rest.pop("lora_target_linear", None)
    if linear or targets:
        out.put(f"{_LORA}.target_modules", "all-linear" if linear else targets)
    out.put(f"{_LORA}.r", rest.pop("lora_r", 16))


def _saving(rest: dict[str, Any], out: Converted) -> None:
    steps, epochs, keep = (rest.pop(key, None) for key in ("save_steps", "saves_per_epoch", "save_total_limit"))
    strategy = rest.pop("save_strategy", None)
    if strategy == "epoch":
        callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"save_top_k": -1}}
        out.put("trainer.callbacks", [callback])
    elif strategy == "no":
        out.put("trainer.enable_checkpointing", False)
    elif steps is not None and (not isinstance(steps, float) or steps >= 1):
        init = {"every_n_train_steps": int(steps), "save_top_k": -1}
        callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": init}
        out.put("trainer.callbacks", [callback])
    elif steps is not None or epochs is not None:
        out.lost["save_steps" if steps is not None else "saves_per_epoch"] = (
            "give a ModelCheckpoint in trainer.callbacks, with every_n_train_steps"
        )
    if keep is not None:
        out.lost["save_total_limit"] = "ModelCheckpoint(save_top_k=..., monitor='step', mode='max') keeps the newest"
    every, per_epoch = rest.pop("eval_steps", None), rest.pop("evals_per_epoch", None)
    if (strategy := rest.pop("eval_strategy", None)) == "no":
        out.put("trainer.limit_val_batches", 0)
    elif per_epoch:
        out.put("trainer.val_check_interval", 1 / int(per_epoch))
    elif every is not None:
        value = float(every)
        batches = int(value) * int(rest.get("gradient_accumulation_steps") or 1)
        out.put("trainer.val_check_interval", value if value < 1 else batches)


_RULES: tuple[Callable[[dict[str, Any], Converted], None], ...] = (
    _data, _supervision, _precision, _checkpointing, _optimizer, _lora, _saving,
)  # fmt: skip


def main_command(command: str, args: list[str]) -> int:
    """Convert, and say what has no counterpart."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--strict", action="store_true")
    given = parser.parse_args(args)
    if not given.file.is_file():
        raise ConfigError(f"There is no file {given.file.absolute()}.")
    if given.output is not None and given.output.exists():
        raise ConfigError(f"--output {given.output} exists; give another name.")
    try:
        content = yaml.safe_load(given.file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{given.file}: not valid YAML: {error}") from None
    if not isinstance(content, dict) or "base_model" not in content:
        raise ConfigError(f"{given.file} has no base_model: it is no Axolotl configuration.")
    out = convert(content)
    words = _words(out)
    head = "".join(
        f"# {line}".rstrip() + "\n" for line in [f"From {given.file.name}, by lightning-nd convert-config", *words]
    )
    recipe = head + yaml.safe_dump(out.recipe, sort_keys=False)
    if given.output is None:
        print(recipe, end="")
    else:
        given.output.write_text(recipe, encoding="utf-8")
        print(f"Recipe: {given.output.absolute()}")
    print("\n".join(words), file=sys.stderr if given.output is None else sys.stdout)
    return int(given.strict and bool(out.lost))


def _words(out: Converted) -> list[str]:
    lines = []
    if out.lost:
        lines += ["Without counterpart, to be looked at:", *(f"  {key}: {why}" for key, why in out.lost.items())]
    if out.unneeded:
        lines += ["Not needed here:", *(f"  {key}: {why}" for key, why in out.unneeded.items())]
    if out.notes:
        lines += ["Note:", *(f"  {note}" for note in out.notes)]
    return lines or ["Every setting has a counterpart."]
