# SPDX-License-Identifier: Apache-2.0
"""The one key builder: golden vectors, and everything that must make a difference does."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.model.errors import InvalidRange
from kvpool.model.identity import Namespace
from kvpool.model.keys import (
    BLAKE3_CHAIN,
    DIGEST_BYTES,
    chunk_digests,
    digest_list,
    extend_digests,
    root_digest,
    scope_digest,
    self_test,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "keys" / "vectors.json"
NAMESPACE = Namespace(
    model="org/model",
    model_fingerprint="0123abcd",
    dtype="float32",
    kv_dtype="auto",
    layout="11" * 32,
    hash_algorithm=BLAKE3_CHAIN,
    shard_count=2,
    parallel="tp2",
)


def vectors() -> dict[str, object]:
    root = root_digest(NAMESPACE)
    tokens = np.array([0, 1, 2, 0xFFFFFFFF, 5, 6, 7, 8, 9], dtype=np.uint32)
    return {
        "self_test": self_test().hex(),
        "root": root.hex(),
        "scope": scope_digest("tenant-a", NAMESPACE).hex(),
        "chunks_of_4": [d.hex() for d in digest_list(chunk_digests(root, tokens, 4))],
        "chunks_of_4_salted": [d.hex() for d in digest_list(chunk_digests(root, tokens, 4, (b"salt",)))],
    }


@pytest.mark.behaviour("R070", "R074")
def test_keys_match_the_committed_vectors() -> None:
    assert vectors() == json.loads(GOLDEN.read_text())


@pytest.mark.behaviour("R074")
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    code = "from kvpool.model.keys import self_test; print(self_test().hex())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
    )

    assert done.stdout.strip() == self_test().hex()


@pytest.mark.behaviour("D016", "D017")
@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_every_field_of_a_namespace_separates(field: str) -> None:
    value = getattr(NAMESPACE, field)
    other = msgspec.structs.replace(NAMESPACE, **{field: value + 1 if isinstance(value, int) else value + "x"})

    assert root_digest(other) != root_digest(NAMESPACE)
    assert scope_digest("t", other) != scope_digest("t", NAMESPACE)


def test_a_tenant_separates_scopes() -> None:
    assert scope_digest("a", NAMESPACE) != scope_digest("b", NAMESPACE)


@pytest.mark.behaviour("R072")
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.integers(0, 6))
def test_extending_equals_hashing_at_once(ids: list[int], chunk_tokens: int, known: int) -> None:
    tokens = np.array(ids, dtype=np.uint32)
    root = root_digest(NAMESPACE)
    whole = chunk_digests(root, tokens, chunk_tokens)
    known = min(known, len(tokens) // chunk_tokens)

    assert extend_digests(root, whole[: known * DIGEST_BYTES], tokens, chunk_tokens) == whole


@pytest.mark.behaviour("R070", "R071")
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 9), st.data())
def test_a_changed_token_changes_its_chunk_and_all_behind_it_only(
    ids: list[int], chunk_tokens: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    tokens = np.array(ids, dtype=np.uint32)
    changed = tokens.copy()
    changed[at] ^= 1
    root = root_digest(NAMESPACE)

    before = digest_list(chunk_digests(root, tokens, chunk_tokens))
    after = digest_list(chunk_digests(root, changed, chunk_tokens))

    assert len(before) == len(ids) // chunk_tokens
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // chunk_tokens for i in range(len(before))]


def test_an_extra_key_cannot_be_mistaken_for_tokens() -> None:
    root = root_digest(NAMESPACE)
    plain = chunk_digests(root, np.array([7, 8], dtype=np.uint32), 2)
    moved = chunk_digests(root, np.array([8], dtype=np.uint32), 1, (np.array([7], dtype="<u4").tobytes(),))

    twice = digest_list(chunk_digests(root, np.array([7, 8], dtype=np.uint32), 1))

    assert plain != moved
    assert twice[1] != moved


@pytest.mark.behaviour("D038")
@pytest.mark.parametrize("known", [b"x", bytes(3 * DIGEST_BYTES)])
def test_known_digests_that_do_not_fit_are_refused(known: bytes) -> None:
    with pytest.raises(InvalidRange):
        extend_digests(root_digest(NAMESPACE), known, np.zeros(4, dtype=np.uint32), 2)


@pytest.mark.behaviour("R073")
def test_a_frame_of_digests_must_be_whole() -> None:
    with pytest.raises(InvalidRange, match="33 bytes"):
        digest_list(bytes(33))
    assert digest_list(bytes(64)) == [bytes(32), bytes(32)]
