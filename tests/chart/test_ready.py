# SPDX-License-Identifier: Apache-2.0
"""The script of `helm test`, as the rendered pod runs it, against servers that answer well and badly."""

import http.server
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.rendering import Helm, Object, only
from tests.cluster.pki import Authority

LIST = "/apis/kvpool.dev/v1alpha1/kvcachepools?limit=1"


class Answers(http.server.BaseHTTPRequestHandler):
    """Knows /good, and pools for whoever brings the token."""

    def do_GET(self) -> None:
        may = self.path == "/good" or (
            self.path.startswith("/apis/kvpool.dev/") and self.headers["Authorization"] == "Bearer secret"
        )
        self.send_response(200 if may else 403)
        self.end_headers()
        self.wfile.write(b"yes" if may else b"because")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A TLS server, and a pod's environment that takes it for the API server."""
    authority = Authority(tmp_path / "pki")
    certificate, key = authority.serving("api", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_bytes(authority.file.read_bytes())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
        server.shutdown()
        thread.join()


def script(helm: Helm, values: Object) -> tuple[str, list[str]]:
    """The script and its arguments but the first, which is the token's folder."""
    (container,) = only(helm.template(values), "Pod")["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    text, folder, *targets = container["args"]
    assert folder == "/var/run/secrets/kubernetes.io/serviceaccount"
    return text, targets


def run(text: str, folder: Path, targets: list[str], account: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, str(folder), *targets]
    return subprocess.run(command, env=os.environ | account, capture_output=True, text=True, check=False)


def test_what_the_pod_asks(helm: Helm) -> None:
    assert script(helm, {})[1] == [LIST, "http://pools-operator.system.svc:8080/readyz"]
    namespaced = script(helm, {"watchNamespaces": ["a", "b"], "metrics": {"service": False}})[1]
    assert namespaced == [
        f"/apis/kvpool.dev/v1alpha1/namespaces/{namespace}/kvcachepools?limit=1" for namespace in ("a", "b")
    ]


def test_all_answers_good(helm: Helm, account: dict[str, str], tmp_path: Path) -> None:
    done = run(script(helm, {})[0], tmp_path, [LIST, "/good"], account)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok ") == 2


def test_one_bad_answer_fails_and_is_shown(helm: Helm, account: dict[str, str], tmp_path: Path) -> None:
    done = run(script(helm, {})[0], tmp_path, [LIST, "/bad", "http://127.0.0.1:1/ready"], account)

    assert done.returncode == 1
    assert f"ok    {LIST}: 200" in done.stdout
    assert "FAIL  /bad: 403 because" in done.stdout
    assert "FAIL  http://127.0.0.1:1/ready: " in done.stdout
