# SPDX-License-Identifier: Apache-2.0
"""The credential of a Hello: a shared secret or a projected token, read from its file each time it is needed."""

from pathlib import Path

from kvpool.config import ClientConfig
from kvpool.model.errors import IdentityRefused

__all__ = ["read_credential"]


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
