# SPDX-License-Identifier: Apache-2.0
"""What proves both sides at a Hello: our credential and the server's public key, from files read each time."""

from pathlib import Path

from kvpool.config import ClientConfig
from kvpool.model.errors import IdentityRefused, ServerUnavailable

__all__ = ["read_credential", "read_server_key"]


def read_credential(config: ClientConfig) -> str:
    """Return the credential, or an empty text if none is configured. A token's file changes over time.

    Raises:
        IdentityRefused: the file cannot be read or is empty; the text names it.
    """
    path = config.secret_file or config.token_file
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise IdentityRefused(f"the credential cannot be read: {e}") from e
    if not text:
        raise IdentityRefused(f"the credential file {path} is empty")
    return text


def read_server_key(config: ClientConfig) -> str:
    """Return the server's public key, or an empty text where nothing is encrypted: on a Unix socket.

    Raises:
        ServerUnavailable: its file is not there yet.
    """
    if not config.server.startswith("tcp://") or not config.server_key_file:
        return config.server_key if config.server.startswith("tcp://") else ""
    try:
        return Path(config.server_key_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ServerUnavailable(f"the server's public key is not there yet: {e}") from e
