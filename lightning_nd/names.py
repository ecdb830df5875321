"""Help with names that were almost right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """Words that point from a wrong name to the valid one, or list what is valid."""
    valid = sorted(set(valid))
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.55)
    lower = {v.lower(): v for v in valid}
    if name.lower() in lower:
        close = [lower[name.lower()]]
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    shown = ", ".join(valid[:30]) + (", …" if len(valid) > 30 else "")
    return f"allowed here: {shown}" if valid else "nothing is allowed here"
