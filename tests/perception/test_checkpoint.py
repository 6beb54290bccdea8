"""Checkpoints: whole or not there, checked when read, the last good one always kept."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perception import checkpoint as module
from perception.checkpoint import (
    Checkpoint,
    best_checkpoint,
    latest_good,
    list_checkpoints,
    load_checkpoint,
    remove_old,
    save_checkpoint,
    set_aside_damaged,
)
from perception.distributed.state import weights_digest
from perception.errors import UserError


def content(step: int, numel: int = 1000) -> dict[str, Any]:
    return {
        "step": step,
        "config": '{"task": "lane"}',
        "model": {"weight": torch.arange(numel, dtype=torch.float32) + step, "count": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]},
        "local": {"random": [torch.get_rng_state()]},
    }


def save(folder: Path, step: int, metric: float | None = None) -> Checkpoint:
    return save_checkpoint(folder, step, step * 8, content(step), metric)


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Step of the newest good checkpoint, and the warnings."""
    warnings: list[str] = []
    found = latest_good(folder, warnings.append)
    if found is None:
        return None, warnings
    assert found[1]["step"] == found[0].step
    return found[0].step, warnings


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pair(step: int) -> list[str]:
    return [f"step-{step:08d}.json", f"step-{step:08d}.pt"]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 500, 4000, content(500), 0.75)
    loaded = load_checkpoint(saved.path)
    assert loaded.pop("format") == module.FORMAT
    expected = content(500)
    for name in ("model", "local"):
        torch.testing.assert_close(loaded.pop(name), expected.pop(name), rtol=0, atol=0)
    exp_avg = loaded["optimizer"]["state"].pop(0), expected["optimizer"]["state"].pop(0)
    torch.testing.assert_close(*exp_avg, rtol=0, atol=0)
    assert loaded == expected
    assert names(tmp_path) == pair(500)
    assert list_checkpoints(tmp_path) == [saved] and saved.metric == 0.75 and saved.samples == 4000
    assert json.loads(saved.record.read_text())["sha256"] == saved.sha256
    digest = subprocess.run(["sha256sum", str(saved.path)], capture_output=True, text=True, check=True).stdout
    assert digest.split()[0] == saved.sha256


def test_both_files_are_on_the_disk_before_their_names_and_the_names_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append(f"name {Path(target).suffix}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 1)
    assert done == ["sync file", "sync file", "name .pt", "name .json", "sync folder"]


def test_empty_folder(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, []) and best_checkpoint(tmp_path) is None
    remove_old(tmp_path, 2)
    assert names(tmp_path) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (truncate, "is damaged or truncated"),
        (flip_a_bit, "is damaged or truncated"),
        (lambda path: path.write_bytes(b""), "is damaged or truncated"),
        (Path.unlink, "cannot be read (No such file or directory)"),
        (lambda path: path.with_suffix(".json").unlink(), "has no readable record"),
        (lambda path: path.with_suffix(".json").write_text("{"), "has no readable record"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "has no readable record"),
    ],
)
def test_a_damaged_newest_is_passed_over_for_the_one_before(
    damage: Callable[[Path], object], warning: str, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step-00000003.pt")
    found, warnings = newest(tmp_path)
    assert found == 2
    (line,) = warnings
    assert line.startswith(str(tmp_path / "step-00000003.pt")) and warning in line


def test_all_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(save(tmp_path, step).path)
    found, warnings = newest(tmp_path)
    assert found is None and len(warnings) == 2


class Trap:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("write", [lambda value, path: torch.save(value, path), None])
def test_code_in_a_checkpoint_is_refused_and_not_run(
    write: Callable[[object, Path], None] | None, tmp_path: Path
) -> None:
    path, target = tmp_path / "step-00000001.pt", tmp_path / "executed"
    value = {"format": module.FORMAT, "model": Trap(target)}
    if write is None:
        path.write_bytes(pickle.dumps(value))
    else:
        write(value, path)
    with pytest.raises(UserError, match=r"step-00000001\.pt: not a readable checkpoint"):
        load_checkpoint(path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Trap(target)))
    assert target.exists(), "the trap works"


def test_files_that_are_no_checkpoint_of_this_version(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.pt: no such checkpoint"):
        load_checkpoint(tmp_path / "none.pt")
    other = tmp_path / "other.pt"
    torch.save({"state_dict": {"weight": torch.ones(2)}}, other)
    with pytest.raises(UserError, match=r"other\.pt: not a checkpoint of this project"):
        load_checkpoint(other)
    torch.save([1, 2], other)
    with pytest.raises(UserError, match="not a checkpoint of this project"):
        load_checkpoint(other)
    other.write_text("no checkpoint at all")
    with pytest.raises(UserError, match="not a readable checkpoint"):
        load_checkpoint(other)


def test_another_format_version_is_an_error_not_a_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    with pytest.raises(UserError, match="checkpoint format 1, this version reads 2: use its version"):
        newest(tmp_path)


def test_old_ones_are_removed_but_the_best(tmp_path: Path) -> None:
    for step, metric in [(1, None), (2, 0.9), (3, 0.5), (4, None), (5, 0.6)]:
        save(tmp_path, step, metric)
    remove_old(tmp_path, 2)
    assert names(tmp_path) == sorted(pair(2) + pair(4) + pair(5))
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 2
    assert newest(tmp_path) == (5, [])


def test_best_is_the_newest_of_equals_or_of_those_without_a_metric(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 2
    save(tmp_path, 3, 0.0)
    save(tmp_path, 4, 0.0)
    save(tmp_path, 5)
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 4


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / ".step-00000003.pt.123").write_bytes(b"half")
    (tmp_path / ".step-00000003.json.123").write_bytes(b"{")
    (tmp_path / "step-00000001.pt").write_bytes(b"no record")
    (tmp_path / "notes.txt").write_text("not ours")
    remove_old(tmp_path, 1)
    assert names(tmp_path) == ["notes.txt", *pair(2)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("moment", ["write", "fsync", "rename", "rename of the record"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_failed_write_changes_nothing(
    code: int, moment: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for good in (1, 2):
        save(tmp_path, good)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    renames = 0

    def fail(*_: object) -> None:
        nonlocal renames
        renames += 1
        if moment != "rename of the record" or renames == 2:
            raise OSError(code, os.strerror(code))
        real_replace(*_)  # type: ignore[arg-type]

    real_replace = os.replace
    with monkeypatch.context() as patch:
        if moment == "write":
            patch.setattr(module, "_write_synced", fail)
        else:
            patch.setattr(os, "fsync" if moment == "fsync" else "replace", fail)
        with pytest.raises(UserError) as caught:
            save(tmp_path, step)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ") and "go on with --resume" in message
    assert "step-00000002.pt" in message
    assert ("no space left for a checkpoint" in message) == (code != errno.EACCES)
    if moment == "rename of the record" and step == 2:
        # Two renames are not one: the step that was there already is lost, seen, and the one before taken.
        assert newest(tmp_path)[0] == 2 or len(newest(tmp_path)[1]) == 1
        return
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert newest(tmp_path) == (2, [])


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    saved = save_checkpoint(small_disk, 1, 8, content(1, numel=100_000), None)
    before = names(small_disk)
    with pytest.raises(UserError) as caught:
        save_checkpoint(small_disk, 2, 16, content(2, numel=200_000), None)
    assert str(caught.value) == (
        f"{small_disk}: no space left for a checkpoint of 1 MB; the last good checkpoint is {saved.path.name}. "
        "Make room or permission there, then go on with --resume"
    )
    assert names(small_disk) == before and newest(small_disk) == (1, [])
    save_checkpoint(small_disk, 2, 16, content(2, numel=100_000), None)
    assert newest(small_disk) == (2, [])


def test_first_checkpoint_on_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no earlier checkpoint exists"):
        save(tmp_path / "gone", 1)


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from perception.checkpoint import save_checkpoint
calls = 0
real = os.replace
def replace(*arguments):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
os.replace = replace
save_checkpoint(Path(sys.argv[1]), 2, 16, {"step": 2, "model": torch.ones(5)}, None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("renames_before", [1, 2])
def test_a_run_killed_while_saving_goes_on_from_the_one_before(renames_before: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), str(renames_before)], check=False)
    assert done.returncode == -9
    step, warnings = newest(tmp_path)
    assert step == 1 and len(warnings) == renames_before - 1
    remove_old(tmp_path, 2)
    assert names(tmp_path) == pair(1)


def test_weights_digest_depends_on_names_order_and_bytes_alone() -> None:
    state = {"a": torch.ones(2, 3), "b": torch.tensor(True), "c": torch.zeros(0), "d": torch.ones(1).bfloat16()}
    same = {name: tensor.clone() for name, tensor in state.items()}
    assert weights_digest([state]) == weights_digest([same])
    permuted = {**state, "a": torch.ones(3, 2).t()}
    assert weights_digest([permuted]) == weights_digest([state])
    others = [
        {**state, "a": torch.ones(3, 2)},
        {**state, "a": state["a"].double()},
        {**state, "a": state["a"] + 1e-7},
        {"b": state["b"], **state},
        {**state, "e": torch.zeros(0)},
    ]
    assert len({weights_digest([other]) for other in [state, *others]}) == 6


def test_passed_over_checkpoints_no_longer_count(tmp_path: Path) -> None:
    """With one kept, a damaged newer file must not push out the good ones that a resumed run writes."""
    for step in (400, 500):
        save_checkpoint(tmp_path, step, step, {"step": step}, None)
    damaged = tmp_path / "step-00000500.pt"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    found = latest_good(tmp_path, lambda _: None)
    assert found is not None and found[0].step == 400
    assert set_aside_damaged(tmp_path, found[0]) == [tmp_path / "step-00000500.damaged"]
    save_checkpoint(tmp_path, 450, 450, {"step": 450}, None)
    remove_old(tmp_path, keep=1)
    again = latest_good(tmp_path, lambda line: pytest.fail(line))
    assert again is not None and again[0].step == 450
