# SPDX-License-Identifier: Apache-2.0
"""One real engine process of the demo; runs in the engine's own environment, with kvpool's connector configured.

It reads one order (JSON) from its input, starts vLLM in this process, answers "ready", then runs one prompt for each
line of token ids (JSON) that it reads and answers with the seconds to the first token and all tokens. It ends at the
end of its input. What vLLM itself prints goes to standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from vllm import LLM, SamplingParams

__all__ = ["main"]


def main() -> int:
    """Serve prompts until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.readline())
    engine = LLM(model=str(Path(order["model"])), **order["options"]).llm_engine
    _say(answers, {"ready": True})
    for number, line in enumerate(sys.stdin):
        _say(answers, _run(engine, str(number), json.loads(line), order["output_tokens"]))
    return 0


def _run(engine: Any, name: str, tokens: list[int], output_tokens: int) -> dict[str, Any]:
    """Run one prompt alone; time counts from the moment the engine gets it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    start, first_s, output = time.perf_counter(), 0.0, None
    engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not first_s and output.outputs[0].token_ids:
                first_s = time.perf_counter() - start
    assert output is not None
    return {"ttft_s": first_s, "tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0}


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    sys.exit(main())
