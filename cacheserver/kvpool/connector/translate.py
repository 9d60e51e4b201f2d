# SPDX-License-Identifier: Apache-2.0
"""Turns the engine's configuration into frozen facts; nothing behind it sees the engine's shapes.

What is not known to be safe is refused by name: the engine then runs uncached, with one line that says why.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import msgspec

from kvpool.config import ClientConfig, ConfigError, decode_client
from kvpool.connector.fingerprint import Unidentified, model_fingerprint
from kvpool.connector.groups import blocks_per_chunk
from kvpool.connector.plan import GroupFacts, WorkerFacts
from kvpool.connector.strategy import NotParallel, ParallelStrategy
from kvpool.model.identity import GroupKind, GroupSpec, Mode, Namespace, Role
from kvpool.model.keys import BLAKE3_CHAIN, DIGEST_BYTES
from kvpool.model.layout import layout_fingerprint, layouts_fingerprint
from kvpool.wire.messages import Register

__all__ = [
    "EngineFacts",
    "EngineGroup",
    "NotCacheable",
    "client_config",
    "engine_facts",
    "namespace_of",
    "registration",
]

_ROLES: Final = {"kv_both": Role.BOTH, "kv_producer": Role.PRODUCER, "kv_consumer": Role.CONSUMER}
_WIDE_HASHES: Final = ("sha256", "sha256_cbor")
_NO_MATTER: Final = ("_name_or_path", "transformers_version")
_KINDS: Final = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "MambaSpec": GroupKind.STATE,
}
_DRAFTS_WITHOUT_CACHE: Final = ("ngram", "ngram_gpu", "suffix")


class NotCacheable(Exception):
    """This engine cannot use the cache; the text names the feature and, where there is one, the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """One of the engine's cache groups, as far as this rank holds it."""

    number: int
    kind: GroupKind
    window_tokens: int
    block_tokens: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the connector needs to know about its engine; the same on all ranks but for the shard."""

    namespace: Namespace
    """Without the layout's fingerprint."""

    hash_tokens: int
    """Tokens that one of the engine's own block hashes covers; 0 if those cannot be used."""

    blocks: int
    groups: tuple[EngineGroup, ...]
    strategy: ParallelStrategy


def client_config(extra: Mapping[str, Any], kv_role: str, environ: Mapping[str, str]) -> ClientConfig:
    """Read the connector's extra configuration (the fields of ``ClientConfig``, flat), then the environment.

    Raises:
        ConfigError: a field is unknown or wrong, or the role contradicts the engine's ``kv_role``.
    """
    try:
        data = msgspec.json.encode(dict(extra))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"kv_connector_extra_config: {e}; it must be a plain JSON object") from e
    config = decode_client(data, environ)
    role = _ROLES[kv_role]
    if role is Role.BOTH or config.role is role:
        return config
    if config.role is Role.BOTH:
        return msgspec.structs.replace(config, role=role)
    raise ConfigError(f"role: {config.role} contradicts the engine's kv_role {kv_role}; set only one of them")


def engine_facts(vllm: Any, cache: Any, *, hash_tokens: int, fingerprints: Path | None) -> EngineFacts:
    """Translate the engine's configuration.

    Args:
        vllm: the engine's configuration (``VllmConfig``).
        cache: its cache configuration (``KVCacheConfig``).
        hash_tokens: tokens that one of the engine's block hashes covers.
        fingerprints: folder that remembers digests of weight files.

    Raises:
        NotCacheable: the engine uses something that is not supported, or its model cannot be identified.
    """
    _check_features(vllm)
    strategy = _strategy(vllm.parallel_config, int(cache.kv_tp_replicas))
    groups = tuple(_groups(cache, strategy))
    if vllm.speculative_config is not None and any(group.kind is GroupKind.STATE for group in groups):
        raise NotCacheable("recurrent states with speculative decoding are not supported")
    algorithm = vllm.cache_config.prefix_caching_hash_algo
    hash_tokens = hash_tokens if algorithm in _WIDE_HASHES else 0
    name = vllm.model_config.model
    return EngineFacts(
        namespace=Namespace(
            model=Path(name).name if Path(name).exists() else name,
            model_fingerprint=_identity(vllm, fingerprints),
            dtype=_plain(vllm.model_config.dtype),
            kv_dtype=_plain(vllm.cache_config.cache_dtype),
            layout="",
            hash_algorithm=f"vllm-{algorithm}/{hash_tokens}" if hash_tokens else BLAKE3_CHAIN,
            shard_count=strategy.shard_count,
            parallel=strategy.text,
        ),
        hash_tokens=hash_tokens,
        blocks=cache.num_blocks,
        groups=groups,
        strategy=strategy,
    )


def _strategy(parallel: Any, replicas: int) -> ParallelStrategy:
    try:
        return ParallelStrategy(
            rank=parallel.rank,
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=parallel.prefill_context_parallel_size,
            interleave_tokens=parallel.cp_kv_cache_interleave_size,
            replicas=replicas,
            nodes=parallel.nnodes_within_dp,
            launcher=str(parallel.distributed_executor_backend or ""),
        )
    except NotParallel as e:
        raise NotCacheable(str(e)) from e


def _block_tokens(spec: Any, strategy: ParallelStrategy) -> int:
    """Tokens of one block of all ranks together: context parallel ranks have a part of it each."""
    shared = strategy.decode_context if getattr(spec, "dcp_sharded", False) else 1
    return int(spec.block_size) * shared


def _groups(cache: Any, strategy: ParallelStrategy) -> Iterator[EngineGroup]:
    """Yield the groups that this rank holds layers of."""
    if not cache.kv_cache_groups:
        raise NotCacheable("the model has no cache groups")
    for number, group in enumerate(cache.kv_cache_groups):
        kind, window_tokens = _kind(group)
        if group.layer_names:
            yield EngineGroup(
                number=number,
                kind=kind,
                window_tokens=window_tokens,
                block_tokens=_block_tokens(group.kv_cache_spec, strategy),
                layers=tuple(group.layer_names),
            )


def _kind(group: Any) -> tuple[GroupKind, int]:
    """Return what a group is, and its window in tokens."""
    specs = [*_specs(group.kv_cache_spec)]
    names = sorted({type(s).__name__ for s in specs})
    if unknown := [name for name in names if name not in _KINDS]:
        raise NotCacheable(f"cache groups of kind {', '.join(unknown)} are not supported, only {', '.join(_KINDS)}")
    kinds = {_KINDS[name] for name in names}
    for what, used in (
        (f"cache groups that mix {' and '.join(names)}", len(kinds) != 1),
        ("cache groups of draft layers", group.is_eagle_group),
        ("cache groups in host memory", group.host_resident),
        ("cache groups that the engine keeps to itself", not getattr(group, "enable_kv_transfer", True)),
        (
            "cache groups outside the engine's prefix cache",
            not all(getattr(s, "prefix_cacheable", True) for s in specs),
        ),
        ("non-causal attention", any(getattr(s, "non_causal", False) for s in specs)),
    ):
        if used:
            raise NotCacheable(f"{what} are not supported")
    (kind,) = kinds
    if kind is GroupKind.STATE:
        _check_states(specs)
    windows = {s.sliding_window + getattr(s, "extra_retained_tokens", 0) for s in specs if kind is GroupKind.WINDOW}
    if len(windows) > 1:
        raise NotCacheable(f"a cache group with windows of {sorted(windows)} tokens is not supported")
    return kind, max(windows, default=0)


def _check_states(specs: Iterable[Any]) -> None:
    """Recurrent states are restored from where the engine saves them: at the ends of its blocks."""
    for spec in specs:
        if spec.mamba_cache_mode != "align":
            raise NotCacheable(
                f"recurrent states in cache mode {spec.mamba_cache_mode} are not supported, only in align "
                "(--mamba-cache-mode align, with prefix caching)"
            )


def _specs(spec: Any) -> Iterator[Any]:
    """Yield the layers' own specs of a group whose layers differ in size, else the one of all."""
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()


def _check_features(vllm: Any) -> None:
    cache = vllm.cache_config
    if not cache.enable_prefix_caching:
        raise NotCacheable("prefix caching is switched off in the engine, which it also is where hits are not exact")
    if cache.is_attention_free:
        raise NotCacheable("models without attention are not supported")
    speculative = vllm.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_CACHE:
        raise NotCacheable(
            f"speculative decoding by {speculative.method} is not supported: its draft keeps a cache of its own that "
            f"no identity covers; {', '.join(_DRAFTS_WITHOUT_CACHE)} are"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise NotCacheable("scales calculated at run time are no part of any identity; give the model's own, or none")


def _identity(vllm: Any, fingerprints: Path | None) -> str:
    """Weights, and everything in the configuration that changes what they compute."""
    model = vllm.model_config
    effective = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in ("_name_or_path", "transformers_version")
    }
    parts = [json.dumps(effective, sort_keys=True, default=str), str(model.quantization)]
    if str(vllm.load_config.load_format) in ("dummy", "LoadFormat.DUMMY"):
        return f"random:{model.seed}:{_digest(parts)}"
    try:
        weights = model_fingerprint(model.model_weights or model.model, model.revision, fingerprints)
    except (Unidentified, OSError) as e:
        raise NotCacheable(f"the model's weights cannot be identified: {e}") from e
    return f"{weights}:{_digest(parts)}"


def _digest(parts: list[str]) -> str:
    return blake3.blake3(msgspec.msgpack.encode(parts)).hexdigest(length=DIGEST_BYTES // 2)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def namespace_of(facts: WorkerFacts, chunk_tokens: int) -> Namespace:
    """Complete the namespace for one size of chunks."""
    assert facts.namespace is not None
    if facts.by_block:
        layout = layout_fingerprint(facts.groups[0].planes, chunk_tokens)
    else:
        layout = layouts_fingerprint(tuple((g.kind, g.window_tokens, g.planes) for g in facts.groups), chunk_tokens)
    return msgspec.structs.replace(facts.namespace, layout=layout)


def registration(facts: WorkerFacts, chunk_tokens: int, shards: tuple[int, ...], modes: tuple[Mode, ...]) -> Register:
    """Return what a worker (one shard, its modes) or a scheduler (all shards, no modes) registers."""
    return Register(
        namespace=namespace_of(facts, chunk_tokens),
        groups=tuple(
            GroupSpec(kind=g.kind, shard_bytes=_chunk_bytes(g, chunk_tokens), window_tokens=g.window_tokens)
            for g in facts.groups
        ),
        shards=shards,
        readers=facts.readers,
        modes=modes,
    )


def _chunk_bytes(group: GroupFacts, chunk_tokens: int) -> int:
    return sum(plane.block_bytes for plane in group.planes) * blocks_per_chunk(group, chunk_tokens)
