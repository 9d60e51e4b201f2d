# SPDX-License-Identifier: Apache-2.0
"""The error tree: unique codes, and the same class on both ends of the wire."""

from collections.abc import Iterator

import pytest

from kvpool.model import errors
from kvpool.model.errors import BY_CODE, CacheError
from kvpool.wire.codec import encode_failure, error_of
from kvpool.wire.messages import Failed


def tree(cls: type[CacheError] = CacheError) -> Iterator[type[CacheError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


def test_codes_are_unique() -> None:
    coded = [cls for cls in tree() if "code" in vars(cls)]

    assert len(coded) == len({cls.code for cls in coded}) == len(BY_CODE)


@pytest.mark.parametrize("cls", BY_CODE.values(), ids=lambda c: c.__name__)
def test_an_error_crosses_the_wire_as_its_own_class(cls: type[CacheError]) -> None:
    back = error_of(encode_failure(cls("what happened")))

    assert type(back) is cls
    assert str(back) == "what happened"


def test_a_code_of_a_later_version_is_still_a_cache_error() -> None:
    assert type(error_of(Failed(code="from_the_future"))) is CacheError


def test_the_drawing_names_every_class() -> None:
    drawn = (errors.__doc__ or "").split()

    assert {cls.__name__ for cls in tree()} <= set(drawn)
