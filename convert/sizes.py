"""Sizes in bytes as people write and read them."""

import math
import re

MIB = 1 << 20


def format_bytes(n: int, *, up: bool = False) -> str:
    """Bytes as MiB or GiB; `up` rounds up, so that the text can be passed as an option."""
    unit, name = (1 << 30, "GiB") if n >= 10 << 30 else (MIB, "MiB")
    return f"{math.ceil(n / unit) if up else round(n / unit, 1):g}{name}"


def parse_bytes(text: str) -> int:
    """ "8GiB", "500 MB", "123456" -> bytes. Raises `ValueError` with a sentence."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no size; write for example 8GiB or 500MB")
    base = 1024 if match[3] else 1000
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * base**power)
