"""Words of what commands print."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """(1, "pass", "passes") -> "1 pass", (1234, "token") -> "1,234 tokens"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
