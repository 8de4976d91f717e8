"""Draw what study.py measured.

    python examples/acceptance/plots.py study.json --out DIR

Writes length.png (acceptance length by draft length and rule), positions.png (per-position rates), ablations.png (the
drafter run in other ways than it was trained, and other drafters) and calibration.png (the confidence head). Error bars
are 95 % intervals.
"""

import argparse
import itertools
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

# Colours that remain apart for colour-blind readers (Okabe and Ito), and markers for print.
RUNS = {
    ("ancestral", "block"): ("ancestral drafts, block rule", "#0072B2", "o"),
    ("ancestral", "standard"): ("ancestral drafts, standard rule", "#E69F00", "s"),
    ("greedy", "match"): ("greedy drafts, match rule", "#009E73", "^"),
}
VARIANTS = ("#0072B2", "#D55E00", "#CC79A7", "#999999", "#56B4E9", "#F0E442", "#E69F00", "#009E73", "#000000")
MARKERS = "osD^vPX*<"
FIGURES: dict[str, Any] = {}


def figure(draw):
    """Register a function that draws a study as the figure of its name."""
    FIGURES[draw.__name__] = draw
    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="study.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    plt.switch_backend("Agg")  # to files, without a display
    study = json.loads(options.study.read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        file = options.out / f"{name}.png"
        picture = draw(study)
        # No date or version inside: the same study gives the same file.
        picture.savefig(file, dpi=110, metadata={"Software": None})
        plt.close(picture)
        print(f"{file}: {file.stat().st_size:,} bytes")


def cells(study: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Settings of the study with these fields; the study's own filter unless another is named."""
    wanted = {"top_p": study["settings"]["top_p"], **wanted}
    return [c for c in study["cells"] if all(c[k] == v for k, v in wanted.items())]


def conditions(study: dict[str, Any], with_top_p: bool = True) -> str:
    """One line that says what was measured."""
    s = study["settings"]
    return (
        f"{study['checkpoint']['name']}: {s['prompts']} held-out prompts, {s['max_new_tokens']} new tokens, "
        f"temperature {s['temperature']:g}" + f", top-p {s['top_p']:g}; bars are 95 % over prompts" * with_top_p
    )


def errors(values: list[float], intervals: list[list[float]]) -> np.ndarray:
    """Distances to the ends of intervals, as `errorbar` takes them."""
    low, high = np.asarray(intervals).T
    return np.stack([np.asarray(values) - low, high - np.asarray(values)]).clip(0)


def panels(
    count: int, study: dict[str, Any], title: str, width: float | None = None, with_top_p: bool = True, **options: Any
):
    """A figure with a row of plots, a title, and the conditions under it."""
    width = width or (7.2 if count == 1 else 10.5)
    picture, axes = plt.subplots(1, count, figsize=(width, 4.4), layout="constrained", **options)
    picture.suptitle(f"{title}\n", fontsize=12, fontweight="bold")
    picture.text(0.5, 0.925, conditions(study, with_top_p), ha="center", fontsize=8.5, color="#555555")
    for axis in np.atleast_1d(axes):
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return picture, axes


@figure
def length(study: dict[str, Any]):
    """Acceptance length by draft length and rule."""
    picture, axis = panels(1, study, "Acceptance length by draft length and rule")
    for offset, ((draft, verify), (label, color, marker)) in zip((0, -0.06, 0.06), RUNS.items(), strict=True):
        rows = cells(study, variant="as trained", draft=draft, verify=verify)
        k = np.asarray([r["k"] for r in rows])
        values = [r["mean_acceptance_length"] for r in rows]
        spread = errors(values, [r["interval"] for r in rows])
        axis.errorbar(k + offset, values, yerr=spread, color=color, marker=marker, capsize=2.5, label=label, ms=5)
        axis.annotate(
            f"{values[-1]:.2f}",
            (k[-1], values[-1]),
            xytext=(12, 0),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=9,
        )
    axis.set_xticks(k)
    axis.margins(x=0.08)
    axis.set_xlabel("drafts verified in a step (K)")
    axis.set_ylabel("acceptance length (tokens a verify step)")
    axis.legend(frameon=False, loc="upper left")
    return picture


@figure
def positions(study: dict[str, Any]):
    """Rates by slot, for the longest block."""
    picture, (left, right) = panels(2, study, "Acceptance by slot, longest block")
    k = study["settings"]["block_size"]
    for (draft, verify), (label, color, marker) in RUNS.items():
        (row,) = cells(study, variant="as trained", draft=draft, verify=verify, k=k)
        slots = np.arange(1, k + 1)
        rates = row["acceptance_rate_per_position"]
        spread = errors(rates, row["acceptance_rate_interval"])
        left.errorbar(slots, rates, yerr=spread, color=color, marker=marker, ms=5, capsize=2.5, label=label)
        right.plot(slots, row["conditional_acceptance_rate_per_position"], color=color, marker=marker, ms=5)
    left.set_ylabel("steps that accept this slot and all before it")
    right.set_ylabel("accepted, of steps that accept all before it")
    for axis in (left, right):
        axis.set_xlabel("slot of the block")
        axis.set_xticks(slots)
        axis.set_ylim(0, 1)
    left.legend(frameon=False, loc="upper right")
    return picture


@figure
def ablations(study: dict[str, Any]):
    """The drafter run in other ways than it was trained, and other drafters."""
    k = study["settings"]["block_size"]
    rows = cells(study, draft="ancestral", verify="block", k=k)
    several = len(rows) > 6
    picture, (left, right) = panels(
        2,
        study,
        (
            "The drafter run in other ways, and other drafters"
            if several
            else "What the drafter loses when it is run otherwise"
        )
        + " (ancestral drafts, block rule)",
        width=8 + 0.55 * len(rows),
        width_ratios=(max(len(rows), 5), 5),
    )
    names = [r["variant"] for r in rows]
    shown = [textwrap.fill(n, 10, break_long_words=False) for n in names]
    values = [r["mean_acceptance_length"] for r in rows]
    colors = list(itertools.islice(itertools.cycle(VARIANTS), len(rows)))
    spread = errors(values, [r["interval"] for r in rows])
    bars = left.bar(shown, values, yerr=spread, color=colors, capsize=4, width=0.65, error_kw={"ecolor": "#333333"})
    left.bar_label(bars, [f"{v:.2f}" for v in values], padding=3, fontsize=9)
    left.set_ylabel("acceptance length (tokens a verify step)")
    left.tick_params(axis="x", labelsize=8.5)
    left.margins(y=0.12)
    for row, color, marker in zip(rows, colors, itertools.cycle(MARKERS), strict=False):
        rates = row["acceptance_rate_per_position"]
        right.plot(range(1, k + 1), rates, color=color, marker=marker, ms=5, label=row["variant"])
    right.set_xlabel("slot of the block")
    right.set_ylabel("steps that accept this slot and all before it")
    right.set_ylim(0, 1)
    right.legend(frameon=False)
    return picture


@figure
def calibration(study: dict[str, Any]):
    """Confidence against what happened (standard rule, whose acceptance it was trained to foretell)."""
    laws = list(study["calibration"].items())
    picture, axes = panels(
        1 + len(laws),
        study,
        "Calibration of the confidence head (ancestral drafts, standard rule)",
        with_top_p=False,
    )
    slots = len(laws[0][1]) if laws else 0
    colors = plt.cm.viridis(np.linspace(0, 0.9, slots))
    for axis, (law, rows) in zip(np.atleast_1d(axes), laws, strict=False):
        axis.plot([0, 1], [0, 1], color="#333333", linewidth=0.8, linestyle=":")
        for i, (row, color) in enumerate(zip(rows, colors, strict=True)):
            points = [(c, r) for n, c, r in row["bins"] if n >= 50]
            if points:
                axis.plot(*zip(*points, strict=True), color=color, marker="o", ms=3.5, label=f"slot {i + 1}")
        axis.set_title(f"reliability, {law.replace('_', '-')}", fontsize=10)
        axis.set_xlabel("confidence (mean of a bin)")
        axis.set_ylabel("share accepted")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        if len(axis.lines) > 1:
            axis.legend(frameon=False, fontsize=8, loc="upper left")
    last = np.atleast_1d(axes)[-1]
    width = 0.8 / max(len(laws), 1)
    for i, ((law, rows), color) in enumerate(zip(laws, ("#0072B2", "#E69F00"), strict=False)):
        where = np.arange(1, slots + 1) + (i - (len(laws) - 1) / 2) * width
        last.bar(where, [r["ece"] for r in rows], width, color=color, label=law.replace("_", "-"))
    last.set_title("expected calibration error", fontsize=10)
    last.set_xlabel("slot of the block")
    last.set_ylabel("mean |confidence - share accepted|")
    last.set_xticks(range(1, slots + 1))
    if laws:
        last.legend(frameon=False, fontsize=8)
    return picture


if __name__ == "__main__":
    main()
