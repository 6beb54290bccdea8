"""A rank's last words: why it ended, left where the launcher finds it, and an end that cannot hang.

A communication library's shutdown waits for the other ranks, so a rank that failed must not
reach it: the traceback is written to a file and the process ends at once. No torch here.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from perception.errors import UserError

FAILURE_FOLDER_VARIABLE = "PERCEPTION_FAILURE_FOLDER"
"""Environment variable by which a launcher names the folder to each rank."""

EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
"""A rank was told to stop, has saved what it had, and can be started again."""


def pid_file(folder: Path, rank: int) -> Path:
    """Holds the rank's process id from `install` on."""
    return folder / f"rank{rank}.pid"


def traceback_file(folder: Path, rank: int) -> Path:
    """Holds the traceback of the exception that ended the rank, or the line of its UserError."""
    return folder / f"rank{rank}.txt"


def fault_file(folder: Path, rank: int) -> Path:
    """Holds the Python stacks at a fatal signal, such as a segmentation fault."""
    return folder / f"rank{rank}.fault"


def clean_exit_file(folder: Path, rank: int) -> Path:
    """Exists once the interpreter has shut down in order; a rank that vanished left none."""
    return folder / f"rank{rank}.clean"


def log_file(folder: Path, rank: int) -> Path:
    """Standard output and error of every rank but 0, whose output is shown live."""
    return folder / f"rank{rank}.log"


def install(failure_folder: Path | None, rank: int) -> None:
    """Call first in a rank. From now on an uncaught exception ends the process at once.

    With a folder: the process id, a traceback or fatal signal's stacks, and a clean end are
    recorded there, and the launcher shows them. With None (no launcher of ours) errors go to
    standard error. Exit codes: 2 for a UserError, 130 for KeyboardInterrupt, 1 for any other.
    """
    process_id = os.getpid()
    if failure_folder is not None:
        failure_folder.mkdir(parents=True, exist_ok=True)
        _write(pid_file(failure_folder, rank), f"{process_id}\n")
        # Stays open for the life of the process: faulthandler keeps only the descriptor.
        stacks = fault_file(failure_folder, rank).open("w")
        faulthandler.enable(stacks)
        # Registered first, hence run last: after a communication library's own exit hook has returned.
        atexit.register(_mark_clean_exit, failure_folder, rank, process_id)
    else:
        faulthandler.enable()

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process_id:
            # A forked data worker is no rank.
            sys.__excepthook__(kind, error, trace)
            return
        if isinstance(error, KeyboardInterrupt):
            code, text = 130, ""
        elif isinstance(error, UserError):
            code, text = EXIT_USER_ERROR, f"error: {error}\n"
        else:
            code, text = EXIT_CRASH, "".join(traceback.format_exception(kind, error, trace))
        try:
            if failure_folder is None:
                sys.stderr.write(text)
            elif text:
                _write(traceback_file(failure_folder, rank), text)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # No interpreter shutdown: Horovod's exit hook would wait for ranks that may hang.
            os._exit(code)

    sys.excepthook = end


def end_process(rank: int, words: str, exit_code: int = EXIT_CRASH) -> None:
    """End this rank at once, from any thread, with `words` where the launcher or the user finds them."""
    folder = os.environ.get(FAILURE_FOLDER_VARIABLE)
    if folder:
        _write(traceback_file(Path(folder), rank), f"{words}\n")
    else:
        print(words, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _mark_clean_exit(folder: Path, rank: int, process_id: int) -> None:
    if os.getpid() == process_id:
        _write(clean_exit_file(folder, rank), "")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
