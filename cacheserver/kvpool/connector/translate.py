# SPDX-License-Identifier: Apache-2.0
"""Turns the engine's configuration into frozen facts; nothing behind it sees the engine's shapes.

What is not known to be safe is refused by name: the engine then runs uncached, with one line that says why.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import msgspec

from kvpool.config import ClientConfig, ConfigError, decode_client
from kvpool.connector.fingerprint import Unidentified, model_fingerprint
from kvpool.connector.plan import WorkerFacts
from kvpool.connector.strategy import NotParallel, ParallelStrategy
from kvpool.model.identity import GroupKind, GroupSpec, Mode, Namespace, Role
from kvpool.model.keys import BLAKE3_CHAIN, DIGEST_BYTES
from kvpool.model.layout import PlaneSpec, layout_fingerprint
from kvpool.wire.messages import Register

__all__ = ["EngineFacts", "NotCacheable", "client_config", "engine_facts", "namespace_of", "registration"]

_ROLES: Final = {"kv_both": Role.BOTH, "kv_producer": Role.PRODUCER, "kv_consumer": Role.CONSUMER}
_WIDE_HASHES: Final = ("sha256", "sha256_cbor")
_NO_MATTER: Final = ("_name_or_path", "transformers_version")
_FULL: Final = ("FullAttentionSpec", "MLAAttentionSpec")


class NotCacheable(Exception):
    """This engine cannot use the cache; the text names the feature and, where there is one, the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the connector needs to know about its engine; the same on all ranks but for the shard."""

    namespace: Namespace
    """Without the layout's fingerprint."""

    block_tokens: int
    hash_tokens: int
    """Tokens that one of the engine's own block hashes covers; 0 if those cannot be used."""

    blocks: int
    layers: tuple[str, ...]
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
    group = _only_group(vllm, cache)
    _check_features(vllm)
    strategy = _strategy(vllm.parallel_config, int(cache.kv_tp_replicas))
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
        block_tokens=_block_tokens(group.kv_cache_spec, strategy),
        hash_tokens=hash_tokens,
        blocks=cache.num_blocks,
        layers=tuple(group.layer_names),
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


def _only_group(vllm: Any, cache: Any) -> Any:
    groups = cache.kv_cache_groups
    kinds = sorted({kind for g in groups for kind in _kinds(g.kv_cache_spec)})
    if len(groups) != 1:
        raise NotCacheable(
            f"the model has {len(groups)} cache groups ({', '.join(kinds)}); this version supports one group of full "
            "attention (where the engine allows it, --disable-hybrid-kv-cache-manager makes one of them)"
        )
    if unknown := [kind for kind in kinds if kind not in _FULL]:
        raise NotCacheable(f"cache groups of kind {', '.join(unknown)} are not supported, only {' and '.join(_FULL)}")
    for what, used in (
        ("cache groups of draft layers", groups[0].is_eagle_group),
        ("cache groups in host memory", groups[0].host_resident),
        ("non-causal attention", any(getattr(s, "non_causal", False) for s in _specs(groups[0].kv_cache_spec))),
        ("models without attention", vllm.cache_config.is_attention_free),
    ):
        if used:
            raise NotCacheable(f"{what} are not supported")
    return groups[0]


def _specs(spec: Any) -> Iterator[Any]:
    """Yield the layers' own specs of a group whose layers differ in size, else the one of all."""
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()


def _kinds(spec: Any) -> set[str]:
    return {type(s).__name__ for s in _specs(spec)}


def _check_features(vllm: Any) -> None:
    cache = vllm.cache_config
    if not cache.enable_prefix_caching:
        raise NotCacheable("prefix caching is switched off in the engine, which it also is where hits are not exact")
    if vllm.speculative_config is not None:
        raise NotCacheable("speculative decoding is not supported by this version")
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
    return msgspec.structs.replace(facts.namespace, layout=layout_fingerprint(facts.planes, chunk_tokens))


def registration(facts: WorkerFacts, chunk_tokens: int, shards: tuple[int, ...], modes: tuple[Mode, ...]) -> Register:
    """Return what a worker (one shard, its modes) or a scheduler (all shards, no modes) registers."""
    blocks = chunk_tokens // facts.block_tokens
    return Register(
        namespace=namespace_of(facts, chunk_tokens),
        groups=(GroupSpec(kind=GroupKind.FULL, shard_bytes=_block_bytes(facts.planes) * blocks),),
        shards=shards,
        readers=facts.readers,
        modes=modes,
    )


def _block_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return sum(plane.block_bytes for plane in planes)
