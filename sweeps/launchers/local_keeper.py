"""Keeps one job of the local launcher: starts it, stops it when its time is up, and records how it ended.

    python -I -S local_keeper.py RECORD LOG FOLDER LIMIT_SECONDS GRACE_SECONDS CORES COMMAND ...

It outlives the controller, holds the locks of the job and of its seats (open files that it inherited) for as long as
it lives, and is the only one that signals the job. SIGTERM asks it to end the job. RECORD is a JSON file that was there
before: it is replaced with the keeper's process and start time before the job starts, and with the end after it.
Standard library only, and few modules: it starts in a few hundredths of a second.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRIES_TO_RECORD = 12
START_MARK = "--- started "
"""As in sweeps.job, which is not imported here."""


def main() -> int:
    record, log, folder, limit, grace, cores, *command = sys.argv[1:]
    with open(record, encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to import
        content = json.load(file)
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # It was blocked from before this program began, so that none came too early.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # What the job leaves behind becomes a child of this process, whatever session it is in.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if cores:
        with contextlib.suppress(OSError):  # Of a set that has shrunk meanwhile: it runs unpinned.
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    keeper = os.getpid()
    content["keeper"] = [keeper, start_time(keeper)]
    content["started_utc"] = time.time()
    # Before the job starts: a record without a keeper means that nothing was started.
    write(record, content)
    try:
        with open(log, "ab", buffering=0) as output:  # noqa: PTH123
            begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(content["started_utc"]))
            output.write(f"{START_MARK}{begin} as process {keeper}'s\n".encode())
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: _end_with(keeper),
            )
    except (OSError, subprocess.SubprocessError) as error:
        content.update(exit_code=127, reason=f"could not be started: {error}", ended_utc=time.time())
        record_end(record, content)
        return 0
    reason = watch(process, receiver, float(limit), float(grace))
    status = process.wait()
    end_stragglers()
    if status < 0:
        reason = reason or f"signal {signal.Signals(-status).name}"
        status = 128 - status
    content.update(exit_code=status, reason=reason or f"exit code {status}", ended_utc=time.time())
    record_end(record, content)
    return 0


def watch(process: "subprocess.Popen[bytes]", receiver: int, limit: float, grace: float) -> str:
    """Until the job has ended; returns why it was stopped, or nothing."""
    ended = os.pidfd_open(process.pid)
    stop_at, kill_at, reason = time.monotonic() + limit, float("inf"), ""
    while True:
        timeout = max(0.0, min(stop_at, kill_at) - time.monotonic())
        # A day at most: the kernel takes no longer wait than some weeks.
        readable, _, _ = select.select([ended, receiver], [], [], min(timeout, 86400.0))
        if ended in readable:
            return reason
        now = time.monotonic()
        asked = receiver in readable and signal.SIGTERM in os.read(receiver, 4096)
        if asked or now >= stop_at:
            if not reason:
                reason = "CANCELLED" if asked else "TIMEOUT"
                # To the job's own process: it tells its ranks, once each.
                process.send_signal(signal.SIGTERM)
                kill_at = now + grace
            stop_at = float("inf")
        if now >= kill_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_at = float("inf")


def end_stragglers() -> None:
    """Nothing that the job started outlives it."""
    own = f"/proc/self/task/{os.getpid()}/children"
    while True:
        try:
            with open(own, encoding="ascii") as file:  # noqa: PTH123
                children = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def start_time(process_id: int) -> int:
    """In the kernel's ticks since boot: with the process id it names a process for ever."""
    with open(f"/proc/{process_id}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        return int(file.read().rsplit(")", 1)[1].split()[19])


def record_end(path: str, content: "dict[str, object]") -> None:
    """Write it even if the disk is full for a while; the launcher calls the job lost if it stays so."""
    for attempt in range(TRIES_TO_RECORD):
        try:
            write(path, content)
            return
        except OSError:
            time.sleep(5 if attempt + 1 < TRIES_TO_RECORD else 0)


def write(path: str, content: "dict[str, object]") -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # noqa: PTH105


def _end_with(keeper: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
