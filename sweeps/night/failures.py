"""Why a job ended without a result, and what to do about it: from its logs, its exit code and the launcher's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.distributed.failure import EXIT_PREEMPTED, EXIT_USER_ERROR, fault_file, log_file, traceback_file
from perception.run_folder import RunFolder
from sweeps.job import START_MARK, TIME_LIMIT_MARK, JobStatus
from sweeps.night.failure_rules import (
    BY_WORD,
    CODE,
    LOST,
    NO_RESULT,
    NOT_FINITE,
    PREEMPTED,
    RULES,
    TIME_LIMIT_WITH_CHECKPOINT,
    USER_ERROR,
    Action,
    FailureRule,
)
from sweeps.record import Failure

TAIL_BYTES = 128 * 1024
"""Of a log that are read: it may be of gigabytes, and what ended the run stands last."""
MATCHED_LINES = 300
"""Of them are searched for a cause: a message of long ago was survived."""
SHOWN_CHARACTERS = 4000
SIGNATURE_CHARACTERS = 200


@dataclass(frozen=True)
class FailureReport:
    failure: Failure
    signature: str
    """The line that shows it, with numbers, paths and addresses normalised: equal failures have equal ones."""
    log_tail: str
    """Of the first rank that failed."""
    action: Action
    node: str = ""
    """On which it failed, where that is known; what retry_elsewhere excludes."""
    max_retries: int = 0
    line: str = ""
    """The line as it stands in the log: what a person is shown."""
    rank: int | None = None
    """That failed first, where the log tells."""


def classify(
    run_folder: Path, status: JobStatus, num_earlier: int = 0, rules: Sequence[FailureRule] = ()
) -> FailureReport:
    """Why the job ended so. `num_earlier`: attempts of it that failed in the same way; `rules`: of the plan.

    For jobs that have ended and whose result.json tells of no success.
    """
    ranks = RunFolder(run_folder).failures
    logs = _logs_of_first_failing_rank(run_folder, ranks)
    rule, line = _decide(run_folder, status, logs.lines, (*rules, *RULES))
    action = rule.action if rule.action == "resume" or num_earlier < rule.max_retries else "give_up"
    shown = "\n".join(logs.lines)[-SHOWN_CHARACTERS:]
    signature = normalise(line) if line else _without_words(rule, status)
    node = _node(status, ranks, logs)
    return FailureReport(rule.failure, signature, shown, action, node, rule.max_retries, line, logs.rank)


def _decide(
    run_folder: Path, status: JobStatus, lines: Sequence[str], rules: Sequence[FailureRule]
) -> tuple[FailureRule, str]:
    """The rule, and the line that it is seen in (empty where no line is)."""
    result = _result(run_folder)
    cause = str(result.get("cause") or "")
    if result.get("status") == "diverged":
        return NOT_FINITE, cause
    if status.reason == "CANCELLED":
        return BY_WORD["CANCELLED"], ""
    if result.get("status") == "preempted" or status.exit_code == EXIT_PREEMPTED:
        # It wrote a checkpoint and can go on. Whose wish it was: within a preemption's grace Slurm, too, says TIMEOUT.
        by_limit = status.reason == "TIMEOUT" or any(line.startswith(TIME_LIMIT_MARK) for line in lines)
        return (TIME_LIMIT_WITH_CHECKPOINT if by_limit else PREEMPTED), cause
    if status.exit_code == EXIT_USER_ERROR:
        errors = [line for line in lines if line.startswith("error: ")]
        line = errors[-1] if errors else _last(lines)
        # A disk that fails is reported as a file that cannot be read, and is no mistake of anybody.
        hardware = [rule for rule in rules if rule.failure == "hardware"]
        return _first_match(hardware, [line]) or (USER_ERROR, line)
    if status.reason in BY_WORD:
        return BY_WORD[status.reason], ""
    # What the run itself says of its end, then its log from the end: what stands last is nearest to the cause.
    said = [*([cause] if cause else []), *reversed(lines[-MATCHED_LINES:])]
    found = _first_match(rules, said)
    if found is not None:
        return found
    if status.state == "lost":
        return LOST, ""
    error = _last_error(lines)
    if error or cause or (status.exit_code or 0) > 128:
        return CODE, error or cause or f"exit code {status.exit_code}"
    return NO_RESULT, ""


def _first_match(rules: Sequence[FailureRule], lines: Sequence[str]) -> tuple[FailureRule, str] | None:
    for rule in rules:
        patterns = [re.compile(pattern, re.IGNORECASE) for pattern in rule.patterns]
        for line in lines:
            if any(pattern.search(line) for pattern in patterns):
                return rule, line.strip()
    return None


@dataclass(frozen=True)
class _Logs:
    lines: tuple[str, ...]
    rank: int | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    """Node and rank of what srun says ended badly."""


def _logs_of_first_failing_rank(run_folder: Path, ranks: Path) -> _Logs:
    """job.log, after it the words of the rank that failed first and not only because another one had."""
    job_lines = _since_latest_start(tail_lines(run_folder / "job.log"))
    failing = []
    for number in sorted({_rank_of(path) for path in ranks.glob("rank[0-9]*.*")} - {None}, key=lambda rank: rank or 0):
        assert number is not None
        words = [path for path in (traceback_file(ranks, number), fault_file(ranks, number)) if _size(path)]
        if words:
            lines = [line for path in words for line in tail_lines(path)]
            failing.append((_is_consequence(lines), words[0].stat().st_mtime, number, lines))
    tasks = tuple(_bad_tasks(job_lines))
    if not failing:
        return _Logs(tuple(job_lines), tasks[0][1] if tasks else None, tasks)
    _, _, rank, words_of_rank = min(failing, key=lambda each: each[:3])
    own_log = tail_lines(log_file(ranks, rank)) if rank else []
    return _Logs((*job_lines, *own_log, *words_of_rank), rank, tasks)


def _is_consequence(lines: Sequence[str]) -> bool:
    """A rank whose neighbour died meets an error of the collectives: it is not the cause."""
    collectives = [rule for rule in RULES if rule.failure == "collective_timeout"]
    return _first_match(collectives, lines[-3:]) is not None


def _since_latest_start(lines: list[str]) -> list[str]:
    """job.log is appended to by every start; what ended an earlier one is past."""
    marks = [index for index, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[marks[-1] + 1 :] if marks else lines


def _bad_tasks(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Of lines such as "srun: error: dgx07: tasks 8-15: Killed"."""
    for line in lines:
        match = re.search(r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (?!Exited with exit code 75)", line)
        if match:
            yield match[1], int(match[2])


def _node(status: JobStatus, ranks: Path, logs: _Logs) -> str:
    if len(status.nodes) == 1:
        return status.nodes[0]
    if logs.tasks and (logs.rank is None or logs.rank == logs.tasks[0][1]):
        return logs.tasks[0][0]
    if logs.rank is None or not status.nodes:
        return ""
    # Slurm deals ranks out in blocks, as many to each node.
    num_ranks = sum(1 for _ in ranks.glob("rank[0-9]*.pid"))
    each = max(1, num_ranks // len(status.nodes))
    return status.nodes[min(logs.rank // each, len(status.nodes) - 1)]


def _last_error(lines: Sequence[str]) -> str:
    """The last line of the last traceback, or of a fatal signal's."""
    for line in reversed(lines):
        if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b|Fatal Python error", line):
            return line.strip()
    return next((line.strip() for line in reversed(lines) if re.search(r"died of signal|Segmentation", line)), "")


def _without_words(rule: FailureRule, status: JobStatus) -> str:
    return f"{rule.failure}: {status.reason or 'no result.json'}"


def normalise(line: str) -> str:
    """What is left of a line when all that differs between equal failures is taken out.

    >>> normalise("[rank3]: RuntimeError: /data/a7/b.png at 0x7f3a: got 12 of 40 bytes from 10.0.0.7:4711")
    'RuntimeError: <path> at <address>: got # of # bytes from <address>'
    """
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).strip()
    text = re.sub(r"^(\[?rank ?\d+\]?:?|\[\d+\]<\w+>:?|\d+:)\s*", "", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?\b", "<time>", text)
    text = re.sub(r"\b0x[0-9a-fA-F]+\b|\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", "<address>", text)
    text = re.sub(r"(?<![\w<])(~|\.{0,2})(/[\w.@%+~-]+)+/?", "<path>", text)
    text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "<hex>", text)
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
    return re.sub(r"\s+", " ", text)[:SIGNATURE_CHARACTERS]


def tail_lines(path: Path) -> list[str]:
    """Lines of the last TAIL_BYTES of a file; none where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = re.split(r"[\r\n]+", text)
    # The first may be half a line.
    return [line for line in (lines[1:] if size > TAIL_BYTES else lines) if line.strip()]


def _result(run_folder: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(RunFolder(run_folder).result.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _rank_of(path: Path) -> int | None:
    match = re.fullmatch(r"rank(\d+)\.\w+", path.name)
    return int(match[1]) if match else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last(lines: Sequence[str]) -> str:
    return lines[-1].strip() if lines else ""
