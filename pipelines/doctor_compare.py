"""`doctor --compare`: reports of several nodes side by side: what is broken on one, and what is not the same on all."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from perception.errors import UserError
from pipelines.finding import Finding

COMPARED = re.compile(r"(python|packages|torch|engine \w+|processor|gpus|gpu driver|gpu models|gpu \d+|nvlink)")
"""Names of findings that should have one value on all nodes of a job."""


def compare_nodes(reports: Sequence[Path]) -> list[Finding]:
    """A finding for each difference and each node's own faults; one that says so where there is none.

    Raises UserError for a file that is no report of `doctor --json`.
    """
    nodes = {path.stem: _read(path) for path in reports}
    if len(nodes) < 2:
        raise UserError("--compare: give the reports of two nodes or more, in files of different names")
    findings = []
    names = dict.fromkeys(name for of_node in nodes.values() for name in of_node if COMPARED.fullmatch(name))
    for name in names:
        by_value: dict[str, list[str]] = {}
        for node, of_node in nodes.items():
            by_value.setdefault(of_node[name].value if name in of_node else "not there", []).append(node)
        if len(by_value) > 1:
            value = "; ".join(f"{value} ({', '.join(where)})" for value, where in by_value.items())
            findings.append(Finding(name, value, "warning", "make the nodes equal, or keep them out of one job"))
    for node, of_node in nodes.items():
        for finding in of_node.values():
            if finding.state in ("warning", "broken"):
                findings.append(Finding(f"{node}: {finding.name}", finding.value, finding.state, finding.cure))
    return findings or [Finding("nodes", f"{len(nodes)} alike, nothing to mend")]


def _read(path: Path) -> dict[str, Finding]:
    try:
        findings = [Finding(**raw) for raw in json.loads(path.read_text(encoding="utf-8"))["findings"]]
    except OSError as error:
        raise UserError(f"--compare {path}: no report of `doctor --json` ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--compare {path}: no report of `doctor --json` ({type(error).__name__}: {error})") from None
    return {finding.name: finding for finding in findings}
