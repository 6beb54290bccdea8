"""An issuer of tokens in NGC's manner, for a real registry (`REGISTRY_AUTH=token`) or for the double."""

from __future__ import annotations

import base64
import datetime
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from tests.containers.local_server import QuietHandler, serving

SERVICE = "test registry"
ISSUER = "test issuer"


@dataclass
class TokenIssuer:
    key: Any = field(repr=False)
    certificate: bytes = field(repr=False)
    """DER."""
    users: dict[str, str] = field(default_factory=dict)
    public: tuple[str, ...] = ()
    """Repositories that the anonymous may pull."""
    num_expired: int = 0
    """Of the next tokens, how many have expired when they are issued, although the answer says otherwise."""
    life_seconds: float = 300.0
    address: str = ""
    issued: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What each token that has not expired allows."""
    requests: list[tuple[str, bool]] = field(default_factory=list)
    """Scope asked for, and whether with a user."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def realm(self) -> str:
        return f"http://{self.address}/proxy_auth"

    def registry_environment(self, folder: Path) -> dict[str, str]:
        """Makes a docker-registry trust this issuer."""
        bundle = folder / "issuer.pem"
        certificate = x509.load_der_x509_certificate(self.certificate)
        bundle.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return {
            "REGISTRY_AUTH": "token",
            "REGISTRY_AUTH_TOKEN_REALM": self.realm,
            "REGISTRY_AUTH_TOKEN_SERVICE": SERVICE,
            "REGISTRY_AUTH_TOKEN_ISSUER": ISSUER,
            "REGISTRY_AUTH_TOKEN_ROOTCERTBUNDLE": str(bundle),
        }

    def token(self, user: str, scopes: list[str]) -> tuple[str, float]:
        access = []
        for scope in scopes:
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            public = ["pull"] if name in self.public and "pull" in actions else []
            allowed = actions.split(",") if user else public
            if allowed:
                access.append({"type": kind, "name": name, "actions": allowed})
        now = time.time()
        with self.lock:
            expired = self.num_expired > 0
            self.num_expired -= expired
            number = len(self.issued) + len(self.requests)
        life = -600.0 if expired else self.life_seconds
        claims = {"iss": ISSUER, "sub": user, "aud": SERVICE, "exp": int(now + life), "nbf": int(now - 700)}
        claims |= {"iat": int(now), "jti": str(number), "access": access}
        chain = [base64.b64encode(self.certificate).decode("ascii")]
        made = jwt.encode(claims, self.key, algorithm="RS256", headers={"x5c": chain})
        if not expired:
            with self.lock:
                self.issued[made] = access
        return made, self.life_seconds


@contextmanager
def token_issuer(users: Mapping[str, str] | None = None, public: tuple[str, ...] = ()) -> Iterator[TokenIssuer]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ISSUER)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    issuer = TokenIssuer(key, certificate.public_bytes(serialization.Encoding.DER), dict(users or {}), public)
    with serving(_Handler, issuer) as issuer.address:
        yield issuer


class _Handler(QuietHandler):
    def do_GET(self) -> None:
        issuer: TokenIssuer = self.server.state
        kind, _, pair = self.headers.get("Authorization", "").partition(" ")
        user, _, password = base64.b64decode(pair).decode().partition(":") if kind == "Basic" else ("", "", "")
        scopes = [scope for text in parse_qs(urlsplit(self.path).query).get("scope", []) for scope in text.split()]
        with issuer.lock:
            issuer.requests.append((" ".join(scopes), bool(user)))
        if user and issuer.users.get(user) != password:
            self._send(401, {"details": "incorrect username or password"})
            return
        token, life = issuer.token(user, scopes)
        self._send(200, {"token": token, "expires_in": int(life)})

    def do_POST(self) -> None:
        """The oauth2 flow, which docker tries first; NGC has none."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._send(404, {})

    def _send(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
