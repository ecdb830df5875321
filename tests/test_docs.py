"""Names in the pages are names that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule
from lightning_nd.names import ELSEWHERE
from lightning_nd.recipes import CausalLM

DOCS = Path(__file__).parents[1] / "docs"


def parameters(cls: type) -> set[str]:
    return set(inspect.signature(cls).parameters)


def test_settings_that_others_call_otherwise_are_ours() -> None:
    known = {
        "nd": parameters(NDStrategy),
        "trainer": parameters(Trainer),
        "data.init_args": parameters(ChatDataModule),
        "model.init_args": parameters(CausalLM),
        "optimizer.init_args": {"lr"},
        "lr_scheduler.init_args": {"warmup"},
        "": {"auto_resume"},
    }
    keys = re.findall(r"^\| `([\w.]+)` \|", (DOCS / "coming-from.md").read_text(), re.MULTILINE)
    assert len(keys) == 23
    for key in keys:
        group, _, name = key.rpartition(".")
        assert name in known[group], key


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


def test_names_of_other_tools_lead_to_ours() -> None:
    page = (DOCS / "coming-from.md").read_text()
    ours = {key.rpartition(".")[2] for key in re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)}
    assert set(ELSEWHERE) <= ours
