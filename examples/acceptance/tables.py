"""Print what study.py measured as the tables of the README.

python examples/acceptance/tables.py study.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

RUNS = (("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="study.json")
    study = json.loads(parser.parse_args().study.read_text(encoding="utf-8"))
    print("\n".join(lines(study)))


def lines(study: dict[str, Any]) -> list[str]:
    """Acceptance lengths by draft length and rule, a blank line, and the drafter run in other ways."""
    settings = study["settings"]
    cells = {
        (c["variant"], c["k"], c["draft"], c["verify"]): c for c in study["cells"] if c["top_p"] == settings["top_p"]
    }
    lengths = sorted({k for _, k, *_ in cells})
    result = ["| drafts a step | " + " | ".join(f"{d}, {v}" for d, v in RUNS) + " |", "|---" * (1 + len(RUNS)) + "|"]
    for k in lengths:
        result.append(f"| {k} | " + " | ".join(length(cells["as trained", k, *run]) for run in RUNS) + " |")
    variants = [c for (_, k, *run), c in cells.items() if k == lengths[-1] and tuple(run) == RUNS[0]]
    result += ["", "| " + " | ".join(c["variant"] for c in variants) + " |", "|---" * len(variants) + "|"]
    result.append("| " + " | ".join(map(length, variants)) + " |")
    return result


def length(cell: dict[str, Any]) -> str:
    """Acceptance length and half its interval."""
    low, high = cell["interval"]
    return f"{cell['mean_acceptance_length']:.2f} ± {(high - low) / 2:.2f}"


if __name__ == "__main__":
    main()
