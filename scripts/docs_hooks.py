"""Hooks of the documentation site: files of the repository that a page links to become files of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that lead out of docs/ to a copy of the file in the site."""
    from mkdocs.structure.files import File

    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        path = posixpath.normpath(posixpath.join("docs", here, target))
        if re.match(r"\w+:", target) or path.startswith("docs/") or not (ROOT / path).is_file():
            return match[0]
        uri = f"files/{path}"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        return f"{match[1]}{posixpath.relpath(uri, here or '.')}{match[3]}"

    # code stays as it is
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(moved, markdown[at:])])
