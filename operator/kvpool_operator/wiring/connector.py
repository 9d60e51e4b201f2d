# SPDX-License-Identifier: Apache-2.0
"""The engine's ``--kv-transfer-config``: found, judged, completed if it is ours, added if there is none."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpool_operator.wiring.command import Invocation, Program
from kvpool_operator.wiring.reasons import Note

__all__ = ["CONNECTOR", "MODULE", "Connector", "complete", "find", "flag"]

CONNECTOR: Final = "KVPoolConnector"
MODULE: Final = "kvpool.connector.facade"

_OPTION: Final = "--kv-transfer-config"
_REFERENCE: Final = re.compile(r"\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector that the user configured, and where its JSON stands."""

    note: Note | None
    """What a person should know; None if it is ours."""
    ours: Mapping[str, Any] | None = None
    """The whole configuration, if it is ours and may be completed."""
    place: tuple[str, int] = ("", 0)
    """The list, and the word in it, that holds the JSON."""
    inline: str = ""
    """What stands before the JSON in that word, such as ``--kv-transfer-config=``."""

    @property
    def extra(self) -> frozenset[str]:
        """Settings of ours that the user made there."""
        given = (self.ours or {}).get("kv_connector_extra_config")
        return frozenset(given) if isinstance(given, Mapping) else frozenset()


def flag(failure_policy: str) -> list[str]:
    """The two words that make an engine use the pool; the same on every node."""
    return [_OPTION, _dumped(_defaults(failure_policy))]


def find(container: Mapping[str, Any], how: Invocation) -> Connector | None:
    """The connector that *container* configures already; None if it configures none."""
    if how.program is Program.SHELL:
        return _in_shell(" ".join(str(w) for w in [*(container.get("command") or ()), *(container.get("args") or ())]))
    options: dict[str, str] = {}
    found: Connector | None = None
    for place, name, value, inline in _options(container):
        if name == _OPTION:
            found = _judged(value, container, place, inline)
        elif name.startswith(f"{_OPTION}."):
            options[name.removeprefix(f"{_OPTION}.")] = value
    if options and found is None:
        named = {options.get("kv_connector"), options.get("kv_connector_module_path")}
        return Connector(None if named & {CONNECTOR, MODULE} else Note.FOREIGN_CONNECTOR)
    return found


def complete(container: dict[str, Any], found: Connector, failure_policy: str) -> None:
    """Add to our own configuration in *container* what it leaves out."""
    if found.ours is None:
        return
    whole = {**found.ours, **{k: v for k, v in _defaults(failure_policy).items() if k not in found.ours}}
    if whole != found.ours:
        key, index = found.place
        container[key] = [*container[key]]
        container[key][index] = found.inline + _dumped(whole)


def _defaults(failure_policy: str) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": failure_policy.lower(),
    }


def _dumped(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _in_shell(line: str) -> Connector | None:
    if CONNECTOR in line or MODULE in line:
        return Connector(None)
    spoken_of = _OPTION in line.replace("kv_transfer_config", "kv-transfer-config")
    return Connector(Note.FOREIGN_CONNECTOR) if spoken_of else None


def _options(container: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], str, str, str]]:
    """Each option with its value: the place of the value, the option's name, the value, and what precedes it there."""
    for key in ("command", "args"):
        words = [str(w) for w in container.get(key) or ()]
        for index, word in enumerate(words):
            if not word.startswith("--"):
                continue
            name, equals, value = word.partition("=")
            plain = name.replace("_", "-") if "." not in name else name.partition(".")[0].replace("_", "-")
            plain += "." + name.partition(".")[2] if "." in name else ""
            if equals:
                yield (key, index), plain, value, f"{name}="
            elif index + 1 < len(words):
                yield (key, index + 1), plain, words[index + 1], ""
            else:
                yield (key, index), plain, "", ""


def _judged(text: str, container: Mapping[str, Any], place: tuple[str, int], inline: str) -> Connector:
    resolved = _resolved(text, container)
    try:
        config = json.loads(resolved)
    except ValueError:
        return Connector(Note.UNREADABLE_CONNECTOR)
    if not isinstance(config, dict):
        return Connector(Note.UNREADABLE_CONNECTOR)
    if _is_ours(config):
        return Connector(None, config if resolved == text else None, place, inline)
    extra = config.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, dict) else None
    if isinstance(several, list) and any(isinstance(c, dict) and _is_ours(c) for c in several):
        return Connector(None)
    return Connector(Note.FOREIGN_CONNECTOR)


def _is_ours(config: Mapping[str, Any]) -> bool:
    return config.get("kv_connector") == CONNECTOR or config.get("kv_connector_module_path") == MODULE


def _resolved(text: str, container: Mapping[str, Any]) -> str:
    """*text* with the references to variables that the container itself sets."""
    known = {e["name"]: e["value"] for e in container.get("env") or () if "value" in e}
    return _REFERENCE.sub(lambda m: str(known.get(m[1], m[0])), text)
