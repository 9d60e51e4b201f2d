# SPDX-License-Identifier: Apache-2.0
"""What a container runs, judged by its words: only vLLM's own command line may be appended to."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

__all__ = ["Invocation", "Program", "invocation", "is_engine_image", "mentions_engine"]

_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_STARTERS: Final = frozenset({"catatonit", "dumb-init", "tini"})
_PYTHON: Final = re.compile(r"^python[0-9.]*$")
_ENGINE_IMAGE: Final = re.compile(r"(^|[/_.-])vllm([/_.:@-]|$)")
_ENGINE_WORD: Final = re.compile(r"(^|[^a-z])vllm([^a-z]|$)")
_NO_ENGINE: Final = ("router", "exporter", "proxy", "gateway", "controller", "operator")
_API_SERVER: Final = re.compile(r"^vllm\.entrypoints\.(openai\.)?(api_server|cli\.main)$")
_OPTIONS: Final = frozenset({"--model", "--served-model-name", "--tensor-parallel-size", "--max-model-len"})
"""Options that no other server of models has all alike; one of them is enough where the program is not seen."""


class Program(Enum):
    """What the words start."""

    ENGINE = auto()
    SHELL = auto()
    RAY = auto()
    IMAGE = auto()
    """Nothing is said, so the image decides; arguments given to it would take the place of its own."""
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Invocation:
    """The program, and the list that its options end in: ``args`` or ``command``."""

    program: Program
    tail: str = ""


def invocation(container: Mapping[str, Any]) -> Invocation:
    """Judge *container* of a pod."""
    command, args = _words(container, "command"), _words(container, "args")
    if not command and not args:
        return Invocation(Program.IMAGE)
    program = _program(command + args) if command else _of_image(container, args)
    return Invocation(program, "args" if args else "command")


def is_engine_image(container: Mapping[str, Any]) -> bool:
    """True if the image's name says that vLLM is in it, and nothing else that serves it."""
    repository = str(container.get("image", "")).lower()
    return bool(_ENGINE_IMAGE.search(repository)) and not any(word in repository for word in _NO_ENGINE)


def mentions_engine(container: Mapping[str, Any]) -> bool:
    """True if the words speak of vLLM, as a shell line that starts it does."""
    text = " ".join(_words(container, "command") + _words(container, "args")).lower()
    return bool(_ENGINE_WORD.search(text))


def _words(container: Mapping[str, Any], key: str) -> list[str]:
    return [str(word) for word in container.get(key) or ()]


def _of_image(container: Mapping[str, Any], args: Sequence[str]) -> Program:
    """Arguments without a command go to the image's entrypoint, unless they are a program themselves."""
    program = _program(args)
    if program is not Program.OTHER:
        return program
    known = is_engine_image(container) or (args[0].startswith("-") and not _OPTIONS.isdisjoint(map(_name, args)))
    return Program.ENGINE if known else Program.OTHER


def _program(words: Sequence[str]) -> Program:
    rest = _without_starters(list(words))
    if not rest:
        return Program.OTHER
    name, after = rest[0].rpartition("/")[2], rest[1:]
    if name in _SHELLS:
        return Program.SHELL
    if name == "ray":
        return Program.RAY
    if name == "vllm":
        return Program.ENGINE if after[:1] == ["serve"] else Program.OTHER
    if _PYTHON.match(name):
        return _of_python(after)
    return Program.OTHER


def _of_python(words: list[str]) -> Program:
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    if len(words) < 2 or words[0] != "-m" or not _API_SERVER.match(words[1]):  # noqa: PLR2004 - the option and its value
        return Program.OTHER
    needs_verb = words[1].endswith("cli.main")
    return Program.ENGINE if not needs_verb or words[2:3] == ["serve"] else Program.OTHER


def _without_starters(words: list[str]) -> list[str]:
    """Without what only hands on: an init, or ``env`` with its assignments."""
    while words:
        name = words[0].rpartition("/")[2]
        if name in _STARTERS:
            words = words[1:]
            while words and words[0].startswith("-"):
                ended, words = words[0] == "--", words[1:]
                if ended:
                    break
        elif name == "env" and len(words) > 1 and not words[1].startswith("-"):
            words = words[1:]
            while words and "=" in words[0]:
                words = words[1:]
        else:
            break
    return words


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
