# SPDX-License-Identifier: Apache-2.0
"""From the engine's configuration to facts: what is refused, and what makes two engines different."""

from types import SimpleNamespace

import msgspec
import pytest
from tests.fakes.engine_parts import (
    BLOCK,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    engine_config,
    group,
)

from kvpool.config import ConfigError
from kvpool.connector.plan import GroupFacts, WorkerFacts
from kvpool.connector.translate import (
    EngineGroup,
    NotCacheable,
    client_config,
    engine_facts,
    namespace_of,
    registration,
)
from kvpool.model.identity import GroupKind, GroupSpec, Mode, Role
from kvpool.model.layout import PlaneSpec

PLANES = (PlaneSpec(name="layers.0", block_bytes=64, block_tokens=BLOCK, packing="p"),)
GROUPS = (GroupFacts(planes=PLANES, block_tokens=BLOCK),)


def states(**changes):
    return MambaSpec(**({"block_size": 4 * BLOCK, "mamba_cache_mode": "align"} | changes))


def facts_of(**changes):
    return engine_facts(*engine_config(**changes), hash_tokens=BLOCK, fingerprints=None)


def test_plain_model() -> None:
    facts = facts_of()

    assert facts.namespace.model == "org/name"
    assert facts.namespace.model_fingerprint.startswith("hub:" + "a" * 40)
    assert (facts.namespace.dtype, facts.namespace.kv_dtype) == ("bfloat16", "auto")
    assert facts.namespace.hash_algorithm == "vllm-sha256/4"
    assert (facts.hash_tokens, facts.blocks, facts.strategy.shard) == (BLOCK, 64, 0)
    assert facts.groups == (
        EngineGroup(
            number=0, kind=GroupKind.FULL, window_tokens=0, block_tokens=BLOCK, layers=("layers.0", "layers.1")
        ),
    )


def test_windows_and_states_are_groups_of_their_own() -> None:
    groups = [
        group(FullAttentionSpec(block_size=BLOCK), layer_names=["a"]),
        group(SlidingWindowSpec(block_size=2 * BLOCK, sliding_window=20, extra_retained_tokens=2), layer_names=["b"]),
        group(states(), layer_names=[]),
        group(states(), layer_names=["d"]),
    ]

    facts = facts_of(cache__kv_cache_groups=groups)

    assert [(g.number, g.kind, g.window_tokens, g.block_tokens, g.layers) for g in facts.groups] == [
        (0, GroupKind.FULL, 0, BLOCK, ("a",)),
        (1, GroupKind.WINDOW, 22, 2 * BLOCK, ("b",)),
        (3, GroupKind.STATE, 0, 4 * BLOCK, ("d",)),
    ], "a pipeline stage has those of which it has layers"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_keep_no_cache_change_nothing(method) -> None:
    assert facts_of(speculative_config=SimpleNamespace(method=method)) == facts_of()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_config__enable_prefix_caching": False}, "prefix caching"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"parallel_config__distributed_executor_backend": "external_launcher"}, "external launcher"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative decoding by eagle"),
        ({"cache_config__calculate_kv_scales": True}, "scales"),
        ({"cache_config__is_attention_free": True}, "without attention"),
        ({"model_config__revision": None}, "cannot be identified"),
        ({"cache__kv_cache_groups": []}, "no cache groups"),
        ({"cache__kv_cache_groups": [group(ChunkedLocalAttentionSpec(block_size=4))]}, "ChunkedLocalAttentionSpec"),
        (
            {
                "cache__kv_cache_groups": [
                    group(
                        SimpleNamespace(
                            block_size=4,
                            kv_cache_specs={
                                "a": FullAttentionSpec(block_size=4),
                                "b": SlidingWindowSpec(block_size=4, sliding_window=8),
                            },
                        )
                    )
                ]
            },
            "mix FullAttentionSpec and SlidingWindowSpec",
        ),
        ({"cache__kv_cache_groups": [group(states(mamba_cache_mode="all"))]}, "cache mode all"),
        (
            {
                "speculative_config": SimpleNamespace(method="ngram"),
                "cache__kv_cache_groups": [group(FullAttentionSpec(block_size=BLOCK)), group(states())],
            },
            "states with speculative",
        ),
        ({"cache__kv_cache_groups": [group(FullAttentionSpec(block_size=4), enable_kv_transfer=False)]}, "to itself"),
        (
            {"cache__kv_cache_groups": [group(FullAttentionSpec(block_size=4, prefix_cacheable=False))]},
            "outside the engine's prefix cache",
        ),
        ({"cache__kv_cache_groups": [group(FullAttentionSpec(block_size=4), is_eagle_group=True)]}, "draft"),
        ({"cache__kv_cache_groups": [group(FullAttentionSpec(block_size=4, non_causal=True))]}, "non-causal"),
        ({"cache__kv_cache_groups": [group(FullAttentionSpec(block_size=4), host_resident=True)]}, "host memory"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, words) -> None:
    with pytest.raises(NotCacheable, match=words):
        facts_of(**changes)


def test_layers_of_several_sizes_are_one_group() -> None:
    mixed = SimpleNamespace(
        block_size=BLOCK,
        kv_cache_specs={"a": FullAttentionSpec(block_size=BLOCK), "b": FullAttentionSpec(block_size=BLOCK)},
    )

    assert facts_of(cache__kv_cache_groups=[group(mixed)]).groups[0].block_tokens == BLOCK


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__revision": "b" * 40},
        {"model_config__dtype": "torch.float32"},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"layers": 3})},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"cache_config__prefix_caching_hash_algo": "xxhash"},
        {"parallel_config__tensor_parallel_size": 2},
        {"load_config__load_format": "dummy"},
        {"load_config__load_format": "dummy", "model_config__seed": 1},
    ],
)
@pytest.mark.behaviour("D016", "D017")
def test_each_of_these_makes_another_namespace(changes) -> None:
    assert facts_of(**changes).namespace != facts_of().namespace


def test_random_weights_are_their_seed() -> None:
    dummy = {"load_config__load_format": "dummy", "model_config__revision": None}

    assert facts_of(**dummy).namespace == facts_of(**dummy).namespace
    assert facts_of(**dummy, model_config__seed=1).namespace != facts_of(**dummy).namespace


def test_a_path_in_the_configuration_is_no_identity() -> None:
    moved = {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": "y"})}

    assert facts_of(**moved).namespace == facts_of().namespace


def test_seeded_hashes_are_not_used() -> None:
    facts = facts_of(cache_config__prefix_caching_hash_algo="xxhash")

    assert facts.hash_tokens == 0
    assert facts.namespace.hash_algorithm == "blake3-chain-2"


@pytest.mark.parametrize(
    ("rank", "tp", "replicas", "expected"),
    [
        (0, 1, 1, (0, 1, 1, True)),
        (1, 2, 1, (1, 2, 1, True)),
        (3, 4, 4, (0, 1, 4, False)),
        (0, 4, 4, (0, 1, 4, True)),
        (2, 4, 2, (1, 2, 2, True)),
        (3, 4, 2, (1, 2, 2, False)),
    ],
)
@pytest.mark.behaviour("R001", "R118", "R119")
def test_ranks_that_hold_the_same_share_one_writer(rank, tp, replicas, expected) -> None:
    facts = facts_of(
        parallel_config__rank=rank, parallel_config__tensor_parallel_size=tp, cache__kv_tp_replicas=replicas
    )

    strategy = facts.strategy
    assert (strategy.shard, facts.namespace.shard_count, strategy.readers, strategy.writer) == expected


def test_stages_and_context_parallel_ranks_are_told_apart() -> None:
    staged = [facts_of(parallel_config__rank=r, parallel_config__pipeline_parallel_size=2) for r in range(2)]
    spec = FullAttentionSpec(block_size=BLOCK, dcp_sharded=True)
    split = facts_of(
        parallel_config__tensor_parallel_size=2,
        parallel_config__decode_context_parallel_size=2,
        cache__kv_cache_groups=[group(spec)],
    )

    assert [(f.strategy.stage, f.strategy.shard, f.namespace.parallel) for f in staged] == [
        (0, 0, "tp1 pp2.0"),
        (1, 0, "tp1 pp2.1"),
    ]
    assert (split.namespace.parallel, split.namespace.shard_count) == ("tp2 dcp2.1", 2)
    assert split.groups[0].block_tokens == 2 * BLOCK, "a block of all ranks together"


def test_registration_fits_the_servers_chunk() -> None:
    facts = WorkerFacts(namespace=facts_of().namespace, groups=GROUPS, readers=2)

    register = registration(facts, 16, (1,), (Mode.STREAMED,))

    assert register.groups[0].shard_bytes == 4 * 64
    assert (register.shards, register.readers, register.modes) == ((1,), 2, (Mode.STREAMED,))
    assert register.namespace == namespace_of(facts, 16)


@pytest.mark.behaviour("D016")
@pytest.mark.parametrize("more", [(), (GroupFacts(planes=PLANES, block_tokens=BLOCK, number=1),)])
@pytest.mark.parametrize("change", [{"packing": "amx"}, {"name": "x"}, {"block_bytes": 32}, {"block_tokens": 2}])
def test_engines_whose_blocks_look_different_share_no_namespace(change, more) -> None:
    facts = WorkerFacts(namespace=facts_of().namespace, groups=(*GROUPS, *more))
    planes = (msgspec.structs.replace(PLANES[0], **change), *PLANES[1:])
    other = msgspec.structs.replace(facts, groups=(msgspec.structs.replace(GROUPS[0], planes=planes), *more))

    assert namespace_of(facts, 16) == namespace_of(facts, 16)
    assert namespace_of(other, 16) != namespace_of(facts, 16)
    assert namespace_of(facts, 32) != namespace_of(facts, 16), "chunks of another size"


@pytest.mark.behaviour("R002", "R123", "R124")
def test_each_group_is_registered_with_its_own_kind_and_size() -> None:
    window = GroupFacts(planes=PLANES, block_tokens=2 * BLOCK, kind=GroupKind.WINDOW, window_tokens=20, number=1)
    state = GroupFacts(planes=PLANES, block_tokens=4 * BLOCK, kind=GroupKind.STATE, number=2)
    facts = WorkerFacts(namespace=facts_of().namespace, groups=(*GROUPS, window, state))

    assert facts.block_tokens == 4 * BLOCK, "chunks are whole blocks of every group"
    assert registration(facts, 32, (0,), ()).groups == (
        GroupSpec(kind=GroupKind.FULL, shard_bytes=8 * 64),
        GroupSpec(kind=GroupKind.WINDOW, shard_bytes=4 * 64, window_tokens=20),
        GroupSpec(kind=GroupKind.STATE, shard_bytes=64),
    )
    wider = msgspec.structs.replace(window, window_tokens=24)
    other = msgspec.structs.replace(facts, groups=(*GROUPS, wider, state))
    assert namespace_of(other, 32) != namespace_of(facts, 32)


@pytest.mark.behaviour("R077")
def test_a_scheduler_registers_all_that_its_workers_do_but_the_shard() -> None:
    facts = WorkerFacts(namespace=facts_of().namespace, groups=GROUPS, readers=2)

    worker = registration(facts, 16, (1,), (Mode.STREAMED,))
    scheduler = registration(facts, 16, (0, 1), ())

    assert msgspec.structs.replace(worker, shards=(0, 1), modes=()) == scheduler


@pytest.mark.parametrize(
    ("kv_role", "configured", "role"),
    [
        ("kv_both", {}, Role.BOTH),
        ("kv_both", {"role": "consumer"}, Role.CONSUMER),
        ("kv_producer", {}, Role.PRODUCER),
        ("kv_consumer", {}, Role.CONSUMER),
        ("kv_consumer", {"role": "consumer"}, Role.CONSUMER),
    ],
)
def test_role_is_the_engines_unless_narrowed(kv_role, configured, role) -> None:
    assert client_config(configured, kv_role, {}).role is role


@pytest.mark.parametrize(
    ("extra", "kv_role", "environ", "words"),
    [
        ({"role": "producer"}, "kv_consumer", {}, "role: producer contradicts"),
        ({"serverr": "ipc:///x"}, "kv_both", {}, "serverr"),
        ({"server": "localhost"}, "kv_both", {}, "server"),
        ({"server": object()}, "kv_both", {}, "plain JSON"),
        ({}, "kv_both", {"KVPOOL_CLIENT__LOOKUP_S": "soon"}, "KVPOOL_CLIENT__LOOKUP_S"),
    ],
)
@pytest.mark.behaviour("R121")
def test_a_wrong_setting_is_named(extra, kv_role, environ, words) -> None:
    with pytest.raises(ConfigError, match=words):
        client_config(extra, kv_role, environ)


@pytest.mark.behaviour("D081")
def test_the_environment_overrides() -> None:
    config = client_config({"server": "ipc:///a", "lookup_s": 3}, "kv_both", {"KVPOOL_CLIENT__SERVER": "ipc:///b"})

    assert (config.server, config.lookup_s) == ("ipc:///b", 3.0)
