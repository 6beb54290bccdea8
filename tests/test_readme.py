"""What the README and the pages beside it show runs as it stands there."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from pipelines.__main__ import COMMANDS, module_of

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown_commands() -> list[str]:
    """Every `python -m pipelines …` of the pages, in code spans and in blocks."""
    text = "\n".join(page.read_text() for page in PAGES)
    spans = re.findall(r"`([^`\n]*-m pipelines [^`\n]*)`", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") and "-m pipelines " in line]
    return [command.split("-m pipelines ", 1)[1] for command in [*spans, *lines]]


def test_there_are_commands() -> None:
    assert len(shown_commands()) > 6


PLACEHOLDERS = {"COMMAND", "E", "T"}
"""Words that stand for something in a line that is not meant to be typed."""


@pytest.mark.parametrize("command", [c for c in shown_commands() if not PLACEHOLDERS & set(re.split(r"[ =,]", c))])
def test_commands_are_understood(command: str) -> None:
    name, *words = shlex.split(command, comments=True)
    assert name in COMMANDS
    parser = argparse.ArgumentParser()
    module_of(name).add_arguments(parser)
    parser.parse_args(words)


def test_the_layer_in_your_own_code() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    names = {"model": model, "optimizer": optimizer, "tensor": torch.ones(2)}
    before_the_loss, step = code.group(1).split("loss.backward()")
    exec(before_the_loss, names)
    names["loss"] = model(torch.ones(4, 3)).square().mean()
    exec("loss.backward()" + step, names)
    assert not torch.equal(model.weight, before)
    assert names["mean"].tolist() == [1.0, 1.0]


def test_named_files_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
