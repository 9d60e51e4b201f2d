# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations: text in the resource, numbers everywhere else."""

import re
from decimal import Decimal
from typing import Final, Self

__all__ = ["DURATION_PATTERN", "QUANTITY_PATTERN", "Duration", "Size", "binary"]

QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
DURATION_PATTERN: Final = r"^[0-9]+(ms|s|m|h)$"

_POWERS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)
}
_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Size(int):
    """Bytes, read from a quantity such as ``64Gi``."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read *value*, a whole number of bytes or a quantity.

        Raises:
            ValueError: it is neither.
        """
        match = re.fullmatch(QUANTITY_PATTERN, str(value))
        if isinstance(value, bool) or match is None:
            raise ValueError(f"{value!r} is no size; write bytes, or a number with a suffix such as 512Mi or 64Gi")
        suffix = match[2] or ""
        return cls(Decimal(str(value).removesuffix(suffix)) * _POWERS[suffix])


class Duration(float):
    """Seconds, read from text such as ``90s``."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read *value*.

        Raises:
            ValueError: it is no duration.
        """
        match = re.fullmatch(DURATION_PATTERN, value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{value!r} is no duration; write a whole number with ms, s, m or h, such as 90s")
        return cls(int(match[0].removesuffix(match[1])) * _SECONDS[match[1]])


def binary(size_bytes: int) -> str:
    """Write *size_bytes* for people, with the three digits that matter: ``1.5Gi``."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_SUFFIXES) - 1)
    value = size_bytes / 1024**power
    digits = max(0, 3 - len(str(int(value)))) if power else 0
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if digits else text) + _SUFFIXES[power]
