"""`run` against a real engine: same user, folders, output, signals and exit code as here; nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers.engine import DockerEngine
from containers.errors import EngineError
from containers.owner import RUN_LABEL
from tests.containers import daemons
from tests.containers.conftest import needs

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
TINY = "roadfuse/tiny:26.11-cpu-py3"


class Run:
    """`python -m containers run` in a process of its own."""

    def __init__(self, daemon: daemons.DockerDaemon, *words: str, command: list[str], **environment: str) -> None:
        argv = [sys.executable, "-m", "containers", "run", "--image", TINY, *words, "--", *command]
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**daemon.client_environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, timeout_seconds: float = 60.0) -> tuple[int, str, str]:
        try:
            out, errors = self.process.communicate(timeout=timeout_seconds)
        finally:
            self.process.kill()
        return self.process.returncode, out.decode(errors="replace"), errors.decode(errors="replace")

    def wait_for(self, word: bytes) -> None:
        """On standard output, which is read byte by byte: nothing of the rest is taken."""
        assert self.process.stdout is not None
        seen = b""
        while word not in seen:
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, f"ended before it said {word!r}: {seen!r} {self.end()}"
            seen += byte


def run(daemon: daemons.DockerDaemon, *words: str, command: list[str], **environment: str) -> tuple[int, str, str]:
    return Run(daemon, *words, command=command, **environment).end()


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def containers_of(daemon: daemons.DockerDaemon) -> list[str]:
    """All that there are, running or not."""
    client = daemon.client()
    try:
        return [row["Names"][0] for row in client.api.containers(all=True)]
    finally:
        client.close()


@pytest.fixture
def tiny(dockerd: daemons.DockerDaemon, tiny_image: str) -> Iterator[daemons.DockerDaemon]:
    """The engine with the image; afterwards no container is left, whatever the test did."""
    yield dockerd
    daemons.wait_for(lambda: not containers_of(dockerd), "end of all containers", 20)


@pytest.fixture
def own_engine() -> Iterator[daemons.DockerDaemon]:
    """One that a test may stop and kill."""
    needs([*daemons.ENGINE_PROGRAMS, "busybox"], "docker.io iproute2 busybox-static")
    with daemons.docker_daemon() as daemon:
        client = daemon.client()
        daemons.import_image(client, daemons.busybox_layer(), *TINY.split(":"))
        client.close()
        yield daemon


# As if it ran here


def test_both_streams_and_the_exit_code_are_kept(tiny: daemons.DockerDaemon) -> None:
    code, out, errors = run(tiny, command=shell("echo out; echo err >&2; exit 75"))
    assert (code, out, errors) == (75, "out\n", "err\n")


def test_output_is_kept_to_the_byte_and_comes_at_once(tiny: daemons.DockerDaemon) -> None:
    """Bars that redraw, a character cut in the middle, bytes that are no text; each part is seen before the next."""
    program = (
        r"printf '\r10 %%'; sleep 0.3; printf '\r20 \342'; sleep 0.3; printf '\226\210'; sleep 0.3;"
        r" printf '\377\000end'; sleep 0.3"
    )
    started = Run(tiny, command=shell(program))
    times, data = [], b""
    assert started.process.stdout is not None
    while chunk := os.read(started.process.stdout.fileno(), 4096):
        times.append(time.monotonic())
        data += chunk
    assert data == "\r10 %\r20 █".encode() + b"\xff\x00end"
    assert len(times) >= 3 and times[-1] - times[0] > 0.5
    assert started.end()[0] == 0


def test_much_output_arrives_whole_from_both_streams(tiny: daemons.DockerDaemon) -> None:
    code, out, errors = run(tiny, command=shell("seq 1 40000; seq 1 30000 >&2"))
    assert code == 0
    assert out.splitlines() == [str(number) for number in range(1, 40001)]
    assert errors.splitlines() == [str(number) for number in range(1, 30001)]


def test_a_silence_longer_than_the_engines_time_for_an_answer_loses_nothing(tiny: daemons.DockerDaemon) -> None:
    with DockerEngine(tiny.host, timeout_seconds=6) as engine:
        assert engine.output(TINY, shell("echo one; sleep 8; echo two")) == b"one\ntwo\n"


def test_a_reader_who_leaves_does_not_end_the_run(tiny: daemons.DockerDaemon, tmp_path: Path) -> None:
    started = Run(tiny, "--mount", str(tmp_path), command=shell(f"seq 1 100000; sleep 1; touch {tmp_path}/done"))
    started.wait_for(b"10\n")
    assert started.process.stdout is not None and started.process.stderr is not None
    started.process.stdout.close()
    errors = started.process.stderr.read().decode()
    assert started.process.wait(30) == 0 and (tmp_path / "done").exists()
    assert "bytes of output were dropped" in errors
    started.process.stderr.close()


def test_the_user_is_the_caller_with_a_home_and_a_name(tiny: daemons.DockerDaemon, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    program = f'id; echo "$USER $HOME $LOGNAME"; touch "$HOME/x" {tmp_path}/file && echo "written"; ls -nd "$HOME"'
    code, out, errors = run(tiny, "--user", "4242:77", "--mount", str(tmp_path), command=shell(program))
    assert code == 0, errors
    rows = out.splitlines()
    assert rows[0].startswith("uid=4242(user-4242) gid=77(user-4242)")
    assert rows[1:3] == ["user-4242 /home/user-4242 user-4242", "written"]
    assert rows[3].split()[2:4] == ["4242", "77"]
    assert ((tmp_path / "file").stat().st_uid, (tmp_path / "file").stat().st_gid) == (4242, 77)


def test_the_run_folder_is_made_for_the_caller_and_a_parent_elsewhere_is_not(
    tiny: daemons.DockerDaemon, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = shell(f"echo made > {out}/result.json")
    assert run(tiny, "--out", str(out), "--user", "4242", command=command)[0] == 0
    assert (out / "result.json").read_text() == "made\n" and out.stat().st_uid == 4242
    code, _, errors = run(tiny, "--out", str(tmp_path / "absent" / "run"), command=command)
    assert code == 2 and "its parent" in errors and not (tmp_path / "absent").exists()


def test_a_missing_folder_is_an_error_and_a_read_only_one_stays_as_it_is(
    tiny: daemons.DockerDaemon, tmp_path: Path
) -> None:
    code, _, errors = run(tiny, "--mount", f"{tmp_path}/absent:/data", command=["true"])
    assert (code, errors.count("\n")) == (2, 1) and "does not exist; make it first" in errors
    assert not (tmp_path / "absent").exists()
    code, _, errors = run(tiny, "--mount", f"{tmp_path}:/data:ro", command=shell("touch /data/x"))
    assert code == 1 and "Read-only" in errors and not list(tmp_path.iterdir())


def test_shared_memory_and_limits(tiny: daemons.DockerDaemon) -> None:
    program = "df -k /dev/shm | tail -n 1; ulimit -n; ulimit -H -n; cat /proc/1/comm"
    code, out, errors = run(tiny, "--shm-size", "96m", "--ulimit", "nofile=256:512", command=shell(program))
    assert code == 0, errors
    rows = out.splitlines()
    assert rows[0].split()[1] == str(96 * 1024)
    assert rows[1:] == ["256", "512", "docker-init"]


def test_a_limit_that_the_engine_forbids_is_named(tiny: daemons.DockerDaemon) -> None:
    """Before anything is made. Where the engine may raise all limits, it grants this one."""
    shown = subprocess.run(["sh", "-c", "ulimit -H -l"], capture_output=True, text=True, check=True).stdout
    hard = int(shown.replace("unlimited", "-1"))
    code, _, errors = run(tiny, "--ulimit", "memlock=-1", command=["true"])
    if hard == -1:
        assert code == 0
    else:
        assert code == 2 and f"--ulimit memlock=unlimited: this host's engine allows at most {hard * 1024}" in errors


def test_a_command_that_is_not_there_and_one_that_is_no_program(tiny: daemons.DockerDaemon) -> None:
    code, _, errors = run(tiny, command=["trian"])
    assert code == 127 and "exec trian failed: No such file" in errors and errors.count("\n") == 1
    code, _, errors = run(tiny, command=["/etc/passwd"])
    assert code == 126 and "exec /etc/passwd failed: Permission denied" in errors


def test_an_image_that_is_not_here_is_said_with_the_cure(tiny: daemons.DockerDaemon) -> None:
    argv = [sys.executable, "-m", "containers", "run", "--image", "nvcr.io/org/lane:26.11-py3", "--", "true"]
    done = subprocess.run(argv, cwd=ROOT, env=tiny.client_environment, capture_output=True, text=True)
    assert done.returncode == 2 and "get it by `python -m containers pull nvcr.io/org/lane:26.11-py3`" in done.stderr


def test_a_name_that_is_taken_is_refused_and_its_container_let_alone(tiny: daemons.DockerDaemon) -> None:
    first = Run(tiny, "--name", "taken", command=shell("echo ready; sleep 4; exit 5"))
    first.wait_for(b"ready")
    code, _, errors = run(tiny, "--name", "taken", command=["true"])
    assert code == 125 and "is already in use" in errors
    time.sleep(1.5)
    assert first.end()[0] == 5


def test_ten_at_once(tiny: daemons.DockerDaemon, tmp_path: Path) -> None:
    program = 'echo "$0"; sleep 0.5; exit "$0"'
    started = [Run(tiny, command=["sh", "-c", program, str(number)]) for number in range(10)]
    ends = [one.end() for one in started]
    assert [(code, out) for code, out, _ in ends] == [(number, f"{number}\n") for number in range(10)]


# Secrets


def test_a_secret_is_a_file_of_its_user_and_shows_nowhere(
    tiny: daemons.DockerDaemon, tmp_path: Path, docker_client: Any
) -> None:
    """Neither in the list of processes, the engine's own records, its log, nor after the run anywhere in memory."""
    key = "hush-" + os.urandom(8).hex()
    program = f"cat /run/secrets/roadfuse/MY_KEY; ls -ln /run/secrets/roadfuse; echo ready; cat {tmp_path}/go"
    os.mkfifo(tmp_path / "go")
    started = Run(
        tiny, "--secret", "MY_KEY", "--name", "with-secret", "--mount", str(tmp_path), "--user", "4242",
        command=shell(program), MY_KEY=key,
    )  # fmt: skip
    tmp_path.chmod(0o755)
    started.wait_for(key.encode())
    started.wait_for(b"ready")
    inspected = json.dumps(docker_client.api.inspect_container("with-secret"))
    processes = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert key not in inspected and key.encode() not in processes and key not in tiny.log
    folder = Path(next(m["Source"] for m in json.loads(inspected)["HostConfig"]["Mounts"] if "secrets" in m["Target"]))
    assert folder.stat().st_mode & 0o777 == 0o700
    file = folder / "MY_KEY"
    assert file.stat().st_mode & 0o777 == 0o400 and file.stat().st_uid == 4242
    (tmp_path / "go").write_text("")
    code, _, errors = started.end()
    assert code == 0 and key not in errors
    assert not folder.exists()


# Signals


def test_sigterm_is_handed_on_and_the_exit_code_kept(tiny: daemons.DockerDaemon) -> None:
    started = Run(tiny, command=shell("trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.1; done"))
    started.wait_for(b"ready")
    started.process.send_signal(signal.SIGTERM)
    code, out, errors = started.end()
    assert (code, out.strip()) == (75, "saved")
    assert errors == "containers: SIGTERM: told the container, which has 120 s to end\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2, signal.SIGHUP])
def test_other_signals_are_handed_on(tiny: daemons.DockerDaemon, number: signal.Signals) -> None:
    program = "trap 'echo INT; exit 3' INT; trap 'echo USR2; exit 3' USR2; trap 'echo TERM; exit 3' TERM; echo ready"
    started = Run(tiny, command=shell(f"{program}; while :; do sleep 0.1; done"))
    started.wait_for(b"ready")
    started.process.send_signal(number)
    code, out, _ = started.end()
    assert (code, out.strip()) == (3, "TERM" if number == signal.SIGHUP else number.name[3:])


def test_what_does_not_end_in_time_is_killed(tiny: daemons.DockerDaemon) -> None:
    started = Run(tiny, "--grace", "1", command=shell("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    started.wait_for(b"ready")
    started.process.send_signal(signal.SIGTERM)
    code, _, errors = started.end()
    assert code == 137 and "killed, since it had not ended 1 s after it was told to" in errors


def test_a_program_that_heeds_no_signal_as_pid_1_ends_all_the_same(tiny: daemons.DockerDaemon) -> None:
    started = Run(tiny, command=shell("echo ready; exec sleep 100"))
    started.wait_for(b"ready")
    begin = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 143 and time.monotonic() - begin < 5


# Ends from outside


def test_out_of_memory_is_told(tiny: daemons.DockerDaemon) -> None:
    program = "x=$(head -c 200m /dev/zero | tr '\\0' x); echo never"
    code, out, errors = run(tiny, "--memory", "32m", command=shell(f'exec sh -c "{program}"'))
    assert code == 137 and "never" not in out
    assert "out of memory: the kernel killed the container's program (its limit is 32 MiB)" in errors


def test_a_child_that_was_killed_for_want_of_memory_is_told_apart(tiny: daemons.DockerDaemon) -> None:
    program = "sh -c 'x=$(head -c 200m /dev/zero | tr \"\\0\" x)'; exit 9"
    code, _, errors = run(tiny, "--memory", "32m", command=shell(program))
    assert code == 9 and "killed a process in the container (its limit is 32 MiB), and it ended with 9" in errors


def test_a_kill_through_the_engine_is_told(tiny: daemons.DockerDaemon, docker_client: Any) -> None:
    started = Run(tiny, "--name", "victim", command=shell("echo ready; sleep 100"))
    started.wait_for(b"ready")
    docker_client.api.kill("victim")
    code, _, errors = started.end()
    assert code == 137 and "killed from outside, through the engine" in errors


def test_a_kill_from_the_host_is_told(tiny: daemons.DockerDaemon, docker_client: Any) -> None:
    started = Run(tiny, "--name", "victim", command=shell("echo ready; exec sleep 100"))
    started.wait_for(b"ready")
    rows = docker_client.api.top("victim")["Processes"]
    os.kill(next(int(row[1]) for row in rows if "sleep 100" in row[-1] and "init" not in row[-1]), signal.SIGKILL)
    code, _, errors = started.end()
    assert code == 137 and "killed from outside, not through the engine" in errors


def test_a_removal_from_outside_is_told(tiny: daemons.DockerDaemon, docker_client: Any) -> None:
    started = Run(tiny, "--name", "victim", command=shell("echo ready; sleep 100"))
    started.wait_for(b"ready")
    docker_client.api.remove_container("victim", force=True)
    code, _, errors = started.end()
    assert code == 137 and "from outside" in errors


def test_kill_9_of_the_client_lets_the_program_save_and_leaves_nothing(
    tiny: daemons.DockerDaemon, tmp_path: Path
) -> None:
    program = (
        f"trap 'sleep 0.5; echo saved > {tmp_path}/checkpoint; exit 75' TERM; echo ready; while :; do sleep 0.1; done"
    )
    started = Run(tiny, "--mount", str(tmp_path), "--secret", "KEY", command=shell(program), KEY="hush")
    started.wait_for(b"ready")
    started.process.kill()
    daemons.wait_for(lambda: not containers_of(tiny), "end of the container", 20)
    assert (tmp_path / "checkpoint").read_text() == "saved\n"
    daemons.wait_for(lambda: not list(Path("/dev/shm").glob("roadfuse-secrets-*")), "end of the secrets", 5)
    started.end()


def test_what_a_dead_client_and_its_reaper_left_the_next_run_removes(
    tiny: daemons.DockerDaemon, tmp_path: Path, docker_client: Any
) -> None:
    started = Run(tiny, "--name", "orphan", command=shell("echo ready; sleep 100"))
    started.wait_for(b"ready")
    labels = docker_client.api.inspect_container("orphan")["Config"]["Labels"]
    assert labels[RUN_LABEL] == "orphan"
    # What lives is let alone.
    assert "removed" not in run(tiny, command=["true"])[2]
    for label in ("org.roadfuse.run.reaper", "org.roadfuse.run.owner"):
        os.kill(int(labels[label].split()[2]), signal.SIGKILL)
    started.end()
    assert containers_of(tiny) == ["/orphan"]
    code, _, errors = run(tiny, command=["true"])
    assert code == 0 and "removed container orphan, left behind by a run that was killed" in errors
    assert containers_of(tiny) == []


# The engine


def test_an_engine_that_is_stopped_and_comes_back(own_engine: daemons.DockerDaemon) -> None:
    """It ends its containers as it goes: they save their work, and how they ended is told once it is back."""
    started = Run(own_engine, command=shell("trap 'exit 75' TERM; echo ready; while :; do sleep 0.1; done"))
    started.wait_for(b"ready")
    own_engine.stop()
    time.sleep(1)
    own_engine.start()
    code, _, errors = started.end()
    assert code == 75
    assert "waiting 30 s for it to come back" in errors and "the engine was stopped or restarted meanwhile" in errors
    assert containers_of(own_engine) == []


def test_an_engine_that_is_lost(own_engine: daemons.DockerDaemon, tmp_path: Path) -> None:
    """The client says so and ends, at once where the user does not want to wait; what is left goes when it is back."""
    started = Run(own_engine, command=shell("echo ready; while :; do sleep 0.1; done"))
    started.wait_for(b"ready")
    own_engine.end(signal.SIGKILL)
    assert started.process.stderr is not None
    first = started.process.stderr.readline().decode()
    assert "waiting 30 s for it to come back" in first
    started.process.send_signal(signal.SIGINT)
    code, _, errors = started.end()
    assert code == 125 and "the engine is lost" in errors and "removed once the engine is back" in errors
    own_engine.start()
    daemons.wait_for(lambda: not containers_of(own_engine), "end of what was left", 30)


def test_no_engine_at_all(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/absent.sock"}
    argv = [sys.executable, "-m", "containers", "run", "--image", TINY, "--", "true"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 125 and done.stderr.count("\n") == 1
    assert "no container engine answers at unix://" in done.stderr and "DOCKER_HOST" in done.stderr


def test_an_answer_that_is_no_engines(tmp_path: Path) -> None:
    """A daemon that talks and knows nothing: an error of one line, not a traceback."""
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "odd.sock"))
        listener.listen(4)

        def answer() -> None:
            for _ in range(4):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(EngineError):
            DockerEngine(f"unix://{tmp_path}/odd.sock", timeout_seconds=5)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


# GPUs


@pytest.fixture
def engine_with_stub_gpus(tmp_path: Path) -> Iterator[tuple[daemons.DockerDaemon, Path]]:
    """One whose runtime hook is a stub that writes down what it was told: --gpus is accepted without any GPU."""
    needs([*daemons.ENGINE_PROGRAMS, "busybox"], "docker.io iproute2 busybox-static")
    programs = tmp_path / "programs"
    programs.mkdir()
    hook = programs / "nvidia-container-runtime-hook"
    hook.write_text(f"#!/bin/sh\ncat >> {tmp_path}/hook.json\n")
    hook.chmod(0o755)
    with daemons.docker_daemon(programs_first=programs) as daemon:
        client = daemon.client()
        changes = ["ENV ROADFUSE_VARIANT=cuda NVIDIA_VISIBLE_DEVICES=all"]
        repository, tag = TINY.split(":")
        daemons.import_image(client, daemons.busybox_layer(), repository, tag, changes)
        client.close()
        yield daemon, tmp_path / "hook.json"


def test_gpus_are_those_asked_for_and_none_for_cpus(engine_with_stub_gpus: tuple[daemons.DockerDaemon, Path]) -> None:
    daemon, hooked = engine_with_stub_gpus
    program = shell('echo "$NVIDIA_VISIBLE_DEVICES"; ulimit -H -s')
    for option, seen in [("all", "all"), ("0,2", "0,2"), ("GPU-5fa2c1d0", "GPU-5fa2c1d0")]:
        hooked.unlink(missing_ok=True)
        code, out, errors = run(daemon, "--gpus", option, command=program)
        assert code == 0, errors
        assert out.splitlines() == [seen, "65536"]
        assert "this host has no NVIDIA driver" in errors
        assert hooked.exists()
    hooked.unlink()
    for words in (["--gpus", "none"], []):
        code, out, errors = run(daemon, *words, command=program)
        assert code == 0 and out.splitlines()[0] == "void" and errors == "" and not hooked.exists()


def test_gpus_without_nvidias_runtime(tiny: daemons.DockerDaemon) -> None:
    code, _, errors = run(tiny, "--gpus", "all", command=["true"])
    assert code == 125 and "the engine has no NVIDIA runtime; install nvidia-container-toolkit" in errors


# Several nodes


def test_a_rank_that_srun_started_has_its_place_the_hosts_network_and_memory(tiny: daemons.DockerDaemon) -> None:
    program = 'echo "$SLURM_PROCID of $SLURM_NTASKS, key ${SLURM_JWT:-none}"; cat /proc/net/unix | head -n 1; hostname'
    place = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_JWT": "hush"}
    code, out, errors = run(tiny, "--slurm", command=shell(program), **place)
    assert code == 0, errors
    assert out.splitlines()[0] == "3 of 16, key none" and out.splitlines()[-1] == os.uname().nodename
