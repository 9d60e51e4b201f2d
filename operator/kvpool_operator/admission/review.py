# SPDX-License-Identifier: Apache-2.0
"""Pure: an AdmissionReview in, its answer out. Wiring decides; a pod is refused only if it asked for that."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvpool_operator.admission.pools import Known
from kvpool_operator.wiring import Outcome, Situation, wanted_pool, wire

__all__ = ["BadReviewError", "Reviewed", "Reviewer"]

_REQUIRED: Final = ("kvpool.dev/wiring", "required")
"""The label of pods that are rather refused than left unwired."""


class BadReviewError(Exception):
    """The request is no AdmissionReview of a pod."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The answer, and what to count it as."""

    body: bytes
    result: str


@dataclass(frozen=True, slots=True)
class Reviewer:
    """Answers reviews.

    Args:
        pools: the pool of a namespace and name; None if there is none.
        payload_image: of pools that name none.
    """

    pools: Callable[[tuple[str, str]], Known | None]
    payload_image: str

    def __call__(self, raw: bytes, *, host_folders: bool) -> Reviewed:
        """Answer *raw*; *host_folders* says whether the pod's namespace lets pods mount folders of the node.

        Raises:
            BadReviewError: it cannot be read.
        """
        try:
            request = msgspec.json.decode(raw)["request"]
            uid, pod = str(request["uid"]), request["object"]
            namespace = str(request["namespace"])
            known = self.pools(wanted_pool(pod, namespace))
            required = (pod["metadata"].get("labels") or {}).get(_REQUIRED[0]) == _REQUIRED[1]
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as e:
            raise BadReviewError(f"no review of a pod: {type(e).__name__}") from e
        situation = Situation(
            namespace=namespace,
            pool=known[0] if known else None,
            server_key=known[1] if known else "",
            host_folders=host_folders,
            payload_image=self.payload_image,
        )
        outcome = wire(pod, situation)
        refused = required and outcome.skip is not None
        return Reviewed(_review(_answer(uid, outcome, refused=refused)), "refused" if refused else _result(outcome))


def _result(outcome: Outcome) -> str:
    if outcome.skip is not None:
        return "skipped"
    return "noted" if outcome.notes else "wired"


def _answer(uid: str, outcome: Outcome, *, refused: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"uid": uid, "allowed": not refused}
    if outcome.warnings:
        answer["warnings"] = list(outcome.warnings)
    if refused:
        text = f"the pod has the label {_REQUIRED[0]}={_REQUIRED[1]}; {outcome.warnings[0]}"
        return answer | {"status": {"code": HTTPStatus.FORBIDDEN, "reason": "Forbidden", "message": text}}
    if outcome.patch:
        patch = base64.b64encode(msgspec.json.encode(outcome.patch)).decode()
        answer |= {"patchType": "JSONPatch", "patch": patch}
    reasons = [outcome.skip] if outcome.skip else outcome.notes
    return answer | {"auditAnnotations": {"wiring": ",".join(reasons) or "Complete"}}


def _review(answer: Mapping[str, Any]) -> bytes:
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
    return msgspec.json.encode(review)
