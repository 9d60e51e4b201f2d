# SPDX-License-Identifier: Apache-2.0
"""How one replica of the admission server runs; read once from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from kvpool_operator.settings import fields_from

__all__ = ["WebhookSettings"]

_PREFIX: Final = "KVPOOL_WEBHOOK_"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """One value for everything that is not in a pool."""

    namespace: str = "kvpool-system"
    """Namespace that it runs in; the Secret with its certificates is there."""
    configuration: str = "kvpool-webhook"
    """Name of the MutatingWebhookConfiguration whose CA bundle it keeps."""
    secret: str = "kvpool-webhook"  # noqa: S105 - its name
    """Name of the Secret with its certificates."""
    names: tuple[str, ...] = ("kvpool-webhook.kvpool-system.svc",)
    """Names and addresses that the API server calls it by."""
    certificate_folder: str = ""
    """Folder with ``tls.crt`` and ``tls.key`` that somebody else renews, as cert-manager does; empty: our own."""
    scratch_folder: str = "/run/kvpool-webhook"
    """Private folder in memory; the key passes through it on its way into the TLS library."""
    payload_image: str = "kvpool-payload"
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces with pools; empty: all."""
    host: str = ""
    """Address of the reviews; empty: all of both families, since the API server may come from anywhere."""
    port: int = 9443
    http_host: str = "127.0.0.1"
    """Address of probes and metrics."""
    health_port: int = 8080
    certificate_life_s: float = 90 * 86400.0
    settle_s: float = 60.0
    """How long every API server may need to see a change of the CA bundle."""
    look_s: float = 10.0
    """Time between two looks at the certificates and at the published bundle."""
    linger_s: float = 10.0
    """How long a replica that was told to end still answers: until nobody sends to it any more."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Settings from variables named ``KVPOOL_WEBHOOK_<FIELD>``.

        Raises:
            ValueError: a number is none.
        """
        return cls(**fields_from(cls, _PREFIX, environ))
