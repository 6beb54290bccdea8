"""metrics.jsonl is always valid, resumed where the checkpoint is; progress suits who looks at it."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from perception.errors import UserError
from perception.run_folder import RunFolder
from perception.stopping import StopRequest
from perception.telemetry import RunTelemetry, SilentTelemetry, keep_steps_until, memory_bytes

ROOT = Path(__file__).parents[2]


def strict(line: str) -> dict[str, Any]:
    """JSON as the standard has it: no NaN."""

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    record: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return record


def begun(folder: Path, step: int = 0) -> RunTelemetry:
    telemetry = RunTelemetry(RunFolder(folder))
    telemetry.begin(step)
    return telemetry


def test_every_line_is_valid_json_whatever_the_values(tmp_path: Path) -> None:
    telemetry = begun(tmp_path)
    telemetry.log(1, {"loss": 0.5, "images": 8, "note": "a\nb"})
    telemetry.log(2, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    telemetry.close()
    assert [strict(line) for line in lines] == [
        {"step": 1, "loss": 0.5, "images": 8, "note": "a\nb"},
        {"step": 2, "loss": "nan", "grad_norm": "inf", "lr": "-inf"},
    ]


def test_resume_drops_lost_steps_and_a_half_written_line_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = begun(tmp_path)
    for step in (10, 20, 30):
        telemetry.log(step, {"loss": float(step)})
    telemetry.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 35, "lo')
    telemetry = begun(tmp_path, 20)
    telemetry.log(30, {"loss": 31.0})
    telemetry.close()
    records = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(10, 10.0), (20, 20.0), (30, 31.0)]
    assert capsys.readouterr().out == "metrics.jsonl: 2 lines past step 20 or half-written dropped\n"
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 10), (20, 20), (30, 31)]


def test_resume_from_the_beginning_drops_all(tmp_path: Path) -> None:
    telemetry = begun(tmp_path)
    telemetry.log(1, {"loss": 1.0})
    telemetry.close()
    telemetry = begun(tmp_path, 0)
    telemetry.log(1, {"loss": 2.0})
    telemetry.close()
    assert [strict(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2.0]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [2.0]


def test_keep_steps_counts_what_it_drops(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_steps_until(path, 5) == 0 and not path.exists()
    path.write_bytes(b'{"step": 1}\n{"step": 6}\n[1]\n\xff\xfe\n{"step": 5}\n{"ste')
    assert keep_steps_until(path, 5) == 4  # A later step, a list, no text, half a line.
    assert path.read_text() == '{"step": 1}\n{"step": 5}\n'


# TensorBoard's own thread reports the full disk too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_closing_does_not_hide_it(small_disk: Path) -> None:
    telemetry = begun(small_disk)
    telemetry.log(1, {"loss": 1.0})
    (small_disk / "filler").write_bytes(b"")
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        telemetry.log(2, {"loss": 1.0, "note": "x" * 5000})  # Stays in the buffer.
    telemetry.close()
    (small_disk / "filler").unlink()
    telemetry = begun(small_disk, 1)
    telemetry.log(2, {"loss": 2.0})
    telemetry.close()
    assert [strict(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_log_needs_begin_and_close_does_not(tmp_path: Path) -> None:
    telemetry = RunTelemetry(RunFolder(tmp_path))
    with pytest.raises(RuntimeError, match="log before begin"):
        telemetry.log(1, {})
    telemetry.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written"):
        begun(tmp_path / "none")


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = RunTelemetry(RunFolder(tmp_path))
    for samples in (10, 20, 30, 100):
        telemetry.progress(samples, 100, 5.0, 1.25)
    telemetry.say("done")
    out, err = capsys.readouterr()
    first, last, said = out.splitlines()
    assert first == " 10.0%  10/100 images  5.0 images/s  loss 1.2500  0:18 left"
    assert last.startswith("100.0%  100/100 images") and last.endswith("0:00 left") and said == "done"
    assert err == "" and "\r" not in out and "\x1b" not in out


def test_unknown_speed_and_long_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunTelemetry(RunFolder(tmp_path)).progress(1, 100_001, 0.0, math.nan)
    RunTelemetry(RunFolder(tmp_path)).progress(1, 100_001, 10.0, 0.1)
    unknown, long = capsys.readouterr().out.splitlines()
    assert unknown.endswith("loss nan  ? left") and long.endswith("2:46:40 left")


_ON_TERMINAL = """
import sys
from pathlib import Path
from perception.run_folder import RunFolder
from perception.telemetry import RunTelemetry
telemetry = RunTelemetry(RunFolder(Path(sys.argv[1])))
for samples in (25, 50):
    telemetry.progress(samples, 100, 5.0, 1.0)
telemetry.say("a line")
telemetry.progress(100, 100, 5.0, 1.0)
telemetry.close()
"""


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", _ON_TERMINAL, str(tmp_path)], stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(controller, 4096):
            shown += block
    except OSError:
        pass  # Linux: the other end is closed.
    finally:
        os.close(controller)
    assert process.wait(30) == 0, shown.decode()
    pieces = shown.decode().replace("\r\n", "\n").split("\r")
    assert [piece[:26] for piece in pieces[1:]] == [
        f"[{'#' * 6}{'.' * 18}]",
        f"[{'#' * 12}{'.' * 12}]",
        f"[{'#' * 24}]",
    ]
    assert pieces[2].endswith("\x1b[K\na line\n") and pieces[3].endswith("\n")


def test_silence_of_the_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = SilentTelemetry()
    telemetry.begin(0)
    telemetry.say("x")
    telemetry.log(1, {"loss": 1.0})
    telemetry.progress(1, 2, 3.0, 4.0)
    telemetry.close()
    assert capsys.readouterr() == ("", "")


def test_memory_is_that_of_this_process() -> None:
    assert 10e6 < memory_bytes() < 100e9


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGINT"])
def test_a_signal_asks_and_a_second_interrupt_ends(name: str) -> None:
    code = (
        "import os, signal\n"
        "from perception.stopping import StopRequest\n"
        "stop = StopRequest()\n"
        "stop.listen()\n"
        f"os.kill(os.getpid(), signal.{name})\n"
        "print(stop.requested, stop.cause, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: pass\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.stdout == f"True {name} received\ninterrupted\n" and done.stderr == ""


def test_nothing_is_asked_at_first() -> None:
    stop = StopRequest()
    assert not stop.requested and stop.cause == ""
