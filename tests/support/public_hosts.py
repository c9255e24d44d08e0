"""Public hosts that are played here: a proxy on the loopback, which answers for them over TLS, by
certificates of an authority of the test's own."""

from __future__ import annotations

import datetime
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Hosts = dict[str, dict[str, tuple[str, bytes]]]
"""By host, by path: the type of a content, and the content."""


def project_page(*files: tuple[str, bytes]) -> tuple[str, bytes]:
    """The page (PEP 691) of a project with these files, which are beside it."""
    listed = [
        {"filename": name, "url": name, "hashes": {"sha256": sha256(data).hexdigest()}}
        for name, data in files
    ]
    page = {"meta": {"api-version": "1.0"}, "name": "x", "files": listed}
    return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()


def add_project(hosts: Hosts, host: str, folder: str, *files: tuple[str, bytes]) -> None:
    """Let ``host`` have a project's ``files`` in ``folder``."""
    paths = hosts.setdefault(host, {})
    paths[f"{folder}/"] = project_page(*files)
    paths |= {f"{folder}/{name}": ("application/octet-stream", data) for name, data in files}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host = ""

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        server: _Proxy = self.server  # type: ignore[assignment]
        self.host = self.path.partition(":")[0]
        self.rfile.close()
        self.connection = server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def do_GET(self) -> None:
        server: _Proxy = self.server  # type: ignore[assignment]
        server.asked.append(f"{self.host}{self.path}")
        kind, body = server.hosts.get(self.host, {}).get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:
        pass


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hosts: Hosts, tls: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts = hosts
        self.tls = tls
        self.asked: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client left


@contextmanager
def public_hosts(hosts: Hosts, folder: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """``hosts`` on the loopback; certificates are written into ``folder``. Gives the variables
    that lead a process to them, and the list of what was asked for."""
    authority, chain = folder / "authority.pem", folder / "hosts.pem"
    _write_certificates(list(hosts), authority, chain)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain)
    proxy = _Proxy(hosts, tls)
    thread = threading.Thread(target=proxy.serve_forever, name="public-hosts")
    thread.start()
    url = f"http://127.0.0.1:{proxy.server_address[1]}"
    try:
        yield {"HTTPS_PROXY": url, "SSL_CERT_FILE": str(authority), "NO_PROXY": ""}, proxy.asked
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def _write_certificates(hosts: list[str], authority: Path, chain: Path) -> None:
    """The certificate of an authority, and one for ``hosts`` with its key."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in ("tests", hosts[0])
    ]
    now = datetime.datetime.now(datetime.UTC)
    made = []
    for number in range(2):
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[number])
            .issuer_name(names[0])
            .public_key(keys[number].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
        )
        if number:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(each) for each in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()))
    pem = serialization.Encoding.PEM
    authority.write_bytes(made[0].public_bytes(pem))
    key = keys[1].private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain.write_bytes(made[1].public_bytes(pem) + key)
