"""``lightning-nd completion``: commands, options and their choices at the press of the tab key."""

from __future__ import annotations

import re
import sys
from typing import Any

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd completion bash|zsh

Print a script that completes commands, options (also those of a recipe, --nd.tp) and their choices. For new shells:

  lightning-nd completion bash > ~/.local/share/bash-completion/completions/lightning-nd
  lightning-nd completion zsh > ~/.lightning-nd.zsh && echo 'source ~/.lightning-nd.zsh' >> ~/.zshrc

Print it again after an update.
"""

#: Commands that read a recipe, by what they take beside its keys.
_RECIPE = {
    "fit": ("--dry-run", "--auto-resume"),
    **dict.fromkeys(("validate", "test", "predict"), ()),
    "verify": ("--full", "--steps", "--tolerance"),
    "profile": ("--steps", "--warmup"),
}

_SCRIPT = """# Completion of lightning-nd, by `lightning-nd completion {shell}`.
{head}_lightning_nd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" options=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$before" in
{choices}
    esac
    case "$word" in
        -*) ;;
        *) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
    COMPREPLY=($(compgen -W "$options" -- "$word"))
}}
complete -o filenames -F _lightning_nd lightning-nd
"""


def main_command(command: str, args: list[str]) -> int:
    """Print the script."""
    if args not in (["bash"], ["zsh"]):
        raise ConfigError("Give bash or zsh. See lightning-nd completion --help.")
    sys.stdout.write(script(args[0]))
    return 0


def script(shell: str) -> str:
    """The script for a shell; zsh reads bash's."""
    from lightning_nd.cli.main import COMMANDS

    recipe, choices = recipe_options()
    cases = []
    for command in COMMANDS:
        options = [*recipe, *_RECIPE[command]] if command in _RECIPE else _of_usage(command)
        cases.append(f'        {command}) options="{" ".join(sorted({*options, "--help"}))}" ;;')
    picks = [
        f'        {option}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")); return ;;'
        for option, words in choices.items()
    ]
    return _SCRIPT.format(
        shell=shell,
        head="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        choices="\n".join(picks),
        options="\n".join(cases),
    )


def recipe_options() -> tuple[list[str], dict[str, list[str]]]:
    """Options of a recipe's keys, and the choices of those that have some."""
    from lightning_nd.cli.schema import recipe_schema

    options, choices = ["--config", "--print_config", "--help-all"], {}
    for group, schema in recipe_schema()["properties"].items():
        inner = schema.get("properties") or _arguments(schema)
        if not inner:
            options.append(f"--{group}")
        for key, entry in inner.items():
            option = f"--{group}.{key}"
            options.append(option)
            words = [str(w) for part in (entry, *entry.get("anyOf", ())) for w in part.get("enum", ())]
            if entry.get("type") == "boolean":
                words = ["true", "false"]
            if words:
                choices[option] = words
    return options, choices


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a key that holds a class: the arguments of the default one."""
    whole = next((part for part in schema.get("anyOf", ()) if "then" in part), None)
    return {} if whole is None else whole["then"]["properties"]["init_args"]["properties"]


def _of_usage(command: str) -> list[str]:
    """The options that a command's help names."""
    import importlib

    from lightning_nd.cli.main import COMMANDS

    module = importlib.import_module(COMMANDS[command][0].partition(":")[0])
    usage = getattr(module, "EXPORT_USAGE" if command == "export" else "USAGE", "")
    return sorted(set(re.findall(r"--[a-z][\w-]*", usage)))
