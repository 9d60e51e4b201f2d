# SPDX-License-Identifier: Apache-2.0
"""docs/install.md shows pools that are valid, values that exist, and the names that things really have."""

import re
import subprocess

import yaml
from tests.chart.rendering import Helm, identity, rights
from tools.chart import DEPLOY, ROOT
from tools.images import IMAGES

from kvpool_operator.spec import parse_pool

GUIDE = (ROOT / "docs" / "install.md").read_text()


def test_its_pools_are_valid() -> None:
    pools = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)]

    assert pools
    for body in pools:
        body["metadata"] |= {"uid": "u", "generation": 1}
        pool = parse_pool(body)
        assert pool.name == "main"
        assert pool.spec.clients.payload is not None, "no image of vLLM has the connector by itself"


def test_its_values_exist(helm: Helm) -> None:
    given = re.findall(r"--set (\S+=\S+)", GUIDE) + re.findall(r"`((?:crds|metrics)\.[\w.]+=\w+)`", GUIDE)

    assert len(given) >= 3
    for value in given:
        helm.template(None, "--set", value)


def test_what_it_deletes_is_what_the_file_brings() -> None:
    brought = {f"{kind.lower()} {name}" for kind, _, name in map(identity, yaml.safe_load_all(DEPLOY.read_text()))}

    for word, kind in (("crd", "customresourcedefinition"), ("priorityclass",) * 2, ("deployment",) * 2):
        (name,) = re.findall(rf"delete {word} (\S+?)`?\.?$", GUIDE, re.MULTILINE)
        assert f"{kind} {name}" in brought


def test_it_names_every_image() -> None:
    assert all(f"`{image.name}`" in GUIDE for image in IMAGES.values())


def test_its_way_to_name_a_registry_for_kubectl_names_it_for_every_image() -> None:
    (script,) = re.findall(r"^sed '(.+)' deploy/kvpool\.yaml \| kubectl apply --server-side -f -$", GUIDE, re.MULTILINE)
    command = ["sed", script, str(DEPLOY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    images = re.findall(r"\S*kvpool-(?:operator|server|payload):\S+", text)
    assert len(images) == 4
    assert all(i.lstrip('"').startswith("registry.example/team/kvpool-") for i in images)
    assert text.replace("registry.example/team/", "") == DEPLOY.read_text()


WORDS = {
    "kvcachepools": "pools",
    "kvcachepools/status": "their status",
    "pods/eviction": "evict",
    "runtimeclasses": "runtime classes",
    "leases": "lease",
}
"""What the guide calls them."""


def test_its_tables_of_rights_name_everything_that_is_granted(helm: Helm) -> None:
    said = GUIDE.partition("## What the operator may do")[2].partition("\n## ")[0].lower()
    roles = [
        o for o in helm.template() if o["kind"] in ("ClusterRole", "Role") and ":pool-" not in o["metadata"]["name"]
    ]
    granted = {(group, resource) for role in roles for group, resource, _, _ in rights(role["rules"])}

    assert len(granted) > 15
    assert not [r for _, r in sorted(granted) if WORDS.get(r, r.removesuffix("s")) not in said]
