# SPDX-License-Identifier: Apache-2.0
"""A machine of its own for each test node: process, mount and network namespaces, and folders that only it sees.

The first process of a machine is the pause program. Ending it ends everything that the machine runs, takes its mounts
and its network away, and leaves the host as it was but for empty cgroups, which carry the run's name and go then.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.processes import Processes, wait_for

__all__ = ["HIERARCHIES", "Machine", "entered", "link", "missing_capability", "remove_groups", "stale_groups"]

HIERARCHIES = Path("/sys/fs/cgroup")
_SHELL_PARTS = ("unshare", "nsenter", "ip", "mount", "sysctl", "nft", "sh")
_CLONE_NEWNET = 0x40000000
_SETUP = """
set -e
mount --make-rshared /
mount --bind "$1/run" /run
mount -t tmpfs -o mode=0755 tmpfs /var/lib
mount --bind "$1/log" /var/log
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for part in vm kernel; do mount --bind /proc/sys/$part /proc/sys/$part; mount -o remount,bind,ro /proc/sys/$part; done
for file in "$1"/sys/*/*; do mount --bind "$file" "/proc/sys/${file#"$1"/sys/}"; done
ip link set lo up
touch "$1/made"
exec "$2"
"""
_KUBELETS_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
}
"""The kubelet insists on these settings of the kernel, which are the host's: it sees files of the machine's own."""


def missing_capability() -> str:
    """Why this host cannot run machines; empty if it can."""
    if os.geteuid() != 0:
        return "real nodes need root"
    if missing := [p for p in _SHELL_PARTS if shutil.which(p) is None]:
        return f"real nodes need {', '.join(missing)} (Debian: util-linux, iproute2, procps, nftables)"
    if not (HIERARCHIES / "memory").is_dir():
        return "real nodes are tried with cgroup v1 hierarchies alone, and this host has none"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "nft", "list", "ruleset"], capture_output=True, check=False
    )
    if tried.returncode:
        return f"real nodes need namespaces and nftables: {tried.stderr.decode(errors='replace').strip()}"
    return ""


class Machine:
    """One machine, from `start` until its `Processes` end."""

    def __init__(self, processes: Processes, name: str, pause: Path) -> None:
        self.name = name
        self.folder = processes.folder / name
        self.group = f"{_prefix(processes.folder.parent)}{processes.folder.name}-{name}"
        self._processes = processes
        self._pause = pause
        self._init = 0

    def start(self) -> None:
        """Make its folders and its first process.

        Raises:
            StartError: the kernel refuses; the text says what.
        """
        for part in ("run", "log"):
            (self.folder / part).mkdir(parents=True)
        for name, value in _KUBELETS_SETTINGS.items():
            file = self.folder / "sys" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        own = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
        command = ["unshare", *own, "sh", "-c", _SETUP, "sh", self.folder, self._pause]
        self._processes.start(self.name, command, self._made)
        _make_groups(self.group)

    def _made(self) -> bool:
        parent = self._processes.running[self.name].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self._init = int(children[0]) if children else 0
        return bool(children) and (self.folder / "made").exists()

    def inside(self, *command: str | Path) -> list[str]:
        """*command*, to be run on this machine and within its cgroups."""
        move = f'for h in {HIERARCHIES}/*/{self.group}/runtime; do echo $$ > "$h/cgroup.procs"; done; exec "$@"'
        enter = ("nsenter", "--target", str(self._init), "--mount", "--net", "--pid")
        return ["sh", "-c", move, "sh", *enter, *(str(c) for c in command)]

    def run(self, *command: str | Path, timeout_s: float = 120.0) -> str:
        """Run *command* there and return what it prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            self.inside(*command), capture_output=True, text=True, check=False, timeout=timeout_s, errors="replace"
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, command))}: {done.stderr}{done.stdout}"
        return done.stdout

    @property
    def network(self) -> Path:
        """File of its network namespace."""
        return Path(f"/proc/{self._init}/ns/net")

    def stop(self) -> None:
        """End everything it runs and remove its cgroups."""
        if self._init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
            self._processes.running[self.name].wait(10)
        self._processes.stop(self.name, grace_s=0.0)
        remove_groups(self.group)

    @property
    def init(self) -> int:
        """Process id of its first process."""
        return self._init


def link(first: Machine, second: Machine, addresses: Sequence[str]) -> None:
    """Join two machines by a cable; *addresses* (with prefix length) are those of their ends, both called eth0."""
    peer = ("peer", "name", "eth0", "netns", str(second.init))
    command = ["ip", "link", "add", "eth0", "netns", str(first.init), "type", "veth", *peer]
    subprocess.run(command, check=True, capture_output=True)
    for machine, address in zip((first, second), addresses, strict=True):
        machine.run("ip", "address", "add", address, "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")
        machine.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")


@contextlib.contextmanager
def entered(network: Path) -> Iterator[None]:
    """Put this thread, and all threads and processes that it starts meanwhile, into a network namespace."""
    with Path("/proc/thread-self/ns/net").open() as before, network.open() as wanted:
        _set_namespace(wanted.fileno())
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def _set_namespace(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _prefix(base: Path) -> str:
    """How the names of all cgroups of runs below *base* begin."""
    return f"kvpool-{hashlib.sha256(str(base).encode()).hexdigest()[:6]}-"


def _make_groups(name: str) -> None:
    """In every hierarchy, with a part for the node's own programs; the kubelet makes the pods' part."""
    for hierarchy in [h for h in _hierarchies() if h.name != "unified"]:
        for group in (hierarchy / name, hierarchy / name / "runtime"):
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / file).exists():
                    (group / file).write_text((group.parent / file).read_text())


def _hierarchies() -> list[Path]:
    """All of them; in the unified one, if there are others, it is the runtime that makes a node's groups."""
    return [h for h in sorted(HIERARCHIES.iterdir()) if h.is_dir() and not h.is_symlink()]


def stale_groups(base: Path) -> list[str]:
    """Cgroups of runs below *base* whose folder is gone."""
    prefix = _prefix(base)
    found = {g.name for h in _hierarchies() for g in h.glob(f"{prefix}*") if g.is_dir()}
    runs = {run.name for run in base.glob("*")}
    return sorted(g for g in found if "-".join(g.removeprefix(prefix).split("-")[:2]) not in runs)


def remove_groups(name: str) -> None:
    """Remove cgroup *name* from every hierarchy, killing whatever is still in it."""
    for hierarchy in _hierarchies():
        wait_for(f"the end of {hierarchy / name}", lambda h=hierarchy: _removed(h / name), deadline_s=20)


def _removed(group: Path) -> bool:
    folders = [group, *(f for f in group.rglob("*") if f.is_dir())] if group.is_dir() else []
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
    return not group.exists()
