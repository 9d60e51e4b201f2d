# SPDX-License-Identifier: Apache-2.0
import pytest

from kvpool_operator.answers import error_of, undeclared
from kvpool_operator.errors import Busy

REFUSED = (
    b'{"message": "failed to create typed patch object (team/a; kvpool.dev/v1alpha1, Kind=KVCachePool): '
    b'.status.%s: field not declared in schema"}'
)


@pytest.mark.parametrize(("path", "section"), [(b"serverKey", "serverKey"), (b"servers.updated", "servers")])
def test_the_section_that_an_older_schema_does_not_know_is_named(path: bytes, section: str) -> None:
    error = error_of("PATCH /status", 500, REFUSED % path, {})

    assert isinstance(error, Busy)
    assert undeclared(str(error)) == section


@pytest.mark.parametrize("text", ["etcdserver: request timed out", ".spec.l1: field not declared in schema"])
def test_other_errors_name_none(text: str) -> None:
    assert undeclared(str(error_of("PATCH /status", 500, text, {}))) is None
