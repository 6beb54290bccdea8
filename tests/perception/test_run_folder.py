"""A run folder is begun once, written whole, and describes where the run took place."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from perception import run_folder as module
from perception.errors import UserError
from perception.run_folder import (
    RunFolder,
    combined_manifest,
    describe_environment,
    manifest_digest,
    write_atomic,
    write_json,
)


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.begin(resume=False)
    assert folder.checkpoints.is_dir()
    folder.begin(resume=False)


@pytest.mark.parametrize("holds", ["config.json", "checkpoints/step-00000001.pt"])
def test_another_run_is_refused_and_resumed_only_when_asked(holds: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(resume=False)
    (tmp_path / holds).write_text("{}")
    folder.result.write_text('{"status": "preempted"}')
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        folder.begin(resume=False)
    assert folder.result.exists(), "a refused run leaves the other's result"
    folder.begin(resume=True)
    assert folder.result.exists() and (tmp_path / holds).exists(), "a resumption may still be refused"
    folder.remove_result()
    folder.remove_result()
    assert not folder.result.exists() and (tmp_path / holds).exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"cannot make the run folder .*; give another by --out"):
            RunFolder(path).begin(resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        RunFolder(tmp_path / "a").begin(resume=False)


def test_a_result_that_cannot_be_removed(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"result\.json: cannot be removed"):
        RunFolder(tmp_path).remove_result()


def test_write_atomic_replaces_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "first, longer")
    write_atomic(path, "zweite ü")
    assert path.read_text(encoding="utf-8") == "zweite ü"
    assert list(tmp_path.iterdir()) == [path]
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_write_atomic_leaves_the_old_file_when_it_fails(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(UserError, match=r"a\.txt: cannot be written \(No space left on device\); free some space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_write_atomic_on_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "a.txt"
    path.write_text("old")
    with pytest.raises(UserError, match="No space left on device"):
        write_atomic(path, "x" * (2 << 20))
    assert path.read_text() == "old" and list(small_disk.iterdir()) == [path]


def test_write_atomic_below_a_file_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", tmp_path / "none" / "a.txt"):
        with pytest.raises(UserError, match=r"a\.txt: cannot be written"):
            write_atomic(path, "text")


def test_environment_tells_all_that_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCEPTION_IMAGE_DIGEST", "sha256:abc")
    ranks, data = {"engine": "horovod", "ranks": 2}, {"train": {"manifest_sha256": "1"}}
    told = describe_environment(ranks, data)
    assert set(told) == {"git", "python", "versions", "hardware", "image_digest", "communicator", "data"}
    assert set(told["git"]) == {"revision", "diff"}
    assert told["versions"]["torch"] and told["versions"]["numpy"] and "horovod" in told["versions"]
    assert told["hardware"]["num_cores"] == os.cpu_count() and told["hardware"]["machine"]
    assert isinstance(told["hardware"]["gpus"], list)
    assert told["image_digest"] == "sha256:abc"
    assert told["communicator"] == ranks and told["data"] == data
    assert json.loads(json.dumps(told)) == told


def test_environment_holds_no_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "very-secret-value-4711")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value-4712")
    told = describe_environment({}, {})
    told["git"]["diff"] = None  # The diff of this very file may hold the words below.
    text = json.dumps(told)
    assert "very-secret-value" not in text and "SOME_API_TOKEN" not in text and os.environ["PATH"] not in text


def test_git_state_is_of_the_code_with_its_uncommitted_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    code = tmp_path / "perception"
    code.mkdir()
    (code / "run_folder.py").write_text("a = 1\n")
    monkeypatch.setattr(module, "__file__", str(code / "run_folder.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment({}, {})["git"] == {"revision": None, "diff": None}
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = describe_environment({}, {})["git"]
    assert len(clean["revision"]) == 40 and clean["diff"] == ""
    (code / "run_folder.py").write_text("a = 2\n")
    assert "+a = 2" in describe_environment({}, {})["git"]["diff"]


def test_manifest_depends_on_the_samples_not_on_order_or_shares() -> None:
    assert manifest_digest(["a", "b"]) == manifest_digest(["b", "a"]) != manifest_digest(["a", "c"])
    shares = [manifest_digest(["a", "d"]), manifest_digest([]), manifest_digest(["b"])]
    assert combined_manifest(shares) == manifest_digest(["a", "b", "d"])
