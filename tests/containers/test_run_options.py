"""From the user's options to what the engine is told: recorded text, and one line for each mistake."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from containers.engine import ContainerFacts, ImageFacts
from containers.errors import ContainerError, EngineError
from containers.preflight import (
    HostGpus,
    check_gpus,
    choose_gpus,
    engine_limits,
    explain_start,
    find_gpus,
    fit_ulimits,
    parse_limits,
)
from containers.run import add_arguments, run_settings
from containers.run_end import Watched, explain_end
from containers.run_image import ChosenImage
from containers.run_options import (
    GPU_ULIMITS,
    Mount,
    RunSettings,
    check_mounts,
    container_settings,
    locate_folders,
    parse_environment,
    parse_gpus,
    parse_mount,
    parse_secrets,
    parse_size,
    parse_ulimit,
    slurm_environment,
    wrapped_argv,
)
from containers.slurm_options import docker_rank_argv, enroot_image, pyxis_options
from containers.user_mapping import User
from tests.containers.golden import check_golden

ANNA = User(1000, 1000, "anna", (27, 3000))
IMAGE = "sha256:" + "a" * 64
DIGEST = "nvcr.io/org/lane@sha256:" + "b" * 64

SETTINGS = {
    "cpu": RunSettings(
        image=IMAGE,
        command=("train", "--data", "generated", "--ranks", "2", "--out", "/home/anna/runs/one"),
        user=ANNA,
        digest=DIGEST,
        mounts=(Mount(Path("/home/anna/runs/one"), "/home/anna/runs/one"),),
        cpus="0-3",
    ),
    "all_gpus": RunSettings(
        image=IMAGE,
        command=("train", "--ranks", "8"),
        user=ANNA,
        digest=DIGEST,
        gpus=None,
        mounts=(Mount(Path("/data/culane"), "/data/culane", read_only=True),),
        ulimits=GPU_ULIMITS,
        ipc_host=True,
    ),
    "two_gpus": RunSettings(
        image=IMAGE,
        command=("python", "-m", "pipelines", "bench"),
        user=User(1001, 1001, "ben"),
        gpus=("0", "GPU-5fa2"),
        ulimits={"memlock": (1024, 8192)},
        secrets=Path("/run/user/1000/roadfuse-secrets-x"),
        environment={"OMP_NUM_THREADS": "4"},
        shm_bytes=1 << 30,
        memory_bytes=64 << 30,
        network="host",
        workdir="/workspace",
        labels={"org.roadfuse.run": "one"},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_golden_settings(name: str) -> None:
    text = json.dumps(container_settings(SETTINGS[name]), indent=2, sort_keys=True) + "\n"
    check_golden(f"create_{name}.json", text)


def test_a_job_for_cpus_gets_no_gpu_whatever_its_image_asks_for() -> None:
    told = container_settings(SETTINGS["cpu"])
    assert "NVIDIA_VISIBLE_DEVICES=void" in told["Env"] and "DeviceRequests" not in told["HostConfig"]
    assert not any(row.startswith("NVIDIA") for row in container_settings(SETTINGS["all_gpus"])["Env"])


def test_golden_commands_for_slurm() -> None:
    mounts = (Mount(Path("/data"), "/data", read_only=True), Mount(Path("/home/anna/runs"), "/home/anna/runs"))
    image = "nvcr.io/org/lane:26.11-py3"
    argv = ["/home/anna/.venv/bin/python", "-m", "pipelines", "train", "lane", "--out", "/home/anna/runs/one"]
    blocks = {
        "srun": ["srun", "--nodes=2", "--ntasks-per-node=8", *pyxis_options(image, mounts), "python", *argv[1:]],
        "#SBATCH": pyxis_options(image, mounts, "/workspace", ["OMP_NUM_THREADS"], for_sbatch=True),
        "file": pyxis_options("/images/lane+26.11.sqsh"),
        "docker on each node": [
            "srun", "--nodes=2", "--ntasks-per-node=8", *docker_rank_argv(image, argv, [Path("/home/anna/runs")]),
        ],
    }  # fmt: skip
    check_golden("slurm.txt", "".join(f"{name}\n  " + "\n  ".join(words) + "\n" for name, words in blocks.items()))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/pytorch:24.07-py3", "nvcr.io#nvidia/pytorch:24.07-py3"),
        ("127.0.0.1:5000/roadfuse/lane:26.11-cpu-py3", "127.0.0.1:5000#roadfuse/lane:26.11-cpu-py3"),
        ("debian:bookworm", "debian:bookworm"),
    ],
)
def test_enroots_form_of_a_reference(image: str, expected: str) -> None:
    assert enroot_image(image) == expected


def test_a_command_is_wrapped_for_whoever_starts_jobs() -> None:
    argv = ["/opt/venv/bin/python3", "-m", "pipelines", "train", "lane-small", "--", "x"]
    wrapped = wrapped_argv("lane", argv, ["/runs"], ["--gpus=0,1"])
    assert wrapped == [
        "-m", "containers", "run", "--image=lane", "--mount=/runs", "--gpus=0,1", "--",
        "python", "-m", "pipelines", "train", "lane-small", "--", "x",
    ]  # fmt: skip


def test_train_gets_the_folders_that_are_mounted_for_it(tmp_path: Path) -> None:
    data = tmp_path / "culane"
    data.mkdir()
    train = ("train", "--ranks", "2")
    one = str(tmp_path / "one")
    located = locate_folders(train, Path("one"), data, tmp_path)
    assert located.command == (*train, "--out", one, "--data", str(data))
    assert (located.out, located.data) == (tmp_path / "one", data)
    # In the command itself, however it is written.
    for python in ((), ("/opt/venv/bin/python3", "-m", "pipelines")):
        for words in (("--out", "one"), ("--out=one",)):
            located = locate_folders((*python, *train, *words, "--data", "culane"), None, None, tmp_path)
            assert located.command == (*python, *train, "--out", one, "--data", str(data))
            assert (located.out, located.data) == (tmp_path / "one", data)
    # A data set by its name is no folder.
    located = locate_folders((*train, "--data", "generated"), Path("/runs/one"), None, tmp_path)
    assert located.command == (*train, "--data", "generated", "--out", "/runs/one") and located.data is None
    assert locate_folders(("python", "x.py", "--out", "x"), Path("one"), None, tmp_path).command[-1] == "x"


def test_a_training_that_would_leave_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="would be gone with the container; give --out DIR"):
        locate_folders(("train", "--ranks", "2"), None, None, tmp_path)
    with pytest.raises(ContainerError, match="the command says --out y; give it once"):
        locate_folders(("train", "--out", "y"), Path("x"), None, tmp_path)
    assert locate_folders(("train", "--help"), None, None, tmp_path).out is None


# Options


def test_the_run_folder_is_made_with_its_parents_as_training_makes_them_but_not_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a parent that is missing may be a disk that is not mounted."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    facts = ImageFacts(IMAGE, (), (), "linux/amd64", 1, "", {"ROADFUSE_VARIANT": "cpu"})

    def mounts(out: str) -> tuple[Mount, ...]:
        options = parser.parse_args(["lane", "--out", out])
        return run_settings(options, ChosenImage(facts, DIGEST), ("train",), f"unix://{tmp_path}/none", {})[0].mounts

    assert mounts("runs/a/b") == (Mount(here / "runs/a/b", str(here / "runs/a/b")),)
    assert (here / "runs/a/b").is_dir()
    assert mounts(str(tmp_path / "beside"))[0].source.is_dir()
    with pytest.raises(ContainerError, match=r"its parent .* does not exist; make it first"):
        mounts(str(tmp_path / "disk/a"))
    assert not (tmp_path / "disk").exists()


def test_gpus() -> None:
    assert parse_gpus("all") is None
    assert parse_gpus("none") == ()
    assert parse_gpus("0,3") == ("0", "3")
    assert parse_gpus("GPU-5fa2c1d0-aaaa") == ("GPU-5fa2c1d0-aaaa",)
    for text, said in [("0,0", "twice"), ("two", "is no GPU"), ("0,", "is no GPU"), ("-1", "is no GPU")]:
        with pytest.raises(ContainerError, match=said):
            parse_gpus(text)


@pytest.mark.parametrize(("text", "expected"), [("8g", 8 << 30), ("1.5GiB", 3 << 29), ("64k", 65536), ("7", 7)])
def test_sizes(text: str, expected: int) -> None:
    assert parse_size("--shm-size", text) == expected


@pytest.mark.parametrize("text", ["", "8 apples", "-1g", "0", "g", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ContainerError, match="--shm-size"):
        parse_size("--shm-size", text)


def test_mounts(tmp_path: Path) -> None:
    assert parse_mount("/a", tmp_path) == Mount(Path("/a"), "/a")
    assert parse_mount("a/b", tmp_path) == Mount(tmp_path / "a/b", f"{tmp_path}/a/b")
    assert parse_mount("/a:/b:ro", tmp_path) == Mount(Path("/a"), "/b", read_only=True)
    for text, said in [
        ("/a:b", "not an absolute path"),
        ("/a:/b/../c", "not an absolute path"),
        ("/a:/", "would hide"),
        ("/a:/proc/x", "would hide"),
        ("/a:/b:rx", "SOURCE"),
        (":/b", "SOURCE"),
        ("/a:/b:ro:z", "SOURCE"),
    ]:
        with pytest.raises(ContainerError, match=said):
            parse_mount(text, tmp_path)


def test_a_missing_folder_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "absent", "/data")
    with pytest.raises(ContainerError, match=r"absent: to be mounted at /data, does not exist; make it first"):
        check_mounts([mount])
    assert not mount.source.exists()


def test_a_target_is_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    twice = [Mount(tmp_path / "a", "/x", read_only=True), Mount(tmp_path / "a", "/x")]
    assert check_mounts(twice) == (Mount(tmp_path / "a", "/x"),)
    with pytest.raises(ContainerError, match="/x: both"):
        check_mounts([Mount(tmp_path / "a", "/x"), Mount(tmp_path, "/x")])


def test_ulimits() -> None:
    assert parse_ulimit("memlock=-1") == ("memlock", (-1, -1))
    assert parse_ulimit("nofile=1024:unlimited") == ("nofile", (1024, -1))
    for text, said in [
        ("memlok=1", 'did you mean "memlock"'),
        ("nofile=2:1", "above the hard one"),
        ("nofile", "NAME=SOFT"),
        ("nofile=-1:5", "above the hard one"),
    ]:
        with pytest.raises(ContainerError, match=said):
            parse_ulimit(text)


def test_the_environment_is_taken_by_name_and_never_a_secret() -> None:
    here = {"OMP_NUM_THREADS": "4"}
    assert parse_environment(["OMP_NUM_THREADS", "A=b=c", "E="], here) == {"OMP_NUM_THREADS": "4", "A": "b=c", "E": ""}
    with pytest.raises(ContainerError, match="--env ABSENT: is not set here"):
        parse_environment(["ABSENT"], here)
    with pytest.raises(ContainerError, match="is no name of a variable"):
        parse_environment(["1A=x"], here)
    with pytest.raises(ContainerError, match="give it by --secret WANDB_API_KEY") as caught:
        parse_environment(["WANDB_API_KEY=hush-hush"], here)
    assert "hush" not in str(caught.value)


def test_secrets_come_from_a_variable_or_a_file_and_show_in_no_message(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("hush\n")
    assert parse_secrets(["KEY", f"OTHER={file}"], {"KEY": "x"}) == {"KEY": "x", "OTHER": "hush"}
    with pytest.raises(ContainerError, match=r"--secret KEY=\.\.\.: what follows = is no file") as caught:
        parse_secrets(["KEY=hush-hush"], {})
    assert "hush" not in str(caught.value)
    with pytest.raises(ContainerError, match="--secret KEY: is not set here"):
        parse_secrets(["KEY"], {})


def test_a_rank_of_slurm_is_told_its_place_and_no_key() -> None:
    environ = {"SLURM_PROCID": "3", "SLURM_JWT": "hush", "PMIX_RANK": "3", "MASTER_PORT": "1", "HOME": "/x"}
    assert slurm_environment(environ) == {"SLURM_PROCID": "3", "PMIX_RANK": "3", "MASTER_PORT": "1"}


# What the host has


def test_gpus_of_the_host_are_read_from_its_driver(tmp_path: Path) -> None:
    assert find_gpus(tmp_path / "absent") == HostGpus(0, "")
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: 12\n"
    )
    assert find_gpus(tmp_path) == HostGpus(2, "580.82.07")


EIGHT = HostGpus(8, "580.82.07")


def test_which_gpus_a_run_gets() -> None:
    assert choose_gpus((), False, EIGHT, None, "cuda") is None
    assert choose_gpus((), False, EIGHT, "2,3", "cuda") == ("2", "3")
    assert choose_gpus((), False, EIGHT, "-1", "cuda") == ()
    assert choose_gpus((), False, EIGHT, "", "") == ()
    assert choose_gpus((), False, HostGpus(0, ""), None, "cuda") == ()
    assert choose_gpus(("1",), True, EIGHT, "2,3", "cuda") == ("1",)
    assert choose_gpus((), False, EIGHT, None, "cpu") == ()
    with pytest.raises(ContainerError, match="this image is for CPUs"):
        choose_gpus(None, True, EIGHT, None, "cpu")


def test_a_gpu_that_is_not_there_and_an_old_driver_are_named() -> None:
    assert check_gpus(None, EIGHT, "13.0.1") == []
    assert check_gpus((), HostGpus(0, ""), "13.0.1") == []
    assert check_gpus(None, EIGHT, "") == []
    assert "no NVIDIA driver" in check_gpus(None, HostGpus(0, ""), "13.0.1")[0]
    with pytest.raises(ContainerError, match="--gpus 8: this host has 8, numbered from 0"):
        check_gpus(("0", "8"), EIGHT, "13.0.1")
    with pytest.raises(ContainerError, match=r"driver 535\.1 is too old for this image's CUDA 13\.0\.1: it needs 580"):
        check_gpus(None, HostGpus(8, "535.1"), "13.0.1")


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max open files            20000                20000                files
Max locked memory         8388608              8388608              bytes
"""


def test_limits_of_the_engine_bound_those_of_its_containers() -> None:
    limits = parse_limits(LIMITS)
    assert limits == {"stack": -1, "nofile": 20000, "memlock": 8388608}
    fitted, warnings = fit_ulimits({"nofile": (1024, 20000)}, GPU_ULIMITS, limits)
    assert fitted == {"nofile": (1024, 20000), "memlock": (8388608, 8388608), "stack": (67108864, 67108864)}
    assert len(warnings) == 1 and "memlock is limited to 8388608" in warnings[0]
    with pytest.raises(ContainerError, match="--ulimit memlock=unlimited: this host's engine allows at most 8388608"):
        fit_ulimits({"memlock": (-1, -1)}, {}, limits)
    # What cannot be known is asked for.
    assert fit_ulimits({"memlock": (-1, -1)}, {}, None) == ({"memlock": (-1, -1)}, [])


def test_no_limits_are_known_of_an_engine_elsewhere(tmp_path: Path) -> None:
    assert engine_limits("tcp://10.0.0.1:2375") is None
    assert engine_limits(f"unix://{tmp_path}/absent.sock") is None


@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        ("OCI runtime create failed: error setting rlimit type 8: operation not permitted", "--ulimit memlock", 125),
        ('could not select device driver "" with capabilities: [[gpu]]', "nvidia-container-toolkit", 125),
        ("unsatisfied condition: cuda>=13.0, please update", "the image needs cuda>=13.0", 125),
        ('exec: "trian": executable file not found in $PATH', '"trian": there is no such program in the image', 127),
        ('exec: "/etc/passwd": permission denied', "may be executed", 126),
        ("something else", "something else", 125),
    ],
)
def test_why_a_container_does_not_start(text: str, said: str, code: int) -> None:
    explained = explain_start(EngineError(text), "trian")
    assert said in str(explained) and explained.exit_code == code


# How it ended

ENDED = ContainerFacts("id", "one", IMAGE, "exited", 0, False, "", {}, 64 << 20)


@pytest.mark.parametrize(
    ("change", "watched", "said"),
    [
        ({}, Watched(), ""),
        ({"exit_code": 75}, Watched(num_signals_sent=1, num_kills=1), ""),
        ({"exit_code": 137, "out_of_memory": True}, Watched(num_kills=0), "killed the container's program"),
        ({"exit_code": 1, "out_of_memory": True}, Watched(num_kills=0), "killed a process in the container"),
        ({"exit_code": 0, "out_of_memory": True}, Watched(num_kills=0), "it went on without"),
        ({"exit_code": 137}, Watched(num_kills=1), "killed from outside, through the engine"),
        ({"exit_code": 137}, Watched(num_kills=0), "killed from outside, not through the engine"),
        ({"exit_code": 137}, Watched(num_signals_sent=2, num_kills=2, forced_after_seconds=5), "had not ended 5 s"),
        ({"exit_code": 143}, Watched(num_signals_sent=1, num_kills=1), ""),
        ({"exit_code": 143}, Watched(num_kills=1), "told to end from outside, through the engine (SIGTERM)"),
        ({"exit_code": 135}, Watched(num_kills=0), "crashed by SIGBUS: is /dev/shm full? (--shm-size)"),
        ({"exit_code": 139}, Watched(num_kills=0), "crashed by SIGSEGV"),
        ({"exit_code": 75}, Watched(engine_was_away=True), "the engine was stopped or restarted"),
    ],
)  # fmt: skip
def test_ends_are_told_apart(change: dict[str, object], watched: Watched, said: str) -> None:
    lines = explain_end(replace(ENDED, **change), watched)  # type: ignore[arg-type]
    assert len(lines) == (1 if said else 0)
    assert re.search(re.escape(said), "".join(lines))
