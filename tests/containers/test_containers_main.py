"""The command line: answers at once, imports nothing heavy for it, and says a mistake in one line with exit code 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from containers.__main__ import COMMANDS, main, module_of
from containers.engine import ContainerFacts, ImageFacts
from containers.errors import ContainerError
from containers.lock import Lock, LockedImage, read_lock, write_lock
from containers.lock_command import locked_image
from containers.run_image import choose_image

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "1" * 64
IMAGE_ID = "sha256:" + "2" * 64
TAG = "nvcr.io/org/lane:26.11-cpu-py3"
LANE = LockedImage("lane", TAG, DIGEST, IMAGE_ID, "linux/amd64", 1, "2026-11-30T00:00:00Z")
FACTS = ImageFacts(IMAGE_ID, (TAG,), (f"nvcr.io/org/lane@{DIGEST}",), "linux/amd64", 1, "2026-11-30T00:00:00Z")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "containers", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom containers.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in ('docker', 'requests', 'torch', 'perception', 'pipelines') if name in sys.modules])"
    )
    for words in (["--help"], ["run", "--help"], ["build", "--help"], ["lock", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_module(name: str) -> None:
    module = module_of(name)
    assert callable(module.add_arguments) and callable(module.run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "error: name an image"),
        (["run", "lane", "--image", "sign", "--", "true"], "give one of them"),
        (["build", "lan"], 'did you mean "lane"'),
        (["build", "--push"], "--push needs --registry"),
        (["build", "--push", "--registry", "org"], "--registry: org/base:"),
        (["build", "--release", "latest"], "is not YY.MM"),
        (["build", "--gpu"], "--gpu needs --base"),
        (["build", "--wheels", "/absent"], "--wheels /absent: no such folder"),
        (["lock", "--", "x"], "lock: takes no command after --"),
        (["lock", "a/b:1"], "give the name first"),
        (["lock", "lane", "--lock", "/absent/lock.json"], "pins no image"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ContainerError) as caught:
        main(words)
    assert said in f"error: {caught.value}" and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_mistake_as_a_user_sees_it() -> None:
    done = command("run", "--", "true")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: name an image")


def test_a_reader_that_has_left_is_no_fault() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "containers", "--help"]
    # Buffered, as by default: what argparse writes at once it does not miss.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_what_is_pinned_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lock.json"
    assert main(["lock", "--lock", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: pins no image yet; `make images")
    write_lock(path, Lock({"lane": LANE}))
    assert main(["lock", "lane", "--lock", str(path)]) == 0
    assert capsys.readouterr().out == f"lane  {TAG}@{DIGEST}  linux/amd64  0 MB\n"
    assert read_lock(path).images == {"lane": LANE}


class Images:
    """An engine that holds these images: of its calls, those that choosing one needs."""

    host = "unix:///docker.sock"

    def __init__(self, *facts: ImageFacts) -> None:
        self._facts = facts

    def image(self, reference: str) -> ImageFacts | None:
        known = (facts for facts in self._facts if reference in (facts.image_id, *facts.tags, *facts.digests))
        return next(known, None)

    def images(self, label: str) -> list[ImageFacts]:
        name, _, value = label.partition("=")
        return [facts for facts in self._facts if facts.labels.get(name) == value]

    def container(self, container_id: str) -> ContainerFacts | None:
        raise NotImplementedError


def choose(text: str, lock: Lock, *facts: ImageFacts):  # type: ignore[no-untyped-def]
    return choose_image(Images(*facts), text, lock, Path("lock.json"))  # type: ignore[arg-type]


def test_a_name_is_what_the_lock_pins_by_whatever_tag_it_is_here() -> None:
    from dataclasses import replace

    lock = Lock({"lane": LANE})
    loaded = replace(FACTS, tags=(), digests=())
    for facts in (FACTS, loaded):
        chosen = choose("lane", lock, facts)
        assert chosen.facts is facts and chosen.digest == f"nvcr.io/org/lane@{DIGEST}" and chosen.note == ""
    moved = replace(FACTS, image_id="sha256:" + "9" * 64)
    with pytest.raises(
        ContainerError, match=r"pinned by lock\.json, is not on this machine; get it by `python -m cont"
    ):
        choose("lane", lock, moved)
    with pytest.raises(ContainerError, match=r"but lock\.json pins sha256:2222"):
        choose(TAG, lock, moved)


def test_a_name_that_nothing_pins_is_the_newest_built_here_and_that_is_said() -> None:
    from dataclasses import replace

    built = replace(FACTS, labels={"org.roadfuse.image": "lane"}, digests=())
    chosen = choose("lane", Lock(), built)
    assert chosen.note == f"lane is not pinned: taking {TAG}, built here" and chosen.digest == IMAGE_ID
    with pytest.raises(ContainerError, match="build it by `python -m containers build lane`"):
        choose("lane", Lock())
    with pytest.raises(ContainerError, match='pins no image "lorry"'):
        choose("lorry", Lock(), built)


def test_an_image_is_pinned_only_by_a_digest_that_a_registry_gave() -> None:
    from dataclasses import replace

    assert locked_image(Images(FACTS), "lane", TAG) == LANE  # type: ignore[arg-type]
    for facts, said in [
        (replace(FACTS, digests=()), "has no digest of nvcr.io/org/lane, since it was neither pushed nor pulled"),
        (replace(FACTS, digests=("other.io/org/lane@" + DIGEST,)), "has no digest"),
        (replace(FACTS, digests=(f"nvcr.io/org/lane@{DIGEST}", "nvcr.io/org/lane@sha256:" + "5" * 64)), "2 digests"),
    ]:
        with pytest.raises(ContainerError, match=said):
            locked_image(Images(facts), "lane", TAG)  # type: ignore[arg-type]
    with pytest.raises(ContainerError, match="is not on this machine"):
        locked_image(Images(), "lane", TAG)  # type: ignore[arg-type]
