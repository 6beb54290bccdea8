"""`python -m PROGRAM COMMAND ...`: each command is a module with `add_arguments` and `run`.

Whoever reads the output may leave before its end (`... | head -1`). Most commands then end without a word; one whose
work is worth more than its words calls `outlive_readers` first.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from perception.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_READER_LEFT = 128 + signal.SIGPIPE
"""Of a command that was cut off, as shells have it; one that had come to its end keeps its own exit code."""


LONGEST_MESSAGE = 1000
"""Characters of an error; of a longer one the begin and the end, where the cure stands, are shown."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


_REFUSALS = frozenset(
    (
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    )
)
"""What a file system answers whatever the program does: never a fault of the program, as a missing file may be."""


class OutputError(OSError):
    """Standard output or error takes no more."""


class _Output(io.RawIOBase):
    """Standard output or error, whose errors are told from those of other files and sockets."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.drops = False
        """What cannot be written is dropped."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if not self.drops:
                raise OutputError(error.errno, error.strerror) from None
        return memoryview(data).nbytes


def run_program(main: Callable[[list[str]], int]) -> int:
    """Run `main` on the command line, once in a process: the exit code, and in one line what the user can mend."""
    for name in ("stdout", "stderr"):
        _replace(name)
    code = None
    try:
        code, mistake = _end(main)
        if mistake:
            print(f"error: {one_line(mistake)}", file=sys.stderr)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # At the interpreter's own end an error could not be caught any more.
    except OutputError as error:
        outlive_readers()
        if error.errno != errno.EPIPE:
            print(
                f"error: output cannot be written ({error.strerror}); make room, or send it elsewhere", file=sys.stderr
            )
            return 2
    return EXIT_READER_LEFT if code is None else code


def _replace(name: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return  # It was closed from the start (`>&-`).
    stream.flush()
    binary = io.BufferedWriter(_Output(stream.fileno()))
    # A name that is no UTF-8, or a terminal that knows only some letters, is shown as well as can be.
    text = io.TextIOWrapper(binary, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
    setattr(sys, name, text)


def _end(main: Callable[[list[str]], int]) -> tuple[int, str]:
    """Exit code, and the user's mistake."""
    try:
        return main(sys.argv[1:]), ""
    except SystemExit as ended:
        if isinstance(ended.code, int):
            return ended.code, ""
        raise
    except (UserError, KeyboardInterrupt) as error:
        if _is_rank():
            raise
        return (130, "") if isinstance(error, KeyboardInterrupt) else (2, str(error))
    except OSError as error:
        # A path is checked where it is taken, but a file system has more ways to refuse one than any check knows.
        if error.filename is None or error.errno not in _REFUSALS or _is_rank():
            raise
        return 2, f"{error.filename}: {error.strerror}; give a path that can be used"


def _is_rank() -> bool:
    """Its hook records why it ended, and ends without waiting for the others."""
    return sys.excepthook.__module__ == "perception.distributed.failure"


def one_line(message: str) -> str:
    """The message as it is shown: what a user gave may hold new lines, or fill a screen.

    >>> one_line('model "a\\nb" is unknown')
    'model "a?b" is unknown'
    """
    text = _CONTROL.sub("?", message)
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} … {text[-half:]}"


def outlive_readers() -> None:
    """From now on, what nobody takes is dropped: a training of hours does not end for it.

    `... | tee log` is the reason: Ctrl-C ends tee at once, and the training must still save its checkpoint.
    """
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Output):  # Not where a function calls this that no `run_program` runs.
            raw.drops = True


def command_module(program: str, modules: Mapping[str, str], command: str) -> ModuleType:
    """`modules`: of the commands whose module has another name."""
    return importlib.import_module(f"{program}.{modules.get(command, command.replace('-', '_'))}")


def run_command(
    program: str, description: str, commands: Mapping[str, str], modules: Mapping[str, str], arguments: Sequence[str]
) -> int:
    """Parse and run; `commands`: name -> summary. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the command at hand is imported, and nothing heavy before it runs: --help answers at once.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in commands.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command_module(program, modules, name).add_arguments(subparser)
    options = parser.parse_args(arguments)
    return int(command_module(program, modules, options.command).run(options))
