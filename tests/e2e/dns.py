# SPDX-License-Identifier: Apache-2.0
"""The names of Services for pods of a local cluster: a responder that asks the API server for each name.

    python dns.py ADDRESS KUBECONFIG

It answers A queries for ``service.namespace.svc.cluster.local``: the Service's address, or those of its ready endpoints
where it has none. Everything else does not exist.
"""

import ipaddress
import json
import re
import socketserver
import ssl
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import yaml

NAME = re.compile(r"([a-z0-9-]+)\.([a-z0-9-]+)\.svc\.cluster\.local", re.IGNORECASE)
ADDRESS, NO_SUCH_NAME, LIFE_S = 1, 3, 2


class Services:
    """Addresses of Services, as the API server knows them now."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        self._server = cluster["server"]
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._tls.load_cert_chain(user["client-certificate"], user["client-key"])

    def addresses(self, name: str) -> list[str] | None:
        """Addresses behind *name*, or None if there is no such name."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        service, namespace = (part.lower() for part in found.groups())
        try:
            spec = self._get(f"/api/v1/namespaces/{namespace}/services/{service}")["spec"]
        except urllib.error.HTTPError:
            return None
        if spec.get("clusterIP") != "None":
            return [spec["clusterIP"]]
        query = urlencode({"labelSelector": f"kubernetes.io/service-name={service}"})
        slices = self._get(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{query}")["items"]
        endpoints = [e for s in slices for e in s.get("endpoints") or () if e["conditions"].get("ready")]
        return sorted(a for e in endpoints for a in e["addresses"])

    def _get(self, path: str) -> dict:
        with urllib.request.urlopen(self._server + path, context=self._tls, timeout=5) as answer:
            return json.loads(answer.read())


def reply(query: bytes, services: Services) -> bytes:
    """The answer to one message with one question."""
    identity, flags, questions = struct.unpack_from(">HHH", query)
    if questions != 1:
        return struct.pack(">HHHHHH", identity, 0x8001, 0, 0, 0, 0)
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    (kind,) = struct.unpack_from(">H", query, at + 1)
    addresses = services.addresses(".".join(labels))
    answers = addresses if addresses and kind == ADDRESS else []
    code = NO_SUCH_NAME if addresses is None else 0
    head = struct.pack(">HHHHHH", identity, 0x8480 | (flags & 0x0100) | code, 1, len(answers), 0, 0)
    record = struct.pack(">HHHIH", 0xC00C, ADDRESS, 1, LIFE_S, 4)
    return head + query[12 : at + 5] + b"".join(record + ipaddress.ip_address(a).packed for a in answers)


def serve(address: str, kubeconfig: Path) -> None:
    """Answer until the process is ended."""
    services = Services(kubeconfig)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, channel = self.request
            channel.sendto(reply(query, services), self.client_address)

    with socketserver.ThreadingUDPServer((address, 53), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
