"""Prompts and the loss plot, from files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from lightning_nd.callbacks import SampleCompletions
from lightning_nd.callbacks.loss_plot import _smooth, plot_losses
from lightning_nd.cli.main import main


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


def test_lines_are_those_of_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n', encoding="utf-8")
    assert SampleCompletions(str(path)).conversations == [[{"role": "user", "content": "a\u2028b\u0085c"}]]
    path.write_text('{"messages": [{"role": "assistant", "content": "c"}]}\n')
    with pytest.raises(ValueError, match=f"{path}:1: there is nothing before the answer"):
        SampleCompletions(str(path))


def test_prompts_that_cannot_be_asked_are_refused_before_weights_load() -> None:
    strict = tiny_tokenizer("{{ raise_exception('no users') }}")
    plain = tiny_tokenizer()
    module: Any = SimpleNamespace(tokenizer=strict, _trainer=None, config=None)
    samples = SampleCompletions(["hello"], max_new_tokens=10)
    with pytest.raises(ValueError, match=r"SampleCompletions: prompt 1: the chat template refuses it: .*no users"):
        samples.setup(None, module, "fit")  # type: ignore[arg-type]
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=plain))  # whose template is in force
    samples.setup(None, module, "fit")  # type: ignore[arg-type]
    module.config = tiny_model(max_position_embeddings=16).config
    with pytest.raises(ValueError, match=r"prompt 1: 8 tokens and max_new_tokens=10 are 18, and the model has 16"):
        samples.setup(None, module, "fit")  # type: ignore[arg-type]


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


def test_plot_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [f"{i},{5 - i / 20},{1e4 + i},{i / 9}" for i in range(3)]
        header = "step,train/loss,throughput/tokens_per_s,throughput/peak_memory_gib"
        (tmp_path / name / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    assert main(["plot", str(tmp_path / "a")]) == 0
    assert "loss (nats); tokens per second; memory" in capsys.readouterr().out
    assert (tmp_path / "a" / "plot.png").read_bytes().startswith(b"\x89PNG")
    both = tmp_path / "both.svg"
    assert main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(both)]) == 0
    assert both.is_file()
    capsys.readouterr()
    for args, words in (
        ([str(tmp_path)], f"There is one in {tmp_path / 'a'}, {tmp_path / 'b'}."),
        ([str(tmp_path / "c")], "There is no"),
        ([str(tmp_path / "a"), "--output", "x.txt"], ".png, .svg, .pdf"),
    ):
        assert main(["plot", *args]) == 2
        assert words in capsys.readouterr().err
