# SPDX-License-Identifier: Apache-2.0
"""Digests of requests: what must be different is, what cannot be identified is not cached."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import msgspec
import pytest
from tests.fakes.engine_parts import CHUNK, NAMESPACE, FakeRequest, chunk_keys

from kvpool.model.errors import InvalidRange

TOKENS = list(range(40))


def lora(name):
    return SimpleNamespace(lora_name=name)


def image(identifier, offset, length=4):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def request(**changes):
    return FakeRequest("r", TOKENS, **changes)


def digests(made, keys=None):
    return (keys or chunk_keys()).extend(made, b"", made.num_tokens)


@pytest.mark.behaviour("R070", "R072")
@pytest.mark.parametrize("hash_tokens", [0, 4])
def test_full_chunks_only_and_in_pieces_as_at_once(hash_tokens) -> None:
    keys = chunk_keys(hash_tokens=hash_tokens)
    whole = keys.extend(request(), b"", 40)

    first = keys.extend(request(), b"", CHUNK)

    assert len(whole) == 2 * 32
    assert len(first) == 32
    assert keys.extend(request(), first, 40) == whole
    assert keys.extend(request(), whole, 40) == whole
    assert keys.extend(request(), whole, CHUNK) == whole, "a step computes less than was looked up"
    assert keys.extend(request(), b"", CHUNK - 1) == b""


def test_no_more_chunks_than_the_engine_has_hashed() -> None:
    ahead = request()

    assert len(chunk_keys().extend(ahead, b"", 400)) == 2 * 32


@pytest.mark.parametrize("hash_tokens", [0, 4])
@pytest.mark.behaviour("R076", "D017")
def test_pairs_that_must_differ(hash_tokens) -> None:
    keys = chunk_keys(hash_tokens=hash_tokens)
    variants = {
        "plain": digests(request(), keys),
        "salt a": digests(request(cache_salt="a"), keys),
        "salt b": digests(request(cache_salt="b"), keys),
        "adapter": digests(request(lora_request=lora("x")), keys),
        "retrained adapter": digests(
            request(lora_request=lora("x")), chunk_keys(hash_tokens=hash_tokens, adapter="another")
        ),
        "tokens": digests(FakeRequest("r", [1, *TOKENS[1:]]), keys),
    }
    if not hash_tokens:
        variants |= {
            "image": digests(request(mm_features=[image("x", 2)]), keys),
            "other image": digests(request(mm_features=[image("y", 2)]), keys),
            "image elsewhere": digests(request(mm_features=[image("x", 3)]), keys),
            "namespace": digests(
                request(), chunk_keys(hash_tokens=0, namespace=msgspec.structs.replace(NAMESPACE, model="other"))
            ),
        }

    for (name, one), (other_name, other) in combinations(variants.items(), 2):
        for chunk in range(2):
            assert one[chunk * 32 : chunk * 32 + 32] != other[chunk * 32 : chunk * 32 + 32], f"{name} and {other_name}"


@pytest.mark.behaviour("R078", "D008")
def test_nothing_is_remembered_by_request_id() -> None:
    keys = chunk_keys()
    before = digests(request(), keys)

    assert digests(FakeRequest("r", TOKENS[::-1]), keys) != before
    assert digests(replace(request(), request_id="other"), keys) == before


@pytest.mark.behaviour("R100")
@pytest.mark.parametrize("hash_tokens", [0, 4])
def test_a_missing_salt_is_no_salt(hash_tokens) -> None:
    keys = chunk_keys(hash_tokens=hash_tokens)

    assert digests(request(cache_salt=None), keys) == digests(request(cache_salt=""), keys)


def test_an_image_in_a_later_chunk_leaves_earlier_ones_alone() -> None:
    keys = chunk_keys(hash_tokens=0)

    plain, with_image = digests(request(), keys), digests(request(mm_features=[image("x", 20)]), keys)

    assert plain[:32] == with_image[:32]
    assert plain[32:] != with_image[32:]


def test_an_image_over_a_boundary_counts_in_both_chunks() -> None:
    keys = chunk_keys(hash_tokens=0)
    over = digests(request(mm_features=[image("x", 14, 4)]), keys)
    before = digests(request(mm_features=[image("x", 12, 4)]), keys)

    assert over[:32] != before[:32]
    assert over[32:] != before[32:]


@pytest.mark.parametrize(
    ("keys", "made", "words"),
    [
        (chunk_keys(), request(resumable=True), "grows"),
        (chunk_keys(adapter=None), request(lora_request=lora("x")), "adapter"),
        (chunk_keys(hash_tokens=0), request(prompt_embeds=object()), "embeddings"),
    ],
)
def test_what_cannot_be_identified_is_not_cached(keys, made, words) -> None:
    assert words in keys.objection(made)


def test_what_can_be_identified_is_cached() -> None:
    assert chunk_keys().objection(request(lora_request=lora("x"), cache_salt="a")) == ""
    assert chunk_keys().objection(request(prompt_embeds=object())) == ""


@pytest.mark.behaviour("R073")
def test_short_hashes_are_refused() -> None:
    short = SimpleNamespace(block_hashes=[b"x" * 16] * 8, lora_request=None, num_tokens=32)

    with pytest.raises(InvalidRange, match="32 bytes wide"):
        chunk_keys().extend(short, b"", 32)
