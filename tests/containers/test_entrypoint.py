"""The images' entry point, run here with a stand-in for Python: what it makes of a command, and what it says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "containers" / "images" / "entrypoint.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a `python` that prints what it was asked for, and a `df` that knows a large /dev/shm."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in {"python": 'echo "python $*"', "df": "echo 1K-blocks; echo 8388608"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def enter(programs: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/tmp", "ROADFUSE_VARIANT": "cpu", **environment}
    return subprocess.run([ENTRYPOINT, *words], env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "model", "made"),
    [
        (["train", "--data", "generated", "--ranks", "2"], "lane", "train lane --data generated --ranks 2"),
        (["train", "lane-small", "--ranks", "2"], "lane", "train lane-small --ranks 2"),
        (["train", "runs/one/config.json"], "lane", "train runs/one/config.json"),
        (["train"], "sign", "train sign"),
        (["train", "--resume", "--out", "x"], "lane", "train --resume --out x"),
        (["train", "--resume-if-possible", "--out", "x"], "lane", "train lane --resume-if-possible --out x"),
        (["train", "--help"], "lane", "train --help"),
        (["train", "--ranks", "2"], "", "train --ranks 2"),
        (["predict", "runs/one", "a b.png"], "lane", "predict runs/one a b.png"),
        (["show-config", "lane"], "", "show-config lane"),
    ],
)
def test_commands_of_the_project(programs: Path, words: list[str], model: str, made: str) -> None:
    done = enter(programs, *words, ROADFUSE_MODEL=model)
    assert (done.returncode, done.stdout) == (0, f"python -m pipelines {made}\n")


def test_any_other_command_is_run_as_it_is(programs: Path) -> None:
    done = enter(programs, "sh", "-c", 'echo "$1|$2"; exit 75', "x", "a  b", "")
    assert (done.returncode, done.stdout) == (75, "a  b|\n")
    assert enter(programs, "trian").returncode == 127


def test_the_projects_code_is_the_images_own_unless_one_says_so(programs: Path) -> None:
    (programs / "python").write_text('#!/bin/sh\necho "safe ${PYTHONSAFEPATH-unset}"\n')
    for words in (["train"], ["python", "-m", "pipelines", "train"]):
        assert enter(programs, *words).stdout == "safe 1\n"
        assert enter(programs, *words, PYTHONSAFEPATH="").stdout == "safe \n"
    assert enter(programs, "python", "mine.py").stdout == "safe unset\n"


def test_it_becomes_the_command(programs: Path) -> None:
    """Signals then reach the command itself."""
    settings = {"PATH": os.environ["PATH"], "HOME": "/tmp", "ROADFUSE_VARIANT": "cpu"}
    process = subprocess.Popen(
        [ENTRYPOINT, "sh", "-c", "echo $$"], env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.communicate(timeout=30)[0].strip() == str(process.pid)


def test_an_image_for_cpus_says_so_in_one_line_on_standard_error(programs: Path) -> None:
    done = enter(programs, "true")
    assert (done.stdout, done.stderr) == ("", "roadfuse: this image is for CPUs: no GPU is used\n")


def test_little_shared_memory_is_said_with_the_cure(programs: Path) -> None:
    (programs / "df").write_text("#!/bin/sh\necho 1K-blocks; echo 65536\n")
    errors = enter(programs, "true").stderr
    assert "/dev/shm has 64 MiB" in errors and "run with --shm-size 8g or --ipc host" in errors


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has GPUs")
def test_an_image_for_gpus_without_one_says_so(programs: Path) -> None:
    assert "no GPU in this container: trains on CPUs" in enter(programs, "true", ROADFUSE_VARIANT="cuda").stderr


@pytest.mark.parametrize("variable", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"])
def test_of_several_ranks_of_a_node_the_first_one_speaks(programs: Path, variable: str) -> None:
    assert enter(programs, "true", **{variable: "1"}).stderr == ""
    assert enter(programs, "true", **{variable: "0"}).stderr != ""


def test_a_home_that_cannot_be_written_is_replaced(programs: Path) -> None:
    done = enter(programs, "sh", "-c", 'test -w "$HOME" && echo "$HOME"', HOME="/absent")
    assert done.returncode == 0 and done.stdout.startswith(f"/tmp/home-{os.getuid()}-")
    Path(done.stdout.strip()).rmdir()
