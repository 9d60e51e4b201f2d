# SPDX-License-Identifier: Apache-2.0
"""Keeps the admission server's certificates: in its Secret, in the published bundle, in its TLS context.

Every replica does the same and none leads: each write names the version that was read, so of two equal steps one wins
and the other is seen at the next look.
"""

import asyncio
import base64
import datetime as dt
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpool_operator.admission.authority import Certificates, Pair, taken, trusts
from kvpool_operator.admission.settings import WebhookSettings
from kvpool_operator.cluster import HOOKS, SECRETS, Cluster
from kvpool_operator.errors import Absent, Conflict, OperatorError

__all__ = ["Keeper"]

_log = logging.getLogger("kvpool.webhook")


class Keeper:
    """The certificates of one replica. One event loop.

    Args:
        wall: the time now; certificates end at a date.
    """

    def __init__(self, cluster: Cluster, settings: WebhookSettings, wall: Callable[[], dt.datetime]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._wall = wall
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.loaded = asyncio.Event()
        """Set once there is something to serve."""
        self._served: Pair | None = None
        self._published: tuple[bytes, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if what is served verified, at the last look, with what is published for every hook."""
        if self._served is None or not self._published:
            return False
        return all(trusts(bundle, self._served.certificate) for bundle in self._published)

    def remaining_s(self) -> float:
        """Seconds until the served certificate ends; 0 if none is served."""
        return (self._served.expires_at() - self._wall()).total_seconds() if self._served else 0.0

    async def run(self) -> None:
        """Look at the certificates ever again, until cancelled."""
        while True:
            try:
                await self.look()
            except OperatorError as e:
                _log.warning("certificates.unseen", extra={"fields": {"error": str(e)}})
            except (OSError, ValueError) as e:
                _log.error("certificates.unusable", extra={"fields": {"error": str(e)}})
            await asyncio.sleep(self._settings.look_s if self.trusted else min(1.0, self._settings.look_s))

    async def look(self) -> None:
        """One look: take the step that is due, publish, then serve.

        Raises:
            OperatorError: the API server did not answer, or a right is missing.
            OSError, ValueError: the files, or what is in them, cannot be used.
        """
        if self._settings.certificate_folder:
            self._serve(_read(Path(self._settings.certificate_folder)))
            self._published = await self._bundles()
        else:
            await self._own()

    async def _own(self) -> None:
        """What is published counts from the look after it on: by then the API servers have seen it, too."""
        found = await self._secret()
        if found is None or found.current is None:
            return  # another replica was faster; its Secret is there at the next look
        self._published = await self._bundles()
        if any(bundle != found.bundle for bundle in self._published):
            await self._publish(found.bundle)
        if all(trusts(bundle, found.current.certificate) for bundle in self._published):
            self._serve(found.current)

    async def _secret(self) -> Certificates | None:
        """What stands in the Secret after the step that is due."""
        settings = self._settings
        try:
            body = await self._cluster.get(SECRETS, settings.namespace, settings.secret)
        except Absent:
            body = None
        data = {k: base64.b64decode(v) for k, v in ((body or {}).get("data") or {}).items()}
        found = Certificates.of(data)
        step = taken(found, settings.names, self._wall(), settings.certificate_life_s, settings.settle_s)
        if step is None:
            return found
        try:
            if not await self._write(body, step):
                return None
        except (Conflict, Absent):
            return None
        _log.info("certificates.changed", extra={"fields": {"next": step.next is not None, "old": bool(step.old)}})
        return step

    async def _write(self, body: Mapping[str, Any] | None, step: Certificates) -> bool:
        settings = self._settings
        data = {name: base64.b64encode(value).decode() for name, value in step.data().items()}
        if body is not None:
            await self._cluster.replace(SECRETS, {**body, "data": data})
            return True
        made = {
            "apiVersion": SECRETS.api_version,
            "kind": SECRETS.kind,
            "type": "kubernetes.io/tls",
            "metadata": {"name": settings.secret, "namespace": settings.namespace},
            "data": data,
        }
        return await self._cluster.create(SECRETS, settings.namespace, made)

    async def _hooks(self) -> Mapping[str, bytes]:
        found = await self._cluster.get(HOOKS, "", self._settings.configuration)
        hooks = found.get("webhooks") or ()
        return {h["name"]: base64.b64decode(h["clientConfig"].get("caBundle") or "") for h in hooks}

    async def _bundles(self) -> tuple[bytes, ...]:
        return tuple((await self._hooks()).values())

    async def _publish(self, bundle: bytes) -> None:
        hooks = await self._hooks()
        text = base64.b64encode(bundle).decode()
        await self._cluster.apply_bundle(self._settings.configuration, hooks, text)
        _log.info("bundle.published", extra={"fields": {"hooks": len(hooks)}})

    def _serve(self, pair: Pair) -> None:
        """Let new connections see *pair*; those that are open go on."""
        if pair == self._served:
            return
        with tempfile.TemporaryDirectory(dir=self._settings.scratch_folder) as folder:
            files = [Path(folder) / name for name in ("tls.crt", "tls.key")]
            for file, content in zip(files, (pair.certificate, pair.key), strict=True):
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(content)
            self.context.load_cert_chain(certfile=files[0], keyfile=files[1])
        self._served = pair
        self.loaded.set()
        _log.info("certificate.served", extra={"fields": {"until": pair.expires_at().isoformat()}})


def _read(folder: Path) -> Pair:
    """What somebody else has put into *folder*; who signed it is found in the published bundle."""
    return Pair((folder / "tls.crt").read_bytes(), (folder / "tls.key").read_bytes(), b"")
