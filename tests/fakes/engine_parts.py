# SPDX-License-Identifier: Apache-2.0
"""Values shaped like vLLM's, and the connector's ports without a server."""

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace

from kvpool.client.jobs import Answer, Finished
from kvpool.connector.chunks import ChunkKeys
from kvpool.connector.plan import GroupFacts
from kvpool.model.identity import Namespace

BLOCK = 4
CHUNK = 16
PER_CHUNK = CHUNK // BLOCK

GROUPS = (GroupFacts(planes=(), block_tokens=BLOCK),)
"""An engine with full attention alone."""

NAMESPACE = Namespace(
    model="m", model_fingerprint="f", dtype="float32", kv_dtype="auto", layout="l", hash_algorithm="vllm-sha256/4"
)


class FullAttentionSpec(SimpleNamespace):
    """vLLM's name counts, not its class."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


def engine_config(**changes):
    """A VllmConfig and a KVCacheConfig of a plain model; *changes* are ``section__field=value``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/name",
            model_weights="",
            revision="a" * 40,
            dtype="torch.bfloat16",
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": "x"}),
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            is_attention_free=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            nnodes_within_dp=1,
            distributed_executor_backend="mp",
            rank=0,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    cache = SimpleNamespace(
        num_blocks=64, kv_tp_replicas=1, kv_cache_groups=[group(FullAttentionSpec(block_size=BLOCK))]
    )
    for path, value in changes.items():
        target = cache if path.startswith("cache__") else config
        *sections, name = path.removeprefix("cache__").split("__")
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return config, cache


def group(spec, **changes):
    values = {"layer_names": ["layers.0", "layers.1"], "is_eagle_group": False, "host_resident": False}
    return SimpleNamespace(kv_cache_spec=spec, **(values | changes))


@dataclass
class FakeRequest:
    """What the connector reads of a vLLM request; block hashes chain salt, adapter name and tokens as vLLM's do."""

    request_id: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict | None = None

    @property
    def all_token_ids(self):
        return self.prompt + self.output

    @property
    def num_tokens(self):
        return len(self.prompt) + len(self.output)

    @property
    def num_prompt_tokens(self):
        return len(self.prompt)

    @property
    def block_hashes(self):
        parent = (self.cache_salt or "").encode()
        if self.lora_request is not None:
            parent += self.lora_request.lora_name.encode()
        hashes, tokens = [], self.all_token_ids
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = hashlib.sha256(parent + repr(tokens[start : start + BLOCK]).encode()).digest()
            hashes.append(parent)
        return hashes


def chunk_keys(*, hash_tokens=BLOCK, namespace=NAMESPACE, adapter="fingerprint", chunk_tokens=CHUNK):
    return ChunkKeys(namespace, chunk_tokens=chunk_tokens, hash_tokens=hash_tokens, identify_adapter=lambda _: adapter)


class FakeLookups:
    """A scheduler adapter over a set of digests; answers come when ``settle`` is called."""

    def __init__(self):
        self.held = set()
        self.calls = []
        self.open = {}
        self.answers = {}
        self.clears = []
        self.prompt = True
        """True: answers are there at once."""

    def lookup(self, request_id, digests, shards):  # noqa: ARG002
        assert request_id not in self.open, "a former lookup was not released"
        self.calls.append(("lookup", request_id))
        self.open[request_id] = digests
        if self.prompt:
            self.settle()

    def settle(self):
        for request_id, digests in self.open.items():
            if request_id not in self.answers:
                chunks = 0
                while digests[chunks * 32 : chunks * 32 + 32] in self.held:
                    chunks += 1
                self.answers[request_id] = Answer(chunks, request_id.encode() if chunks else b"")

    def answer(self, request_id):
        return self.answers.get(request_id)

    def free(self, request_id, first, end):
        self.calls.append(("free", request_id, first, end))

    def release(self, request_id):
        self.calls.append(("release", request_id))
        self.open.pop(request_id, None)
        self.answers.pop(request_id, None)

    def end(self, request_id):
        self.calls.append(("end", request_id))
        self.open.pop(request_id, None)
        self.answers.pop(request_id, None)

    def clear(self, model):
        self.calls.append(("clear", model))
        return self.clears

    def forget_failed(self, request_id):
        self.calls.append(("forget_failed", request_id))
        self.release(request_id)


class FakeTransfers:
    """A worker adapter whose jobs run when the test says so."""

    def __init__(self):
        self.stores = []
        self.loads = []
        self.finished = {}
        self.cancelled = []
        self.settled = []
        self.closed = 0
        self.cancels = True

    def store(self, job):
        self.stores.append(job)

    def load(self, job):
        self.loads.append(job)

    def end_load(self, request_id, bad=()):
        self.loads = [j for j in self.loads if j.request_id != request_id]
        self.finished[request_id] = frozenset(bad)

    def end_stores(self, request_id):
        self.stores = [j for j in self.stores if j.request_id != request_id]

    def poll(self):
        loaded, self.finished = self.finished, {}
        return Finished(frozenset(), loaded)

    def has_stores(self, request_id):
        return any(j.request_id == request_id for j in self.stores)

    def cancel_stores(self, request_ids, timeout_s):  # noqa: ARG002
        if self.cancels:
            self.cancelled += sorted(request_ids)
            self.stores = [j for j in self.stores if j.request_id not in set(request_ids)]
        return self.cancels

    def counters(self):
        return {}

    def settle_stores(self, jobs, patience_s, timeout_s):  # noqa: ARG002
        self.settled.append([job.group for job in jobs])
        return self.cancels

    def close(self, timeout_s):  # noqa: ARG002
        self.closed += 1
        self.stores, self.loads = [], []
