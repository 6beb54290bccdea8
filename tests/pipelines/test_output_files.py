"""A file that a command writes takes the place of what is there: never that of a device, pipe, link or folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from perception.errors import UserError
from pipelines.__main__ import main as pipelines
from sweeps.__main__ import main as sweeps

COMMANDS = {
    "evaluate": (
        pipelines,
        ["evaluate", "lane", "--predictions", ".", "--labels", ".", "--metric", "culane", "--json"],
    ),
    "evaluate sign": (
        pipelines,
        ["evaluate", "sign", "--predictions", ".", "--labels", ".", "--format", "coco", "--json"],
    ),
    "data check": (pipelines, ["data", "check", ".", "--json"]),
    "export": (pipelines, ["export", "lane", ".", "--out"]),
    "tune": (pipelines, ["tune", "lane-small", "--out"]),
    "bench scaling": (pipelines, ["bench", "scaling", "lane-small", "--ranks", "2", "--json"]),
    "bench allreduce": (pipelines, ["bench", "allreduce", "--json"]),
    "bench predict": (pipelines, ["bench", "predict", "--model", "lane", "--json"]),
    "bench replay": (pipelines, ["bench", "replay", "lane", "--json"]),
    "bench record": (pipelines, ["bench", "record", "lane-small", "--out"]),
    "sweeps scaling": (sweeps, ["scaling", "--json"]),
    "sweeps chart": (sweeps, ["scaling", "--chart"]),
    "sweeps targets": (sweeps, ["targets", "--json"]),
}
every_command = pytest.mark.parametrize("name", COMMANDS)


def refusal(name: str, target: str) -> str:
    main, words = COMMANDS[name]
    with pytest.raises(UserError) as caught:
        main([*words, target])
    message = str(caught.value)
    assert message.startswith(f"{words[-1]} {Path(target)}: ") and "\n" not in message
    return message


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def target_name(name: str) -> str:
    return "out.onnx" if name == "export" else "out.png" if name == "sweeps chart" else "out.json"


@every_command
def test_a_pipe_or_device_stays_one(name: str) -> None:
    """As root, a result "written" to /dev/null would put a file in its place, for all programs of the machine."""
    target = Path(target_name(name))
    os.mkfifo(target)
    assert "is a link, device or pipe" in refusal(name, str(target))
    assert stat.S_ISFIFO(target.stat().st_mode) and [path.name for path in Path().iterdir()] == [target.name]


@every_command
def test_a_link_stays_one(name: str) -> None:
    """/dev/stdout is one."""
    target, kept = Path(target_name(name)), Path("kept")
    kept.write_text("mine")
    target.symlink_to(kept)
    assert "is a link, device or pipe" in refusal(name, str(target))
    assert target.is_symlink() and kept.read_text() == "mine"


@every_command
def test_a_folder_is_no_file_and_none_is_made(name: str) -> None:
    folder = Path(target_name(name))
    assert "folder none does not exist" in refusal(name, f"none/{folder}")
    assert not Path("none").exists()
    folder.mkdir()
    assert "is a folder; name a file" in refusal(name, str(folder))
    if name not in ("export", "sweeps chart"):  # They ask for a suffix first.
        assert "is a folder; name a file" in refusal(name, "")


def test_a_run_folder_that_no_other_program_can_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"is not UTF-8; give another"):
        pipelines(["train", "lane-small", "--out", "\udcff"])
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--threads", "9" * 20], "must be at most 4096"),
        (["--batch", "9" * 20], "must be at most 65536"),
        (["--threads", "-1"], "--threads -1: must be 0 or more"),
        (["--batch", "0"], "--batch 0: must be 1 or more"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pipelines(["predict", "run", "images", *words])
