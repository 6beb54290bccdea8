"""What the README and the pages beside it show runs as it stands there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("pipelines", "sweeps", "containers")


def shown_commands() -> list[tuple[str, str]]:
    """(program, rest) of every `python -m PROGRAM ...` of the pages, in code spans and in blocks."""
    text = "\n".join(page.read_text() for page in PAGES)
    shown = re.findall(r"`([^`\n]*-m \w+ [^`\n]*)`", text)
    shown += [line.strip() for line in text.splitlines() if line.startswith("    ") and "-m " in line]
    found = [re.search(r"-m (\w+) (.*)", command) for command in shown]
    return [(match[1], match[2]) for match in found if match is not None and match[1] in PROGRAMS]


def test_there_are_commands() -> None:
    assert {program for program, _ in shown_commands()} == set(PROGRAMS)


PLACEHOLDERS = {"COMMAND", "E", "T", "…"}
"""Words that stand for something in a line that is not meant to be typed."""


@pytest.mark.parametrize(
    ("program", "command"),
    [(name, text) for name, text in shown_commands() if not PLACEHOLDERS & set(re.split(r"[ =,]", text))],
)
def test_commands_are_understood(program: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "--image":
        words = words[2:]
    if ">>" in words:
        words = words[: words.index(">>")]
    # What a container is to do is another program's.
    name, *words = words[: words.index("--")] if "--" in words else words
    main = importlib.import_module(f"{program}.__main__")
    assert name in main.COMMANDS
    parser = argparse.ArgumentParser()
    main.module_of(name).add_arguments(parser)
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
