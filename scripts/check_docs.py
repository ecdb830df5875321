"""Check that what the documentation points at exists: relative links, and files after ``--config``.

python scripts/check_docs.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems(page: Path) -> list[str]:
    """What a page refers to and that is not there."""
    text = page.read_text(encoding="utf-8")
    found = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not (page.parent / target).exists():
            found.append(f"{page.relative_to(ROOT)}: link to {target}, which does not exist")
    for recipe in re.findall(r"--config (recipes/[\w./-]+)", text):
        if not (ROOT / recipe).exists():
            found.append(f"{page.relative_to(ROOT)}: there is no {recipe}")
    return found


def main() -> None:
    """Print every problem; exit code 1 when there is one."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = [problem for page in pages for problem in problems(page)]
    print("\n".join(found) or f"{len(pages)} pages, every link resolves")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
