# SPDX-License-Identifier: Apache-2.0
"""One place for all stories of a run; a story that needs what the cluster cannot do is skipped with that as reason.

Any other skip is unexpected. With KVPOOL_EXPECT_CLUSTER set it fails the run, and so does a cluster that is not there.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.portable.providers import CAPABILITIES, Place, Provider, Unavailable, provider

HERE = Path(__file__).parent
LACKS = "the cluster lacks"
UNEXPECTED = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNEXPECTED] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips of the stories must have the one reason that a cluster may have."""
    report = yield
    if report.skipped and HERE in item.path.parents and LACKS not in str(report.longrepr):
        item.config.stash[UNEXPECTED].append(f"{item.nodeid}: {report.longrepr}")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Unexpected skips fail the run where a cluster was promised."""
    found = session.config.stash[UNEXPECTED]
    if found and os.environ.get("KVPOOL_EXPECT_CLUSTER"):
        print("\nunexpected skips:", *found, sep="\n  ")  # noqa: T201 - after pytest's own summary nobody else says it
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def cluster() -> Provider:
    """The cluster of this run."""
    return provider()


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest, cluster: Provider) -> None:
    """Skip what the cluster cannot do."""
    wanted = {str(word) for mark in request.node.iter_markers("needs") for word in mark.args}
    assert wanted <= set(CAPABILITIES), "a capability that nobody declares"
    if missing := sorted(wanted - cluster.capabilities):
        pytest.skip(f"{LACKS} {', '.join(missing)} ({cluster.name})")


@pytest.fixture(scope="session")
def place(cluster: Provider) -> Iterator[Place]:
    """Where the stories happen."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(cluster.place())
        except Unavailable as e:
            pytest.skip(str(e))
        yield made
