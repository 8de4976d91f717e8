"""Oracles for the sampling tests: numpy in float64, sorting and enumerating; nothing here comes from the library."""

import pathlib

import numpy as np
from scipy import stats

DATA = pathlib.Path(__file__).parents[1] / "data" / "sampling"
PATH_FILES = sorted(path.stem for path in DATA.glob("*.npz") if path.stem != "edge_rows")
# One false alarm in a million runs of a correct sampler; the seeds are fixed, so a pass stays a pass.
CHI_SQUARE_LEVEL = 1e-6


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def log_softmax(x: np.ndarray) -> np.ndarray:
    peak = x.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return x - peak - np.log(np.exp(x - peak).sum(axis=-1, keepdims=True))


def kept_tokens(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The tokens [V] that the filters keep, by sorting: equal tokens stand or fall together."""
    z = (logits.astype(np.float64) - logits.max()) / temperature
    with np.errstate(divide="ignore"):
        kept = (z >= np.log(min_p)) & (z > -np.inf)
    if top_k > 0:
        kept &= z >= np.sort(z[kept])[::-1][: min(top_k, kept.sum())][-1]
    if top_p < 1:
        ranked = np.sort(z[kept])[::-1]
        mass = np.cumsum(np.exp(ranked))
        kept &= z >= ranked[np.searchsorted(mass / mass[-1], top_p)]
    return kept


def filtered_log_probs(logits: np.ndarray, **filters: float) -> np.ndarray:
    """What a row is sampled from, in float64."""
    z = (logits.astype(np.float64) - logits.max()) / filters.get("temperature", 1.0)
    return log_softmax(np.where(kept_tokens(logits, **filters), z, -np.inf))


def emitted_law(golden: dict[str, np.ndarray], num_accepted_probs: np.ndarray, final: np.ndarray) -> list[np.ndarray]:
    """Pr(i drafts accepted and these i + 1 tokens emitted), i = 0..K, for every model: [M] + [V] * (i + 1)."""
    models = golden["joint"].shape[0]
    vocab = golden["joint"].shape[1]
    slots = golden["draft_tokens"].shape[1]
    laws = []
    for i in range(slots + 1):
        law = np.zeros((models,) + (vocab,) * (i + 1))
        for row in np.nonzero(golden["draft_lengths"] >= i)[0]:
            path = tuple(golden["draft_tokens"][row, :i])
            law[(golden["model_index"][row], *path)] += (
                golden["weights"][row] * num_accepted_probs[row, i] * final[row, i]
            )
        laws.append(law)
    return laws


def distance_from_target(golden: dict[str, np.ndarray], laws: list[np.ndarray]) -> np.ndarray:
    """Total variation [M] between the target's joint law and the emitted tokens continued by the target."""
    joint = golden["joint"]
    total = np.zeros_like(joint)
    for i, law in enumerate(laws):
        later = tuple(range(i + 2, joint.ndim))
        start = joint.sum(axis=later, keepdims=True)
        continuation = np.divide(joint, start, out=np.zeros_like(joint), where=start > 0)
        total += law.reshape(law.shape + (1,) * len(later)) * continuation
    axes = tuple(range(1, joint.ndim))
    lost = np.maximum(0, 1 - total.sum(axis=axes))
    return 0.5 * (np.abs(total - joint).sum(axis=axes) + lost)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Statistic and critical value of observed counts; cells that expect fewer than 5 are merged into one."""
    counts, expected = counts.ravel().astype(np.float64), expected.ravel()
    assert counts[expected == 0].sum() == 0, "an impossible outcome was drawn"
    small = expected < 5
    cells = [(counts[~small], expected[~small])]
    if expected[small].sum() > 0:
        cells.append((counts[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    observed, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    statistic = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-300)).sum())
    return statistic, float(stats.chi2.isf(CHI_SQUARE_LEVEL, len(wanted) - 1))
