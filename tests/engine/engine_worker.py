# SPDX-License-Identifier: Apache-2.0
"""An offline vLLM engine that takes one JSON command a line on stdin and answers each with one line; see ``harness``.

Runs in the engine's environment. What vLLM prints goes to stderr; the answers alone go to the original stdout.
With the number of a socket as its argument it is the ``nursery``, and forks such engines.
"""

import atexit
import json
import os
import signal
import socket
import sys
import traceback
from threading import Event
from time import perf_counter
from typing import Any

SETTLE_S = 10.0


def start(options: dict[str, Any]) -> Any:
    damage_what_is_told()
    from vllm import LLM

    return LLM(**options)


DAMAGED: list[int] = []
"""(group, layer, or -1 for all) of what is loaded that becomes zeros: the negative control of all token comparisons."""


def damage_what_is_told() -> None:
    import numpy as np

    from kvpool.transfer.host import HostBlocks

    scatter = HostBlocks.scatter

    def damaged(self: Any, group: int, block_ids: Any, skip_blocks: int, data: memoryview) -> None:
        if DAMAGED and group == DAMAGED[0]:
            chunk = np.frombuffer(data, dtype=np.uint8).copy()
            layer = DAMAGED[1] if DAMAGED[1] >= 0 else slice(None)
            chunk.reshape(len(self._groups[group].layout.planes), -1)[layer] = 0
            data = memoryview(chunk)
        scatter(self, group, block_ids, skip_blocks, data)

    HostBlocks.scatter = damaged


def as_prompt(ids: list[int], salt: str = "", image: int | None = None) -> dict[str, Any]:
    """A prompt as the engine takes it; *image* is the seed of a random picture."""
    made: dict[str, Any] = {"prompt_token_ids": ids}
    if salt:
        made["cache_salt"] = salt
    if image is not None:
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(image).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        made["multi_modal_data"] = {"image": Image.fromarray(pixels)}
    return made


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [as_prompt(**p) for p in command["prompts"]]
    started = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - started
    settle(llm)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
        "reasons": [o.outputs[0].finish_reason for o in outputs],
        "first_s": [o.metrics.first_token_latency if o.metrics else None for o in outputs],
        "seconds": seconds,
    }


def settle(llm: Any) -> None:
    """Let stores end that the engine holds blocks for: in this process nothing but a call steps it."""
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        return
    scheduler, ends = llm.llm_engine.engine_core.engine_core.scheduler, perf_counter() + SETTLE_S
    pause = Event()
    while scheduler.requests and perf_counter() < ends:
        llm.llm_engine.step()
        pause.wait(0.001)


def metrics(llm: Any) -> dict[str, float]:
    """Counters and gauges as ``name{label="value"}``, without the labels that every series has."""
    found = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
            found[f"{metric.name}{{{text}}}" if text else metric.name] = float(metric.value)
    return found


def answer(llm: Any, command: dict[str, Any]) -> Any:
    match command["do"]:
        case "generate":
            return generate(llm, command)
        case "reset":
            settle(llm)
            return llm.reset_prefix_cache()
        case "damage":
            DAMAGED[:] = command["place"]
            return None
        case "metrics":
            return metrics(llm)
    raise ValueError(command)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = start(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=answers)
    llm.llm_engine.engine_core.shutdown()


def fork_engines(asked: socket.socket) -> bool:
    """Fork an engine for each message; True in the child, False at the end."""
    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 3)
        if not message:
            return False
        pid = os.fork()
        if not pid:
            asked.close()
            become(json.loads(message), descriptors)
            return True
        handle = os.pidfd_open(pid)
        socket.send_fds(asked, [str(pid).encode()], [handle])
        for descriptor in (handle, *descriptors):
            os.close(descriptor)


def import_all() -> None:
    """Import what every engine does, and start nothing."""
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker
    from vllm import LLM, SamplingParams

    del vllm, LLM, SamplingParams


def become(told: dict[str, Any], descriptors: list[int]) -> None:
    """Be a process of one's own: session, signals, standard streams, environment, folder."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(told["environ"])
    os.chdir(told["folder"])


def serve_and_leave() -> None:
    """End as a program does, but for taking apart all that was imported: in a fork that first copies it."""
    try:
        serve()
    except BaseException:  # noqa: BLE001 - told as the interpreter would
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    if len(sys.argv) == 1:
        serve()
    elif fork_engines(socket.socket(fileno=int(sys.argv[1]))):
        serve_and_leave()


if __name__ == "__main__":
    main()
