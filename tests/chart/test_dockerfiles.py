# SPDX-License-Identifier: Apache-2.0
"""What can be said of the images without building them (tests/cluster/test_images.py builds them)."""

import fnmatch
from pathlib import Path

import pytest
from tools import images
from tools.images import IMAGES, ROOT, ImageError

from kvpool_operator.desired.daemon_set import USER

FILES = [ROOT / i.dockerfile for i in IMAGES.values()]


def steps(file: Path, word: str) -> list[str]:
    """Arguments of each instruction *word*."""
    lines = file.read_text().splitlines()
    return [line.removeprefix(word).strip() for line in lines if line.startswith(f"{word} ")]


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_last_user_is_a_number_and_the_pods_own(file: Path) -> None:
    assert steps(file, "USER") == [f"{USER}:{USER}"]
    assert file.read_text().index("USER ") > file.read_text().rindex("FROM ")


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_base_is_an_argument_with_a_version(file: Path) -> None:
    arguments = dict(a.split("=", 1) for a in steps(file, "ARG"))

    assert {f.split()[0] for f in steps(file, "FROM")} <= {"${BASE_IMAGE}", "${BUILD_IMAGE}"}
    for name in ("BASE_IMAGE", "BUILD_IMAGE"):
        assert ":" in arguments[name] or arguments[name] == "${BASE_IMAGE}"
        assert not arguments[name].endswith(":latest")


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_built_files_reach_the_last_stage(file: Path) -> None:
    last = file.read_text()[file.read_text().rindex("FROM ") :]

    assert [line for line in last.splitlines() if line.startswith(("COPY", "ADD", "RUN"))] == [
        line for line in last.splitlines() if line.startswith("COPY --from=build ")
    ]


@pytest.mark.parametrize("name", ["operator", "server"])
def test_a_change_of_the_sources_installs_no_dependency_again(name: str) -> None:
    text = (ROOT / IMAGES[name].dockerfile).read_text()
    before, _, after = text.partition("COPY . .\n")

    assert "--requirement" in before
    assert "--constraint" in before
    assert "--no-deps" in after


def test_the_context_holds_what_the_wheel_is_made_of_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]

    assert "*" in lines
    assert sorted(kept) == [
        "LICENSE",
        "README.md",
        "cacheserver",
        "operator",
        "pyproject.toml",
        "requirements-dev.lock",
    ]
    assert all((ROOT / name).exists() for name in kept)
    assert any(fnmatch.fnmatch("cacheserver/__pycache__", line) for line in lines)


def test_without_a_builder_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ImageError, match=r"buildah is not installed; docker is not installed"):
        images.choose()


def test_where_docker_is_the_builder_it_gets_the_same_files_and_the_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(images, "buildah", _no_buildah)
    for name in ("PIP_CERT", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)

    assert images.main(["--registry", "registry.example/team/", "--tag", "9", "--base-image", "base:1"]) == 0

    references = [f"registry.example/team/{image.name}:9" for image in IMAGES.values()]
    assert capsys.readouterr().out.split() == references
    asked, *builds = (tmp_path / "calls").read_text().splitlines()
    assert asked == "version"
    for call, image, reference in zip(builds, IMAGES.values(), references, strict=True):
        assert call == (
            "build --build-arg BASE_IMAGE=base:1 --build-arg BUILD_IMAGE=base:1 "
            f"--file {ROOT / image.dockerfile} --tag {reference} {ROOT}"
        )
    assert images.main(["--local-base"]) == 1
    assert "--local-base needs buildah" in capsys.readouterr().err


def _no_buildah() -> images.Builder:
    raise ImageError("buildah is not installed")


def test_a_builder_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    with pytest.raises(ImageError, match="docker does not answer: Cannot connect to the daemon"):
        images.docker()
