# SPDX-License-Identifier: Apache-2.0
"""From options, file and environment to the one configuration value of a server or a client."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvpool.cli.errors import UsageError
from kvpool.config import (
    CLIENT_ENV_PREFIX,
    SERVER_ENV_PREFIX,
    ClientConfig,
    ConfigError,
    ServerConfig,
    decode_client,
    decode_server,
    parse_bytes,
)

__all__ = ["client_config", "server_config", "server_decoder", "size"]

CONNECTION_OPTIONS: Final = ("server", "server_key", "secret_file", "token_file")


def server_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Read --config, then the environment, then --set; the later wins.

    Raises:
        UsageError: a value is wrong or the file cannot be read; the text names the field and the remedy.
    """
    try:
        return server_decoder(args, environ)(_read(args.config) if args.config else b"{}")
    except ConfigError as e:
        raise UsageError(str(e)) from e


def server_decoder(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Callable[[bytes], ServerConfig]:
    """Return what turns the content of --config into a configuration, under the environment and --set.

    Raises:
        UsageError: a setting is wrong. What is returned raises ConfigError in the user's words.
    """
    settings = _settings(args.set)

    def decode(content: bytes) -> ServerConfig:
        try:
            return decode_server(content, {**environ, **settings})
        except ConfigError as e:
            raise ConfigError(_in_words_of_the_user(str(e), settings, args.config)) from e

    return decode


def client_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ClientConfig:
    """Read the environment, then --server and its companions; the later wins.

    Raises:
        UsageError: a value is wrong; the text names it and the remedy.
    """
    given = {k: v for k in CONNECTION_OPTIONS if (v := getattr(args, k))}
    ours = {k: v for k, v in environ.items() if k.startswith(CLIENT_ENV_PREFIX)}
    hidden = {CLIENT_ENV_PREFIX + k.upper() for k in given}
    try:
        return decode_client(msgspec.json.encode(given), {k: v for k, v in ours.items() if k not in hidden})
    except ConfigError as e:
        raise UsageError(str(e)) from e


def size(option: str, text: str) -> int:
    """Turn the text of a size option into bytes.

    Raises:
        UsageError: the text is no size.
    """
    try:
        return parse_bytes(text)
    except ConfigError as e:
        raise UsageError(f"{option}: {e}") from e


def _settings(assignments: Sequence[str]) -> dict[str, str]:
    """Turn ``l1.size_bytes=8GiB`` into the variable that sets it: both take sizes with a suffix."""
    settings: dict[str, str] = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        if not (path and equals):
            raise UsageError(f"--set {text}: write it as path=value, for example --set l1.size_bytes=8GiB")
        settings[SERVER_ENV_PREFIX + path.replace(".", "__").upper()] = value
    return settings


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"--config {path}: {e.strerror}; name a JSON file that this user may read") from e


def _in_words_of_the_user(message: str, settings: Mapping[str, str], config: str | None) -> str:
    """Say `--set l1.size` where the message names the variable that stands for it, and which file is meant."""
    for name in settings:
        path = name.removeprefix(SERVER_ENV_PREFIX).lower().replace("__", ".")
        message = message.replace(f"{name}:", f"--set {path}:")
    return f"{config}: {message}" if config and not message.startswith(("--set", SERVER_ENV_PREFIX)) else message
