"""Login: where keys come from, where they go, and that they show nowhere else."""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from containers import transfer_errors
from containers.credentials import (
    BadDockerConfig,
    clean_key,
    find_credentials,
    load_docker_config,
    read_key_file,
    store_credentials,
)
from containers.errors import ContainerError
from containers.login import login, read_key
from containers.manifests import Platform
from containers.pull import pull
from containers.pull_engine import DockerImages
from containers.retry import RetryPolicy
from containers.tokens import Credentials
from tests.containers.conftest import needs
from tests.containers.daemons import REGISTRY_PROGRAMS, docker_registry
from tests.containers.engine_double import EngineDouble
from tests.containers.pulling import FAST, Said, settings
from tests.containers.registry_double import registry_double
from tests.containers.sites import TAG, Upload, example_image, upload_image
from tests.containers.token_issuer import TokenIssuer, token_issuer

KEY = "nvapi-3f9Qz-SECRET-0147"
USER = "$oauthtoken"
GOOD = Credentials(USER, KEY)
AMD64 = Platform("linux", "amd64")


def environment_of(folder: Path, **variables: str) -> dict[str, str]:
    return {"DOCKER_CONFIG": str(folder / "docker"), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", **variables}


def config_of(folder: Path, text: str) -> Path:
    path = folder / "docker" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def helper_of(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / f"docker-credential-{name}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def find(registry: str, environment: Mapping[str, str]) -> tuple[Credentials | None, list[str]]:
    warned: list[str] = []
    return find_credentials(registry, environment, warned.append), warned


def test_the_environments_key_is_for_ngc_alone(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, NGC_API_KEY=f"{KEY}\n")
    assert find("nvcr.io", environment) == (GOOD, [])
    assert find("evil.example", environment) == (None, [])


def test_what_is_stored_is_found_as_docker_finds_it(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    path = config_of(tmp_path, '{"auths": {"other": {"auth": "eDp5"}}, "detachKeys": "ctrl-x"}')
    where = store_credentials("nvcr.io", GOOD, environment)
    assert where == str(path)
    data = json.loads(path.read_text())
    assert data["detachKeys"] == "ctrl-x" and data["auths"]["other"] == {"auth": "eDp5"}
    assert base64.b64decode(data["auths"]["nvcr.io"]["auth"]).decode() == f"{USER}:{KEY}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find("nvcr.io", environment) == (GOOD, [])
    assert not list(path.parent.glob(".config-*"))


def test_a_config_file_behind_a_link_stays_one(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").symlink_to(real)
    store_credentials("nvcr.io", GOOD, environment_of(tmp_path))
    assert (tmp_path / "docker/config.json").is_symlink()
    assert "nvcr.io" in json.loads(real.read_text())["auths"]


@pytest.mark.parametrize("text", ['{"auths": {"nvcr.io": {"auth": "SECRET"}', "[]", '{"auths": []}'])
def test_a_malformed_config_is_named_rather_than_anonymous(tmp_path: Path, text: str) -> None:
    path = config_of(tmp_path, text)
    with pytest.raises(BadDockerConfig, match=str(path)) as caught:
        find("nvcr.io", environment_of(tmp_path))
    assert "SECRET" not in str(caught.value)


def test_an_undecodable_entry_is_named(tmp_path: Path) -> None:
    config_of(tmp_path, '{"auths": {"nvcr.io": {"auth": "!!"}}}')
    with pytest.raises(BadDockerConfig, match=r"auths\.nvcr\.io\.auth"):
        find("nvcr.io", environment_of(tmp_path))


def test_an_identity_token_is_known_as_one(tmp_path: Path) -> None:
    config_of(tmp_path, json.dumps({"auths": {"https://nvcr.io": {"identitytoken": KEY}}}))
    found, _ = find("nvcr.io", environment_of(tmp_path))
    assert found is not None and found.is_identity_token


def test_a_helper_is_asked_and_told(tmp_path: Path) -> None:
    config_of(tmp_path, '{"credsStore": "vault"}')
    vault = tmp_path / "vault.json"
    helper_of(tmp_path, "vault", f"case $1 in store) cat > {vault};; get) read host; cat {vault};; esac")
    environment = environment_of(tmp_path)
    assert store_credentials("nvcr.io", GOOD, environment) == "the credential helper vault"
    assert json.loads(vault.read_text()) == {"ServerURL": "nvcr.io", "Username": USER, "Secret": KEY}
    assert find("nvcr.io", environment) == (GOOD, [])
    assert KEY not in (tmp_path / "docker/config.json").read_text()


@pytest.mark.parametrize(
    "script", [None, f"echo {KEY}; exit 3", "echo not json", "echo '{}'"], ids=["missing", "fails", "text", "empty"]
)
def test_without_a_working_helper_access_is_anonymous_and_warned_of(tmp_path: Path, script: str | None) -> None:
    config_of(tmp_path, '{"credHelpers": {"nvcr.io": "vault"}}')
    if script is not None:
        helper_of(tmp_path, "vault", script)
    found, warned = find("nvcr.io", environment_of(tmp_path))
    assert found is None
    assert len(warned) == 1 and "docker-credential-vault" in warned[0] and KEY not in warned[0]
    assert find("other.io", environment_of(tmp_path)) == (None, [])


def test_a_helper_that_has_none_is_no_trouble(tmp_path: Path) -> None:
    config_of(tmp_path, '{"credsStore": "vault"}')
    helper_of(tmp_path, "vault", "echo credentials not found in native keychain; exit 1")
    assert find("nvcr.io", environment_of(tmp_path)) == (None, [])


def test_a_helpers_name_is_no_path(tmp_path: Path) -> None:
    config_of(tmp_path, '{"credsStore": "../../bin/sh"}')
    with pytest.raises(BadDockerConfig, match="not a name"):
        find("nvcr.io", environment_of(tmp_path))
    assert load_docker_config(tmp_path / "absent").helper("x") is None


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o640)
    with pytest.raises(ContainerError, match="chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    assert read_key_file(path) == KEY
    with pytest.raises(ContainerError, match="cannot be read"):
        read_key_file(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", " \n", f"{KEY} {KEY}", f"key: {KEY}", "schlüssel"])
def test_what_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ContainerError) as caught:
        clean_key(text, "somewhere")
    assert "somewhere" in str(caught.value) and KEY not in str(caught.value)


# With registries that want a key: a double, docker-registry with htpasswd, docker-registry with an issuer of tokens.


@dataclass
class Guarded:
    address: str
    upload: Upload
    issuer: TokenIssuer | None


def basic_header(user: str, key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{key}'.encode()).decode()}"}


@pytest.fixture(
    params=[
        "double-basic",
        "double-token",
        pytest.param("real-basic", marks=pytest.mark.services),
        pytest.param("real-token", marks=pytest.mark.services),
    ]
)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    kind, way = request.param.split("-")
    folder = tmp_path_factory.mktemp("guarded")
    with ExitStack() as stack:
        issuer = stack.enter_context(token_issuer({USER: KEY}, ("roadfuse/public",))) if way == "token" else None
        if kind == "double":
            server = stack.enter_context(registry_double())
            server.issuer = issuer
            server.users = {USER: KEY} if issuer is None else {}
            yield Guarded(server.address, server.add, issuer)
            return
        needs([*REGISTRY_PROGRAMS, "htpasswd"], "docker-registry apache2-utils")
        if issuer is not None:
            variables = issuer.registry_environment(folder)
        else:
            made = subprocess.run(["htpasswd", "-Bni", USER], input=KEY, text=True, capture_output=True, check=True)
            (folder / "htpasswd").write_text(made.stdout)
            variables = {"REGISTRY_AUTH": "htpasswd", "REGISTRY_AUTH_HTPASSWD_REALM": "test"}
            variables["REGISTRY_AUTH_HTPASSWD_PATH"] = str(folder / "htpasswd")
        address = stack.enter_context(docker_registry(variables)).address

        def upload(repository: str, tag: str, image: Any) -> None:
            headers = basic_header(USER, KEY)
            if issuer is not None:
                token, _ = issuer.token(USER, [f"repository:{repository}:pull,push"])
                headers = {"Authorization": f"Bearer {token}"}
            upload_image(address, repository, tag, image, headers)

        yield Guarded(address, upload, issuer)


with_tokens = pytest.mark.parametrize(
    "guarded", ["double-token", pytest.param("real-token", marks=pytest.mark.services)], indirect=True
)


def test_login_checks_the_key_and_then_private_images_are_pulled(guarded: Guarded, tmp_path: Path) -> None:
    image = example_image(1)
    guarded.upload("roadfuse/private", TAG, image)
    reference = f"{guarded.address}/roadfuse/private:{TAG}"
    made = settings(tmp_path)
    with pytest.raises(transfer_errors.AccessDenied, match=f"containers login {guarded.address}"):
        pull(reference, made, EngineDouble(), AMD64, Said())
    login(guarded.address, GOOD, made.environment, False, FAST)
    said = Said()
    # The double of the engine knows no keys: it takes the image from us and cannot ask the registry itself.
    assert pull(reference, made, EngineDouble(), AMD64, said).image_id == image.image_id
    assert "note: the engine could not ask" in said.text
    assert KEY not in said.text


def test_a_wrong_key_is_refused_although_a_right_one_is_kept(guarded: Guarded, tmp_path: Path) -> None:
    made = settings(tmp_path)
    login(guarded.address, GOOD, made.environment, False, FAST)
    with pytest.raises(transfer_errors.AuthenticationFailed, match="make a new key if it expired") as caught:
        login(guarded.address, Credentials(USER, "nvapi-wrong"), made.environment, False, FAST)
    assert "nvapi-wrong" not in str(caught.value)
    assert find(guarded.address, made.environment)[0] == GOOD


def test_a_key_that_was_revoked_is_named_by_pull(guarded: Guarded, tmp_path: Path) -> None:
    made = settings(tmp_path)
    store_credentials(guarded.address, Credentials(USER, "nvapi-revoked"), made.environment)
    with pytest.raises(transfer_errors.AuthenticationFailed, match=r"\$oauthtoken"):
        pull(f"{guarded.address}/roadfuse/private:{TAG}", made, EngineDouble(), AMD64, Said())


@with_tokens
def test_an_expired_token_is_replaced_on_the_way(guarded: Guarded, tmp_path: Path) -> None:
    assert guarded.issuer is not None
    image = example_image(3)
    guarded.upload("roadfuse/private", TAG, image)
    made = settings(tmp_path)
    store_credentials(guarded.address, GOOD, made.environment)
    before = len(guarded.issuer.requests)
    guarded.issuer.num_expired = 1
    reference = f"{guarded.address}/roadfuse/private:{TAG}"
    assert pull(reference, made, EngineDouble(), AMD64, Said()).image_id == image.image_id
    assert len(guarded.issuer.requests) - before >= 2


@with_tokens
def test_a_public_repository_needs_no_key_and_survives_a_missing_helper(guarded: Guarded, tmp_path: Path) -> None:
    assert guarded.issuer is not None
    image = example_image(5)
    guarded.upload("roadfuse/public", TAG, image)
    config_of(tmp_path, '{"credsStore": "absent"}')
    said = Said()
    pulled = pull(f"{guarded.address}/roadfuse/public:{TAG}", settings(tmp_path), EngineDouble(), AMD64, said)
    assert pulled.image_id == image.image_id
    assert "docker-credential-absent: is not installed" in said.text
    assert {with_user for _, with_user in guarded.issuer.requests} == {False}


def test_a_key_that_cannot_be_kept_is_said_to_be_right(guarded: Guarded, tmp_path: Path) -> None:
    config_of(tmp_path, '{"credsStore": "absent"}')
    with pytest.raises(ContainerError, match="is right but was not kept"):
        login(guarded.address, GOOD, environment_of(tmp_path), False, FAST)


class CommandLines:
    """Every argument of every process of this machine, looked at all the time."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._seen: set[bytes] = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self._seen.add(path.read_bytes())
                except OSError:
                    continue
            self._stop.wait(0.01)

    def show(self, text: str) -> bool:
        return any(text.encode() in line for line in self._seen)


def containers(arguments: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "containers", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_keys_are_read_from_one_source(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    nothing = io.StringIO()
    assert read_key(key_file, False, {"NGC_API_KEY": "other"}, nothing) == KEY
    assert read_key(None, True, {"NGC_API_KEY": "other"}, io.StringIO(f"{KEY}\n")) == KEY
    assert read_key(None, False, {"NGC_API_KEY": KEY}, nothing) == KEY


@pytest.mark.slow
def test_the_command_shows_the_key_nowhere(guarded: Guarded, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    base = environment_of(tmp_path)
    with CommandLines() as lines:
        ended = containers(["login", guarded.address, "--key-file", str(key_file)], base)
        assert ended.returncode == 0, ended.stderr
        assert "logged in as $oauthtoken" in ended.stdout
        assert KEY not in ended.stdout + ended.stderr
        assert find(guarded.address, base)[0] == GOOD
        ended = containers(["login", guarded.address], {**base, "NGC_API_KEY": "nvapi-wrong"})
        assert ended.returncode == 2 and ended.stderr.startswith("error: ") and "nvapi-wrong" not in ended.stderr
        assert lines.show("key-file") and not lines.show(KEY)


def test_without_a_key_the_command_says_where_to_put_it(tmp_path: Path) -> None:
    ended = containers(["login", "nvcr.io"], {**environment_of(tmp_path), "NGC_API_KEY": ""})
    assert ended.returncode == 2
    assert "--key-file" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.services
@pytest.mark.parametrize("way", ["basic", "token"])
def test_a_key_used_with_a_real_engine_shows_nowhere(
    way: str, dockerd: Any, engine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    needs([*REGISTRY_PROGRAMS, "htpasswd"], "docker-registry apache2-utils")
    with ExitStack() as stack:
        issuer = stack.enter_context(token_issuer({USER: KEY})) if way == "token" else None
        if issuer is None:
            made = subprocess.run(["htpasswd", "-Bni", USER], input=KEY, text=True, capture_output=True, check=True)
            (tmp_path / "htpasswd").write_text(made.stdout)
            variables = {"REGISTRY_AUTH": "htpasswd", "REGISTRY_AUTH_HTPASSWD_REALM": "test"}
            variables["REGISTRY_AUTH_HTPASSWD_PATH"] = str(tmp_path / "htpasswd")
        else:
            variables = issuer.registry_environment(tmp_path)
        registry = stack.enter_context(docker_registry(variables))
        image = example_image(700)
        headers = basic_header(USER, KEY)
        if issuer is not None:
            token, _ = issuer.token(USER, ["repository:roadfuse/private:pull,push"])
            headers = {"Authorization": f"Bearer {token}"}
        upload_image(registry.address, "roadfuse/private", TAG, image, headers)
        environment = {**environment_of(tmp_path), "DOCKER_HOST": dockerd.host, "NGC_API_KEY": KEY}
        environment |= {"ROADFUSE_IMAGE_CACHE": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
        reference = f"{registry.address}/roadfuse/private:{TAG}"
        with CommandLines() as lines:
            assert containers(["login", registry.address], environment).returncode == 0
            pulled = containers(["pull", reference, "--platform", "linux/amd64"], environment)
            assert pulled.returncode == 0, pulled.stderr
            other = f"{registry.address}/roadfuse/lane:{TAG}"
            store = DockerImages(engine)
            store.tag(image.image_id, other.rpartition(":")[0], TAG)
            pushed = containers(["push", other], environment)
            assert pushed.returncode == 0, pushed.stderr
            assert lines.show("containers") and not lines.show(KEY)
        said = pulled.stdout + pulled.stderr + pushed.stdout + pushed.stderr
        assert KEY not in said and "note:" not in said
        assert KEY not in dockerd.log and KEY not in registry.log
        assert KEY not in json.dumps(engine.api.inspect_image(image.image_id))
        assert KEY not in json.dumps(engine.api.history(image.image_id))
        archive = b"".join(engine.api.get_image(image.image_id))
        assert KEY.encode() not in archive
        for facts in store.images():
            if facts.image_id == image.image_id:
                for name in (*facts.tags, *facts.digests):
                    store.remove(name)


def test_a_helper_sees_the_key_on_standard_input_alone(tmp_path: Path) -> None:
    config_of(tmp_path, '{"credsStore": "vault"}')
    helper_of(tmp_path, "vault", f'echo "$@" > {tmp_path}/arguments; cat > /dev/null; sleep 0.2')
    with CommandLines() as lines:
        store_credentials("nvcr.io", GOOD, environment_of(tmp_path))
        assert lines.show("docker-credential-vault") and not lines.show(KEY)
    assert (tmp_path / "arguments").read_text() == "store\n"


def test_policy_is_the_users(tmp_path: Path) -> None:
    """A registry that is away ends a login in the policy's time, named."""
    policy = RetryPolicy(attempts=2, first_delay_seconds=0.01)
    with pytest.raises(transfer_errors.Unreachable, match=r"127\.0\.0\.1:1.*after 2 attempts"):
        login("127.0.0.1:1", GOOD, environment_of(tmp_path), False, policy)
