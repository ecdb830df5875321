"""Prompts and the loss plot, from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_nd.callbacks import SampleCompletions
from lightning_nd.callbacks.loss_plot import _smooth, plot_losses


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}\n'
    )
    samples = SampleCompletions(str(path))
    assert [conversation[-1] for conversation in samples.conversations] == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.parametrize(("text", "words"), [('{"prompt": 1}\n', ":1: expected"), ("\n{\n", ":2: not valid JSON")])
def test_bad_prompts_are_named_by_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}{words}"):
        SampleCompletions(str(path))


def test_no_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        SampleCompletions([])


def test_plot(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    rows = [f"{step},{5 - step / 20},{4.5 if step % 20 == 19 else ''}" for step in range(60)]
    metrics.write_text("\n".join(["step,train/loss,val/loss", *rows]) + "\n")
    picture = plot_losses(metrics, tmp_path / "loss.png")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    metrics.write_text("step,lr\n0,1\n")
    assert plot_losses(metrics, tmp_path / "none.png") is None


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert _smooth((3.0,) * 50) == pytest.approx([3.0] * 50)
    assert _smooth(tuple(range(50)))[0] == 0.0
