"""Where keys are kept: docker's own config file or its credential helper, read and written as docker does."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.errors import ContainerError
from containers.tokens import Credentials

NGC_REGISTRY = "nvcr.io"
NGC_USER = "$oauthtoken"
"""Literally: on NGC the key alone tells who it is."""
NGC_KEY_VARIABLE = "NGC_API_KEY"
IDENTITY_TOKEN_USER = "<token>"
"""What credential helpers give as the user where the secret is an identity token."""
_HELPER_SECONDS = 30.0
_NOT_FOUND = "credentials not found"


class BadDockerConfig(ContainerError):
    """docker's config file cannot be read; an engine would silently be anonymous then."""


class HelperMissing(ContainerError):
    """The config names a credential helper that is not installed or does not work."""


@dataclass(frozen=True)
class DockerConfig:
    path: Path
    data: Mapping[str, Any]

    def helper(self, registry: str) -> str | None:
        """The name of the credential helper for a registry."""
        helpers = self.data.get("credHelpers", {})
        name = helpers.get(registry) if isinstance(helpers, dict) else None
        name = name or self.data.get("credsStore") or None
        if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", str(name)):
            raise BadDockerConfig(f"{self.path}: credential helper {name!r}: not a name")
        return str(name) if name is not None else None


def config_path(environment: Mapping[str, str]) -> Path:
    folder = environment.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


def load_docker_config(path: Path) -> DockerConfig:
    """An absent file is an empty one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return DockerConfig(path, {})
    except (OSError, UnicodeDecodeError) as error:
        raise BadDockerConfig(f"{path}: cannot be read ({error}): mend or remove it") from None
    try:
        data = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        # Not the text around it: there may be a key in it.
        where = f"line {error.lineno}, column {error.colno}"
        raise BadDockerConfig(f"{path}: not JSON ({error.msg} at {where}): mend or remove it") from None
    if not isinstance(data, dict) or not isinstance(data.get("auths", {}), dict):
        raise BadDockerConfig(f"{path}: must be a JSON object whose auths is one too: mend or remove it")
    return DockerConfig(path, data)


def find_credentials(registry: str, environment: Mapping[str, str], warn: Callable[[str], None]) -> Credentials | None:
    """For a registry: NGC's key in the environment, docker's credential helper, docker's config file, or none.

    A helper that is missing or fails is no reason not to pull what is public: `warn` is told, and access is anonymous.
    The key in the environment is for NGC and is sent nowhere else.
    """
    key = environment.get(NGC_KEY_VARIABLE, "")
    if registry == NGC_REGISTRY and key:
        return Credentials(NGC_USER, clean_key(key, f"the environment variable {NGC_KEY_VARIABLE}"))
    config = load_docker_config(config_path(environment))
    helper = config.helper(registry)
    if helper is not None:
        try:
            found = _ask_helper(helper, registry, environment)
        except HelperMissing as error:
            warn(f"{error}; {registry} is used without its credentials")
        else:
            if found is not None:
                return found
    return _from_auths(config, registry)


def store_credentials(registry: str, credentials: Credentials, environment: Mapping[str, str]) -> str:
    """Keep a checked key where docker finds it, and return where that is."""
    config = load_docker_config(config_path(environment))
    helper = config.helper(registry)
    if helper is not None:
        entry = {"ServerURL": registry, "Username": credentials.user, "Secret": credentials.secret}
        _run_helper(helper, "store", json.dumps(entry), environment)
        return f"the credential helper {helper}"
    pair = f"{credentials.user}:{credentials.secret}".encode()
    auths = {**config.data.get("auths", {}), registry: {"auth": base64.b64encode(pair).decode("ascii")}}
    _write_private(config.path, json.dumps({**config.data, "auths": auths}, indent="\t") + "\n")
    return str(config.path)


def read_key_file(path: Path) -> str:
    """A key in a file that only its owner may read."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ContainerError(
            f"{path}: the key cannot be read ({reason}): name a file that holds only the key"
        ) from None
    if mode & 0o077:
        raise ContainerError(f"{path}: others may read this key (mode {mode & 0o777:03o}): chmod 600 {path}")
    return clean_key(text, str(path))


def clean_key(text: str, source: str) -> str:
    """The key without the line end that editors and `echo` add; an error never shows any of it."""
    key = text.strip()
    if not key:
        raise ContainerError(f"{source}: holds no key: make one at the registry and put it there")
    if not re.fullmatch(r"[!-~]+", key):
        raise ContainerError(
            f"{source}: a key is one word of plain letters, digits and signs; this holds something else"
        )
    return key


def _ask_helper(helper: str, registry: str, environment: Mapping[str, str]) -> Credentials | None:
    output = _run_helper(helper, "get", registry, environment)
    if output is None:
        return None
    try:
        data = json.loads(output)
        user, secret = str(data["Username"]), str(data["Secret"])
    except (ValueError, KeyError, TypeError):
        raise HelperMissing(f"docker-credential-{helper}: answers with something other than credentials") from None
    if not secret:
        return None
    return Credentials(user, secret, is_identity_token=user == IDENTITY_TOKEN_USER)


def _run_helper(helper: str, action: str, text: str, environment: Mapping[str, str]) -> str | None:
    """Standard output of a helper, whose standard input alone sees secrets; None where it has no such credentials."""
    program = f"docker-credential-{helper}"
    cure = f"install it, or take {helper} out of credsStore and credHelpers in {config_path(environment)}"
    try:
        ended = subprocess.run(
            [program, action],
            input=text,
            capture_output=True,
            text=True,
            env=dict(environment),
            timeout=_HELPER_SECONDS,
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        raise HelperMissing(f"{program}: is not installed: {cure}") from None
    except subprocess.TimeoutExpired:
        raise HelperMissing(f"{program}: did not answer in {_HELPER_SECONDS:.0f} s: {cure}") from None
    if ended.returncode == 0:
        return ended.stdout
    if action == "get" and _NOT_FOUND in ended.stdout + ended.stderr:
        return None
    # What it printed may hold the secret.
    raise HelperMissing(f"{program} {action}: failed with code {ended.returncode}: {cure}")


def _from_auths(config: DockerConfig, registry: str) -> Credentials | None:
    auths = config.data.get("auths", {})
    keys = (registry, f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/")
    entry = next((auths[key] for key in keys if isinstance(auths.get(key), dict)), None)
    if entry is None:
        return None
    if entry.get("identitytoken"):
        return Credentials(IDENTITY_TOKEN_USER, str(entry["identitytoken"]), is_identity_token=True)
    if not entry.get("auth"):
        user, password = str(entry.get("username", "")), str(entry.get("password", ""))
        return Credentials(user, password) if user and password else None
    try:
        user, colon, secret = base64.b64decode(str(entry["auth"]), validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise BadDockerConfig(
            f"{config.path}: auths.{registry}.auth: not the base64 of user:key: "
            f"python -m containers login {registry} writes it anew"
        )
    # docker pads with NUL what an old helper wrote.
    return Credentials(user, secret.strip("\0"))


def _write_private(path: Path, text: str) -> None:
    """Replace a file, or what a link to it names, by one that only its owner may read."""
    target = path.resolve()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp makes it with mode 600 from the first byte on.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".config-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ContainerError(
            f"{path}: cannot be written ({error.strerror}): set DOCKER_CONFIG to a folder of yours"
        ) from None
