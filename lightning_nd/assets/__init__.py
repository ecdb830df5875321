"""Files that ship with the package: the quickstart model and its chat set."""

from importlib import resources
from pathlib import Path

SCHEME = "lightning_nd://"

__all__ = ["SCHEME", "quickstart_dir", "resolve"]


def _root() -> Path:
    # The package is always installed unpacked (it is imported by worker processes), so a real path exists.
    return Path(str(resources.files(__name__)))


def quickstart_dir() -> Path:
    """The folder of the quickstart: ``model/``, ``train.jsonl``, ``val.jsonl`` and ``prompts.jsonl``."""
    return _root() / "quickstart"


def resolve(path: str) -> str:
    """Turn ``lightning_nd://quickstart/...`` into the path of a packaged file; leave any other string alone.

    Raises:
        FileNotFoundError: the package ships no such file or folder.

    """
    if not path.startswith(SCHEME):
        return path
    name = path.removeprefix(SCHEME).strip("/")
    found = _root() / name
    if not name or ".." in Path(name).parts or not (found.exists() or any(c in name for c in "*?[")):
        known = ", ".join(sorted(SCHEME + p.name for p in _root().iterdir() if p.is_dir() and p.name[0] != "_"))
        raise FileNotFoundError(f"{path} is not a file of the lightning_nd package (tried {found}). It ships: {known}.")
    return str(found)
