"""Give a registry's key, in NGC's manner: checked with the registry, then kept where docker keeps keys.

    NGC_API_KEY=… python -m containers login nvcr.io
    python -m containers login nvcr.io --key-file ~/ngc.key

A key is never an argument: every user of a machine can read those.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from containers.credentials import (
    NGC_KEY_VARIABLE,
    NGC_USER,
    HelperMissing,
    clean_key,
    read_key_file,
    store_credentials,
)
from containers.errors import ContainerError
from containers.retry import RetryPolicy
from containers.tokens import Credentials


def login(
    registry: str, credentials: Credentials, environment: Mapping[str, str], plain_http: bool, policy: RetryPolicy
) -> str:
    """Check the key with the registry and keep it; returns where. A key that was kept before proves nothing here."""
    from containers.registry import Endpoint, Registry, is_loopback

    endpoint = Endpoint(registry, "", plain_http or is_loopback(registry))
    Registry(endpoint, credentials, policy, lambda line: print(line, file=sys.stderr)).check_login()
    try:
        return store_credentials(registry, credentials, environment)
    except HelperMissing as error:
        raise ContainerError(f"the key for {registry} is right but was not kept: {error}") from None


def read_key(key_file: Path | None, from_stdin: bool, environment: Mapping[str, str], stdin: TextIO) -> str:
    """From exactly one source: what was named, else the environment."""
    if key_file is not None:
        return read_key_file(key_file)
    if from_stdin:
        return clean_key(stdin.readline(), "standard input")
    key = environment.get(NGC_KEY_VARIABLE, "")
    if not key:
        raise ContainerError(
            f"no key: set {NGC_KEY_VARIABLE}, or give --key-file FILE (mode 600), or --key-stdin; never as an argument"
        )
    return clean_key(key, f"the environment variable {NGC_KEY_VARIABLE}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("registry", metavar="HOST[:PORT]", help="e.g. nvcr.io")
    parser.add_argument("--user", default=NGC_USER, help="default: %(default)s, literally, as NGC wants it")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--key-file", type=Path, help="holds only the key; nobody else may read it")
    source.add_argument("--key-stdin", action="store_true", help="read the key from standard input")
    parser.add_argument("--plain-http", action="store_true", help="the registry speaks no TLS, as the loopback's")


def run(options: argparse.Namespace) -> int:
    registry = options.registry
    if "/" in registry or not registry.strip():
        raise ContainerError(f'registry "{registry}": must be HOST[:PORT], without https:// and without a path')
    if ":" in options.user or not options.user:
        raise ContainerError(f'--user "{options.user}": must not be empty or hold a colon')
    key = read_key(options.key_file, options.key_stdin, os.environ, sys.stdin)
    # Somebody waits for the answer: a mistyped host is told soon.
    policy = RetryPolicy(attempts=3)
    where = login(registry, Credentials(options.user, key), os.environ, options.plain_http, policy)
    print(f"{registry}: logged in as {options.user}; kept by {where}")
    return 0
