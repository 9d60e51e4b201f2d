# SPDX-License-Identifier: Apache-2.0
"""Real clients and a real server, with everything failing between and around them.

    python -m tests.property.fault_campaign --ops 1000000 [--seconds 600] [--seed 7]

A proxy loses, delays, doubles, cuts and mixes up messages; clients and the server are killed and stopped at any moment,
the server's clocks jump, and its tmpfs is filled by others. Every byte that a client gets vouched for is compared with
what its chunk must be. At the end, when all is calm, nothing may be left: no lease, no pin, no slot.

Exit codes: 0 all well, 1 a byte was wrong, something hung, leaked or died, or too little happened to tell; the seed is
on the first line.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from tests.fakes.fault_client import Order
from tests.fakes.fault_proxy import FaultProxy, Rates
from tests.fakes.server_process import ROOT, ServerProcess

from kvpool.cli.connect import Probe, listening_problem
from kvpool.cli.errors import Failure
from kvpool.config import ClientConfig
from kvpool.wire.messages import Clear, Statistics

MIB = 1 << 20
L1_BYTES = 24 * MIB
MEMORY_BYTES = 48 * MIB
"""Of the tmpfs; with a hog on it, less than L1 is left."""
SHARD_BYTES = 96 << 10
CLIENTS = 4
LIFE_OPS = 150
"""Operations of one client process."""
LIFE_S = 240.0
ACT_S = (0.3, 2.0)
ACT_MESSAGES = 100
"""That pass between two acts: on a slow machine nothing would ever get done otherwise."""
STOP_S = (0.05, 1.5)
CALM_S = 60.0
LOOK_S = 0.05
FAULTS = ("drop", "delay", "duplicate", "truncate", "reorder", "hang_up")
ACTS = {"kill client": 3, "stop client": 3, "kill server": 1, "end server": 1, "stop server": 2, "fill": 1, "unfill": 2}


LEAST_OPS = 50
"""Of a run whose time was over before it had done all."""
LEAST_WITH_SERVER = 0.5
LEAST_COMPARED = 0.3
"""Chunks an operation; 1.9 is usual."""
LEAST_FAULTS = 0.01
"""Faults a message; the proxy's rates add up to four times that."""
MOST_MESSAGES_AN_ACT = 2000
SURE = 20
"""What is expected so often has to have happened once."""


class CampaignError(Exception):
    """What must never be; the text says what."""


class Campaign:
    """One run; a context manager. At its end no process, mount or file is left."""

    def __init__(self, folder: Path, seed: int, ops: int, seconds: float = math.inf) -> None:
        self.chance = random.Random(seed)
        self._seconds = seconds
        self._ends_s = math.inf
        self.counts: Counter[str] = Counter()
        self._folder, self._seed, self._ops = folder, seed, ops
        self._lives: dict[subprocess.Popen[str], float] = {}
        self._started = 0
        self._stopped: dict[subprocess.Popen[str], float] = {}
        self._server_stopped_until_s = 0.0
        self._pause = threading.Event()
        self.memory = folder / "memory"
        self._hog = self.memory / "hog"
        self.server = ServerProcess(
            folder,
            size_bytes=L1_BYTES,
            program=("-m", "tests.fakes.jumping_server", str(seed)),
            l1={"directory": str(self.memory), "verify_loads": 0.1},
            leases={"heartbeat_s": 0.2, "client_silent_s": 1.0, "lookup_s": 2.0, "store_s": 3.0, "tombstone_s": 5.0},
        )
        self._proxy = FaultProxy(folder / "faulty.sock", folder / "kvpool.sock", seed, Rates())

    def run(self) -> None:
        """Work until the ordered number of operations or the time is over, then look whether all was given back.

        Raises:
            CampaignError: it was not, or something died or hung.
        """
        with mounted(self.memory) as may_fill, self.server, self._proxy:
            self.counts["disk may be filled"] = int(may_fill)
            acts = {act: weight for act, weight in ACTS.items() if may_fill or "fill" not in act}
            try:
                self._wait_until_up()
                self._ends_s = time.monotonic() + self._seconds
                self._work(acts)
                self._proxy.calm()
                self._unfill()
                self._nothing_is_left()
            finally:
                for life in self._lives:
                    life.kill()
                    life.communicate()
            self.counts.update({f"messages {what}": n for what, n in self._proxy.counts.items()})
            if missing := shortfall(self.counts, self._ops, acts):
                raise CampaignError(f"nothing was found, but too little was done: {'; '.join(missing)}; {self.counts}")

    def _work(self, acts: dict[str, int]) -> None:
        act_s, passed, now_s = time.monotonic(), 0, time.monotonic()
        while self._lives or (self._ordered() < self._ops and now_s < self._ends_s):
            now_s = time.monotonic()
            self._reap(now_s)
            self._go_on(now_s)
            if now_s >= self._ends_s:
                for life in self._lives:
                    life.terminate()
            while len(self._lives) < CLIENTS and self._ordered() < self._ops and now_s < self._ends_s:
                self._begin_life(now_s)
            done = self._proxy.counts["passed"] - passed
            if self._lives and act_s <= now_s < self._ends_s and done >= ACT_MESSAGES:
                act_s, passed = now_s + self.chance.uniform(*ACT_S), passed + done
                (act,) = self.chance.choices(list(acts), list(acts.values()))
                self._act(act, now_s)
            if self.server.ended:
                self._start_again()
            self._pause.wait(LOOK_S)

    def _wait_until_up(self) -> None:
        ends_s = time.monotonic() + CALM_S
        while listening_problem(self.server.address):
            if time.monotonic() > ends_s or self.server.ended:
                raise CampaignError(f"the server does not start:\n{self.server.log[-2000:]}")
            self._pause.wait(LOOK_S)

    def _ordered(self) -> int:
        """Operations that ended, and those that living clients are still to do."""
        return self.counts["ops"] + LIFE_OPS * len(self._lives)

    def _begin_life(self, now_s: float) -> None:
        self._started += 1
        order = Order(
            server=self._proxy.address,
            mode=self.chance.choice(["client-moved", "streamed"]),
            seed=self._seed * 1_000_003 + self._started,
            ops=LIFE_OPS,
            shard_bytes=SHARD_BYTES,
        )
        command = [sys.executable, "-m", "tests.fakes.fault_client", msgspec.json.encode(order).decode()]
        environ = os.environ | {"PYTHONPATH": f"{ROOT / 'cacheserver'}:{ROOT}"}
        log = (self._folder / "clients.log").open("a")
        with log:
            life = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        self._lives[life] = now_s

    def _reap(self, now_s: float) -> None:
        for life, began_s in list(self._lives.items()):
            if life.poll() is None:
                if now_s - began_s > LIFE_S:
                    raise CampaignError(f"a client HANGS: {LIFE_OPS} operations take more than {LIFE_S:.0f} s")
                continue
            said, _ = life.communicate()
            del self._lives[life]
            self._stopped.pop(life, None)
            if life.returncode in (0, -signal.SIGKILL, -signal.SIGTERM):
                # The last whole line: a killed client has done what it had told of by then.
                self.counts.update(json.loads(said[: said.rfind("\n") + 1].splitlines()[-1]) if "\n" in said else {})
            else:
                log = (self._folder / "clients.log").read_text()[-3000:]
                raise CampaignError(f"a client ended with {life.returncode}: {said}\n{log}")

    def _act(self, act: str, now_s: float) -> None:
        self.counts[act] += 1
        what, _, whom = act.partition(" ")
        life = self.chance.choice(list(self._lives)) if self._lives else None
        if whom == "client" and life is not None and what == "kill":
            life.kill()
        elif whom == "client" and life is not None:
            life.send_signal(signal.SIGSTOP)
            self._stopped[life] = now_s + self.chance.uniform(*STOP_S)
        elif act == "stop server" and not self._server_stopped_until_s:
            self.server.stop()
            self._server_stopped_until_s = now_s + self.chance.uniform(*STOP_S)
        elif whom == "server" and what != "stop":
            self._restart(what)
        elif act == "fill":
            fill(self._hog)
        elif act == "unfill":
            self._unfill()

    def _restart(self, how: str) -> None:
        """A server that starts refuses memory that is not there, in words; here it has to come back."""
        if self._server_stopped_until_s:
            self.server.go_on()
            self._server_stopped_until_s = 0.0
        self._unfill()
        if how == "kill":
            self.server.restart()
        else:
            self.server.terminate()
            self.server.start()

    def _start_again(self) -> None:
        """Memory that clients still map can keep a server from starting, which it says: whoever runs it tries again."""
        last = self.server.log.splitlines()[-1]
        if "server.not_started" not in last or "l1.size_bytes" not in last:
            raise CampaignError(f"the server ended by itself:\n{self.server.log[-3000:]}")
        self.counts["starts refused for lack of memory"] += 1
        self._unfill()
        self._pause.wait(LOOK_S)
        self.server.start()

    def _go_on(self, now_s: float) -> None:
        for life, until_s in list(self._stopped.items()):
            if now_s >= until_s:
                life.send_signal(signal.SIGCONT)
                del self._stopped[life]
        if self._server_stopped_until_s and now_s >= self._server_stopped_until_s:
            self.server.go_on()
            self._server_stopped_until_s = 0.0

    def _unfill(self) -> None:
        self._hog.unlink(missing_ok=True)

    def _nothing_is_left(self) -> None:
        """Look at the server's own numbers until leases, pins and writers are gone, then clear and find it empty."""
        self._go_on(float("inf"))
        last: Statistics | None = None
        ends_s, cleared = time.monotonic() + CALM_S, False
        while time.monotonic() < ends_s:
            with contextlib.suppress(Failure), Probe(ClientConfig(server=self.server.address)) as probe:
                while time.monotonic() < ends_s:
                    last = probe.statistics()
                    if cleared and not last.l1_used_bytes:
                        return
                    if not (last.leases or last.l1_pinned_bytes or last.sessions):
                        probe.call(Clear(forced=True))
                        cleared = True
                    self._pause.wait(LOOK_S)
            self._pause.wait(LOOK_S)
        raise CampaignError(f"LEAKED: {CALM_S:.0f} s after the last client: {last}\n{self.server.log[-2000:]}")


def shortfall(counts: Mapping[str, int], ordered: int, acts: Mapping[str, int]) -> list[str]:
    """Return in which way a campaign did too little to say anything; empty if it did enough."""
    ops, passed = counts.get("ops", 0), counts.get("messages passed", 0)
    befell = {name: counts.get(f"messages {name}", 0) for name in FAULTS}
    acted = sum(counts.get(act, 0) for act in acts)
    checks = {
        f"only {ops} operations ended": ops >= min(ordered, LEAST_OPS),
        "most operations had no server": ops - counts.get("ops without a server", 0) >= LEAST_WITH_SERVER * ops,
        "hardly a chunk was compared": counts.get("chunks compared", 0) >= LEAST_COMPARED * ops,
        "hardly a message was harmed": sum(befell.values()) >= LEAST_FAULTS * passed,
        "hardly a process was harmed": acted >= passed // MOST_MESSAGES_AN_ACT,
    }
    checks |= {f"no message met with {name}": n or getattr(Rates, name) * passed < SURE for name, n in befell.items()}
    share = acted / sum(acts.values())
    checks |= {f"no {act}": counts.get(act, 0) or weight * share < SURE for act, weight in acts.items()}
    return [text for text, fine in checks.items() if not fine]


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs; where that is not allowed, use plain shared memory, which nobody fills."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MEMORY_BYTES},mode=0700", "kvpool-test", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False) if os.geteuid() == 0 else None
    if done is not None and done.returncode == 0:
        try:
            yield True
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
        return
    folder.rmdir()
    elsewhere = Path(tempfile.mkdtemp(prefix="kvpool-campaign-", dir="/dev/shm"))
    folder.symlink_to(elsewhere)
    try:
        yield False
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def fill(hog: Path) -> None:
    """Take what is left of the tmpfs."""
    with contextlib.suppress(OSError), hog.open("wb", buffering=0) as file:
        while file.write(bytes(MIB)) == MIB:
            pass


def main(arguments: list[str] | None = None) -> int:
    """Run one campaign and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=None)
    o = parser.parse_args(arguments)
    seed = o.seed if o.seed is not None else random.randrange(1 << 31)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is taken down
    say(f"fault campaign: seed {seed}, {o.ops} operations, {o.seconds:g} seconds")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpool-campaign-") as folder:
        campaign = Campaign(Path(folder), seed, o.ops, o.seconds)
        try:
            campaign.run()
        except CampaignError as e:
            say(f"FAILED with seed {seed}: {e}")
            return 1
    say(
        f"{time.monotonic() - began_s:.0f} s; "
        + ", ".join(f"{n} {what}" for what, n in sorted(campaign.counts.items()))
    )
    say("0 wrong bytes, 0 hangs, 0 leaked leases or slots")
    return 0


def say(text: str) -> None:
    """Tell the person who waits."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
