# SPDX-License-Identifier: Apache-2.0
"""An offline vLLM engine that takes one JSON command a line on stdin and answers each with one line; see ``harness``.

Runs in the engine's environment. What vLLM prints goes to stderr; the answers alone go to the original stdout.
"""

import json
import os
import sys
from time import perf_counter
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


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


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": p["ids"], **({"cache_salt": p["salt"]} if p.get("salt") else {})}
        for p in command["prompts"]
    ]
    started = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
        "reasons": [o.outputs[0].finish_reason for o in outputs],
        "first_s": [o.metrics.first_token_latency if o.metrics else None for o in outputs],
        "seconds": perf_counter() - started,
    }


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
            if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
                # Nothing but a call steps the engine then, and blocks are held until their stores are done.
                llm.llm_engine.step()
            return llm.reset_prefix_cache()
        case "damage":
            DAMAGED[:] = command["place"]
            return None
        case "metrics":
            return metrics(llm)
    raise ValueError(command)


def main() -> None:
    llm = start(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=ANSWERS)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=ANSWERS)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
