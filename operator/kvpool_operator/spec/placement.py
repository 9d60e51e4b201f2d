# SPDX-License-Identifier: Apache-2.0
"""Where servers run: the parts of Kubernetes' own pod fields that make sense for one pod on each node."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from kvpool_operator.spec.schema_types import KubeName, LabelKey, LabelValue, Rule, Section

__all__ = [
    "Affinity",
    "NodeAffinity",
    "Placement",
    "PreferredTerm",
    "RequiredTerms",
    "Requirement",
    "Term",
    "Toleration",
]


class Toleration(Section, frozen=True, kw_only=True):
    """One taint that servers accept."""

    key: Annotated[str, Meta(max_length=317, description="Empty with operator Exists accepts all taints.")] = ""
    operator: Annotated[Literal["Exists", "Equal"], Meta(description="How the taint's value is compared.")] = "Equal"
    value: Annotated[LabelValue | None, Meta(description="The taint's value; only with Equal.")] = None
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        Meta(description="Not given accepts all effects."),
    ] = None
    toleration_seconds: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="How long; only with NoExecute.")
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.operator != 'Exists' || !has(self.value)", "value: only with operator Equal", ".value"),
        Rule("self.key != '' || self.operator == 'Exists'", "key: needed with operator Equal", ".key"),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds: only with effect NoExecute",
            ".tolerationSeconds",
        ),
    )


class Requirement(Section, frozen=True, kw_only=True):
    """One condition on a node's labels."""

    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.operator in ['Exists', 'DoesNotExist'] ? size(self.values) == 0 : size(self.values) > 0",
            "values: needed with In, NotIn, Gt and Lt, and only with them",
            ".values",
        ),
        Rule(
            "!(self.operator in ['Gt', 'Lt']) || size(self.values) == 1",
            "values: exactly one with Gt and Lt",
            ".values",
        ),
    )


class Term(Section, frozen=True, kw_only=True):
    """Conditions that must all hold."""

    match_expressions: Annotated[tuple[Requirement, ...], Meta(min_length=1, max_length=32)]


class RequiredTerms(Section, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: Annotated[tuple[Term, ...], Meta(min_length=1, max_length=16)]


class PreferredTerm(Section, frozen=True, kw_only=True):
    """A term that counts when nodes are compared."""

    weight: Annotated[int, Meta(ge=1, le=100)]
    preference: Term


class NodeAffinity(
    Section,
    frozen=True,
    kw_only=True,
    rename={
        "required": "requiredDuringSchedulingIgnoredDuringExecution",
        "preferred": "preferredDuringSchedulingIgnoredDuringExecution",
    },
):
    """As in a pod."""

    required: RequiredTerms | None = None
    preferred: Annotated[tuple[PreferredTerm, ...], Meta(max_length=16)] = ()


class Affinity(Section, frozen=True, kw_only=True):
    """Node affinity, as in a pod; between pods it makes no sense for one pod on each node."""

    node_affinity: NodeAffinity | None = None


def _gpu_taint() -> tuple[Toleration, ...]:
    return (Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"),)


class Placement(Section, frozen=True, kw_only=True):
    """Which nodes get a server."""

    node_selector: Annotated[
        dict[LabelKey, LabelValue],
        Meta(max_length=32, description="Labels that a node must have; {} for all nodes."),
    ] = field(default_factory=lambda: {"nvidia.com/gpu.present": "true"})
    affinity: Annotated[Affinity | None, Meta(description="Further conditions on nodes.")] = None
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=32, description="Taints that servers accept.")] = (
        field(default_factory=_gpu_taint)
    )
    priority_class_name: Annotated[
        KubeName | None, Meta(description="Priority class of the servers; not given takes the operator's.")
    ] = None
