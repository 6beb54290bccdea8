"""What pyxis is told: a pinned image by its digest, and nothing that it would take for something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers.errors import ContainerError
from containers.run_options import Mount
from containers.slurm_options import enroot_image, pyxis_options
from perception.errors import UserError
from sweeps.job import Job
from sweeps.launchers.container_argv import pyxis_preamble, pyxis_words
from sweeps.launchers.slurm_script import Batch, batch_script
from sweeps.planning.plan import SlurmSettings

DIGEST = "sha256:" + "1f" * 32
PINNED = f"nvcr.io/org/lane:26.11-py3@{DIGEST}"
RUN = Path("/nights/jobs/a")
ARGV = ("/venv/bin/python", "-m", "pipelines", "train")


def job(image: str = PINNED, environment: dict[str, str] | None = None, run_folder: Path = RUN) -> Job:
    return Job("a", ARGV, run_folder, environment=environment or {}, image=image)


def test_a_pinned_image_is_asked_for_by_its_digest_and_not_by_its_tag() -> None:
    assert enroot_image(PINNED) == f"nvcr.io#org/lane:{DIGEST}"
    assert enroot_image(f"127.0.0.1:5000/lane@{DIGEST}") == f"127.0.0.1:5000#lane:{DIGEST}"
    assert f"--container-image=nvcr.io#org/lane:{DIGEST}" in pyxis_words(job(), Path("/work"))


def test_what_a_plan_sets_wins_over_what_the_image_sets() -> None:
    words = pyxis_words(job(environment={"OMP_NUM_THREADS": "2"}), Path("/work"))
    assert "--container-env=OMP_NUM_THREADS,PERCEPTION_IMAGE_DIGEST" in words


def test_the_images_code_runs_whatever_the_working_folder_and_the_host_have() -> None:
    text = batch_script(
        Batch((job(environment={"PYTHONPATH": "/of/the/plan"}),)),
        SlurmSettings(container="pyxis"),
        Path("/nights/launcher"),
        Path("/work"),
    )
    lines = text.splitlines()
    assert lines.index("unset PYTHONPATH PYTHONHOME XDG_CACHE_HOME") < lines.index("export PYTHONPATH=/of/the/plan")
    assert {'export PYTHONSAFEPATH="${PYTHONSAFEPATH-1}"', "export ENROOT_LOGIN_SHELL=no"} <= set(lines)
    assert pyxis_preamble(job(image="")) == []


@pytest.mark.parametrize("name", ["a,b", "a:b", 'a"b', "a$b", "a`b", "a\\b", "a\nb"])
def test_a_folder_that_pyxis_would_cut_or_expand_is_refused(name: str) -> None:
    folder = Path("/data") / name
    with pytest.raises(ContainerError, match="pyxis cannot mount"):
        pyxis_options(PINNED, [Mount(folder, "/data")])
    with pytest.raises(UserError, match=r"job a: .*pyxis cannot mount"):
        pyxis_words(job(run_folder=folder), Path("/work"))


def test_a_file_is_given_by_its_absolute_path() -> None:
    assert pyxis_options("/images/lane.sqsh")[0] == "--container-image=/images/lane.sqsh"
    with pytest.raises(ContainerError, match="absolute path"):
        pyxis_options("images/lane.sqsh")


def test_a_reference_that_names_no_one_image_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r'job a: .*"latest" names another image'):
        pyxis_words(job(image="nvcr.io/org/lane:latest"), Path("/work"))
