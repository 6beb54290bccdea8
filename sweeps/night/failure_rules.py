"""What words in a log tell of a failure and what is done about it: the table that `failures` goes by."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perception.distributed import stall_watch
from perception.errors import UserError, nearest
from sweeps.record import Failure

Action = Literal["resume", "retry", "retry_elsewhere", "give_up"]
"""resume: the same job again from its last checkpoint, which counts as no attempt. retry: the same, but it counts.
retry_elsewhere: so too, on other nodes than the one that failed. give_up: it would fail again."""

WITHOUT_BOUND = 1_000_000


@dataclass(frozen=True)
class FailureRule:
    failure: Failure
    action: Action
    max_retries: int
    """After so many attempts of one job that failed in this way it is given up."""
    patterns: tuple[str, ...] = ()
    """A line in which one is found (re.search, of any case) shows the failure."""


RULES: tuple[FailureRule, ...] = (
    # Hardware first: what follows on it looks like many other things.
    FailureRule(
        "hardware",
        "retry_elsewhere",
        3,
        (
            r"uncorrectable .{0,20}ECC|\bECC error|double.bit",
            r"\bXid\b.{0,40}\d|fallen off the bus|GPU is lost|NVML.{0,30}Unknown Error",
            r"CUDA error: (unspecified launch failure|hardware|an? illegal instruction|unknown error)",
            r"NVLink.{0,40}error|ERR!|ibv_\w+.{0,40}(failed|error)",
            r"no CUDA-capable device|driver version is insufficient|CUDA unknown error",
            r"Input/output error|Remote I/O error|EDAC .*error|Machine Check",
        ),
    ),
    # The scheduler's and srun's own words.
    FailureRule(
        "node",
        "retry_elsewhere",
        5,
        (
            r"DUE TO NODE FAILURE|srun: error: Node failure|node_fail|launch failed",
            r"Unable to confirm allocation|Task launch for .* failed|slurmd.{0,40}(not respond|unreachable)",
        ),
    ),
    FailureRule("preempted", "resume", WITHOUT_BOUND, (r"DUE TO PREEMPTION",)),
    FailureRule("time_limit", "give_up", 0, (r"DUE TO TIME LIMIT",)),
    # Memory: of the GPU the same job needs as much again; of a host its neighbours may have had it.
    FailureRule(
        "out_of_memory",
        "give_up",
        0,
        (r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError", r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED"),
    ),
    FailureRule(
        "out_of_memory",
        "retry_elsewhere",
        1,
        (
            r"oom[-_ ]kill|Out Of Memory|OUT_OF_MEMORY|std::bad_alloc|\bMemoryError\b",
            r"Cannot allocate memory|can't allocate memory|where memory runs out",
            r"insufficient shared memory|Bus error.{0,60}shm",
        ),
    ),
    FailureRule(
        "not_finite",
        "give_up",
        0,
        (r"steps with inf or NaN|\bnot finite\b|\bnon-?finite\b|(found|loss is|contains?) (inf|nan)\b",),
    ),
    # Data: a mount may be missing on one node only.
    FailureRule("data", "retry_elsewhere", 2, (r"Stale file handle|Transport endpoint is not connected",)),
    FailureRule(
        "data",
        "give_up",
        0,
        (
            r"image file is empty|image .{0,60}(cannot be read|is cut off|is truncated)",
            r"cannot identify image|premature end of (file|data|JPEG)",
        ),
    ),
    FailureRule(
        "data",
        "retry_elsewhere",
        1,
        (
            r"(shard|checksum|crc32?|sha256).{0,60}(mismatch|differs|wrong|does not match)",
            r"PytorchStreamReader failed",
            r"\bFileNotFoundError\b|No such file or directory",
        ),
    ),
    FailureRule("node", "retry_elsewhere", 1, (r"No space left on device|Disk quota exceeded",)),
    # Collectives last: they fail wherever another rank has failed.
    FailureRule(
        "collective_timeout",
        "retry_elsewhere",
        2,
        (r"NCCL error|nccl(System|Internal|Remote|Unhandled\w*)Error|NET/IB.{0,60}(error|failed)",),
    ),
    FailureRule(
        "collective_timeout",
        "retry",
        2,
        (
            r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out|NCCL timeout",
            r"HorovodInternalError|Horovod has been shut down|Missing ranks|Stalled ranks",
            re.escape(stall_watch.WAITED_TOO_LONG),
            r"gloo.{0,80}(timed? ?out|closed by peer|reset by peer)|Timed out (after|waiting)",
            r"Dist(Network|Backend|Store)Error|Connection (closed|reset) by peer",
            r"did not come within|its process has ended",
        ),
    ),
)
"""In order: the first rule that matches decides. A plan's own rules go before them."""

BY_WORD: dict[str, FailureRule] = {
    "PREEMPTED": FailureRule("preempted", "resume", WITHOUT_BOUND),
    "NODE_FAIL": FailureRule("node", "retry_elsewhere", 5),
    "BOOT_FAIL": FailureRule("node", "retry_elsewhere", 5),
    "launch failed requeued held": FailureRule("node", "retry_elsewhere", 5),
    "OUT_OF_MEMORY": FailureRule("out_of_memory", "retry_elsewhere", 1),
    "TIMEOUT": FailureRule("time_limit", "give_up", 0),
    "DEADLINE": FailureRule("time_limit", "give_up", 0),
    # By somebody else than the controller, which asks no reason of what it cancelled itself.
    "CANCELLED": FailureRule("no_result", "give_up", 0),
}
"""By the launcher's own words, where they name a cause."""
PREEMPTED = BY_WORD["PREEMPTED"]
USER_ERROR = FailureRule("user_error", "give_up", 0)
NOT_FINITE = FailureRule("not_finite", "give_up", 0)
TIME_LIMIT_WITH_CHECKPOINT = FailureRule("time_limit", "retry", 3)
CODE = FailureRule("code", "retry", 1)
NO_RESULT = FailureRule("no_result", "retry", 1)
LOST = FailureRule("no_result", "retry", 2)


def rule_from_plan(row: Mapping[str, Any], where: str) -> FailureRule:
    """Of a table of a plan: pattern, failure, action, and max_retries if it is not 2."""
    allowed = {"pattern", "failure", "action", "max_retries"}
    for name in row:
        if name not in allowed:
            raise UserError(f'{where}: field "{name}" is unknown{nearest(name, allowed)}')
    for name in ("pattern", "failure", "action"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise UserError(f"{where}: field {name} is missing; a rule has pattern, failure and action")
    for name, choices in (("failure", typing.get_args(Failure)), ("action", typing.get_args(Action))):
        if row[name] not in choices:
            raise UserError(f'{where}: {name} = "{row[name]}" is unknown{nearest(row[name], choices)}')
    retries = row.get("max_retries", 2)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise UserError(f"{where}: max_retries = {retries!r} must be a whole number from 0")
    try:
        re.compile(row["pattern"])
    except re.error as error:
        raise UserError(f'{where}: pattern = "{row["pattern"]}" is no regular expression ({error})') from None
    return FailureRule(row["failure"], row["action"], retries, (row["pattern"],))
