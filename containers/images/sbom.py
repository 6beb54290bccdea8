"""Add the system's packages to a CycloneDX list of Python packages: sbom.py PYTHON.json OUT.json. Run in a build."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

FORMAT = "${db:Status-Status}\t${binary:Package}\t${Version}\t${Architecture}\t${Homepage}\n"


def main() -> None:
    listed = json.loads(Path(sys.argv[1]).read_text())
    found = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={FORMAT}"], capture_output=True, text=True, check=True
    )
    system = _system()
    components = [_component(line.split("\t"), system) for line in found.stdout.splitlines() if line]
    listed["components"] = [*listed.get("components", []), *(c for c in components if c)]
    Path(sys.argv[2]).write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    print(f"{len(listed['components'])} components, {len([c for c in components if c])} of the system")


def _component(row: list[str], system: str) -> dict[str, Any] | None:
    status, name, version, architecture, homepage = row
    if status != "installed":
        return None
    plain = name.split(":")[0]
    quoted = urllib.parse.quote(version, safe="")
    url = f"pkg:deb/{system}/{plain}@{quoted}?arch={architecture}"
    component: dict[str, Any] = {"type": "library", "bom-ref": url, "name": plain, "version": version, "purl": url}
    if homepage:
        component["externalReferences"] = [{"type": "website", "url": homepage}]
    return component


def _system() -> str:
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return fields.get("ID", "debian").strip('"')


if __name__ == "__main__":
    main()
