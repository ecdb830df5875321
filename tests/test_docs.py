"""Names in the pages are names that exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

import lightning_nd
from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule
from lightning_nd.names import ELSEWHERE
from lightning_nd.recipes import CausalLM

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    def pages(entries: list[Any]) -> list[str]:
        found = []
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            found += pages(value) if isinstance(value, list) else [value]
        return found

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_reference_names_what_there_is() -> None:
    named = [
        name for page in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), attribute)), name
    public = {f"lightning_nd.{name}" for name in lightning_nd.__all__} - {"lightning_nd.parallelize"}
    public |= {f"lightning_nd.callbacks.{name}" for name in lightning_nd.callbacks.__all__}
    assert public <= set(named)
