"""Inputs of `filter_floors`, and its oracle: numpy in float64, with a sort."""

import numpy as np

# Sums of 200,064 float32 terms: so near to top_p of the mass, a token may fall on either side.
MASS_TOLERANCE = 3e-6
# float32 exponentials of scores down to -50, and the sum; relative beyond 1.
LOG_MASS_TOLERANCE = 5e-6
LARGEST = np.finfo(np.float32).max

# Temperature, top_k, top_p and min_p of four requests each.
FILTERS = {
    "top-p": dict(temperature=[1.0, 0.1, 0.7, 3.0], top_p=[0.95, 0.9, 0.5, 0.99]),
    "top-p at its ends": dict(temperature=[1.0, 0.5, 1.0, 2.0], top_p=[1e-6, 1e-6, 1 - 1e-7, 1 - 1e-7]),
    "top-k": dict(temperature=[1.0, 0.1, 0.7, 3.0], top_k=[1, 40, 5, 1000]),
    "top-k of nearly all": dict(temperature=[1.0, 0.5, 1.0, 2.0], top_k=[-1, -2, -1, -2]),  # V and V - 1
    "top-k, then top-p": dict(temperature=[1.0, 0.8, 1.2, 1.0], top_k=[40, 3, 2500, 700], top_p=[0.95, 0.5, 0.8, 0.9]),
    "min-p": dict(min_p=[0.05, 0.3, 1e-6, 0.9]),
    "everything": dict(temperature=[1.0, 0.6, 1.5, 1.0], top_k=[50, 7, 900, 300], top_p=[0.9, 0.7, 0.95, 0.4],
                       min_p=[0.01, 0.05, 0.002, 0.0]),
    "some rows only": dict(temperature=[1.0, 0.0, 0.7, 1.0], top_k=[0, 3, 20, 0], top_p=[1.0, 0.5, 1.0, 0.8],
                           min_p=[0.0, 0.1, 0.0, 0.2]),
}  # fmt: skip


def settings(name: str, vocab: int) -> dict[str, np.ndarray]:
    """float32 arrays [4], top_k int32; negative values of top_k count from the vocabulary."""
    given = {"temperature": [1.0] * 4, "top_k": [0] * 4, "top_p": [1.0] * 4, "min_p": [0.0] * 4} | FILTERS[name]
    top_k = np.array([k if k >= 0 else vocab + 1 + k for k in given.pop("top_k")], np.int32)
    return {key: np.array(values, np.float32) for key, values in given.items()} | {"top_k": top_k}


def rows(vocab: int, seed: int) -> dict[str, np.ndarray]:
    """Named rows of logits [V]."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=vocab)
    peaked = 2 * normal
    peaked[rng.choice(vocab, 3, replace=False)] = [17.0, 16.5, 16.0]
    alone = np.full(vocab, -np.inf)
    alone[vocab // 3] = 2.0
    holes = 3 * normal
    holes[::7] = np.nan
    holes[1::7] = -np.inf
    holes[5] = np.inf
    outlier = 2 * normal
    outlier[-(vocab // 50) :] = -1e30
    heads = np.minimum(2 * normal, 2.0)  # equal ones at the top
    made = {
        "flat": 0.02 * normal,
        "normal": normal,
        "wide": 4 * normal,
        "peaked": peaked,
        "zipf": -1.1 * np.log(rng.permutation(vocab) + 1.0),
        "zipf in order": -1.1 * np.log(np.arange(vocab) + 1.0),
        "steps": np.round(4 * normal) / 4,
        "equal at the top": heads,
        "all equal": np.full(vocab, 1.25),
        "one finite": alone,
        "none finite": np.where(np.arange(vocab) % 2, np.nan, -np.inf),
        "nan and inf": holes,
        "far outliers": outlier,
    }
    return {name: row.astype(np.float32) for name, row in made.items()}


def clean(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(logits), -np.inf, np.minimum(logits.astype(np.float32), LARGEST)).astype(np.float32)


def kept_tokens(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V] of scores [V], in this order: min-p, top-k of all tokens, top-p of what is left."""
    with np.errstate(divide="ignore"):
        floor = np.log(min_p)
    finite = np.sort(z[z > -np.inf])[::-1]
    if 0 < top_k <= len(finite):
        floor = max(floor, finite[top_k - 1])
    if top_p < 1:
        left = finite[finite >= floor]
        mass = np.cumsum(np.exp(left))
        floor = left[min(np.searchsorted(mass, top_p * mass[-1]), len(left) - 1)]
    return (z >= floor) & (z > -np.inf)


def problem(logits: np.ndarray, found: tuple, b: int, n: int, setting: dict, keep=kept_tokens) -> str | None:
    """What is wrong with row (b, n) of `found` (peak, floor, log mass, best), if anything."""
    x = clean(logits)
    peak, floor, log_mass, best = (np.asarray(part)[b, n] for part in found)
    if not (x > -np.inf).any():
        return None if peak == 0 and not log_mass > -np.inf else "a row without a finite logit has a law"
    if peak != x.max():
        return f"the peak is {x.max()}, not {peak}"
    temperature, top_p, min_p = (float(setting[name][b]) for name in ("temperature", "top_p", "min_p"))
    if temperature < 1e-5:
        return None if best == x.argmax() else f"the best token is {x.argmax()}, not {best}"
    with np.errstate(over="ignore"):
        z = (x - peak) * (np.float32(1) / np.float32(temperature))
    kept = (z >= floor) & (z > -np.inf)
    exact = z.astype(np.float64)
    for sign, wrong in ((-1, "{} tokens are missing"), (1, "{} tokens are too many")):
        near = top_p if top_p >= 1 else float(np.clip(top_p * (1 + sign * MASS_TOLERANCE), 1e-12, 1.0))
        least = min_p * (1 - sign * MASS_TOLERANCE)
        wanted = keep(exact, top_k=int(setting["top_k"][b]), top_p=near, min_p=least)
        astray = wanted & ~kept if sign < 0 else kept & ~wanted
        if astray.any():
            return wrong.format(astray.sum()) + f" of {wanted.sum()}"
    right = np.log(np.exp(exact[kept]).sum())
    if not abs(log_mass - right) <= LOG_MASS_TOLERANCE * max(1.0, abs(right)):
        return f"the log mass is {right}, not {log_mass}"
    return None


def problems(logits: np.ndarray, found: tuple, setting: dict, keep=kept_tokens) -> dict[tuple[int, int], str]:
    """By row, for logits [B, N, V]."""
    places = np.ndindex(*logits.shape[:2])
    said = {(b, n): problem(logits[b, n], found, b, n, setting, keep) for b, n in places}
    return {place: words for place, words in said.items() if words}


def top_p_before_top_k(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    return kept_tokens(z, top_k=0, top_p=top_p, min_p=min_p) & kept_tokens(z, top_k=top_k, top_p=1.0, min_p=min_p)


def without_the_token_that_crosses(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    kept = kept_tokens(z, top_k=top_k, top_p=top_p, min_p=min_p)
    return kept & (z > z[kept].min()) if top_p < 1 else kept


def ties_cut_by_index(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    kept = kept_tokens(z, top_k=top_k, top_p=top_p, min_p=min_p)
    if 0 < top_k < kept.sum():
        kept[np.argsort(-z, kind="stable")[top_k:]] = False
    return kept


def top_p_of_everything(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    if top_k == 0 or top_p >= 1:
        return kept_tokens(z, top_k=top_k, top_p=top_p, min_p=min_p)
    return top_p_before_top_k(z, top_k=top_k, top_p=top_p, min_p=0.0)


# Wrong laws that the comparison has to tell from the right one, with filters and rows that show it.
WRONG = {
    "top-p before top-k": (top_p_before_top_k, "top-k, then top-p", "normal"),
    "top-p without the token that crosses": (without_the_token_that_crosses, "top-p", "normal"),
    "equal tokens cut by index": (ties_cut_by_index, "top-k", "steps"),
    "top-p of tokens that min-p has dropped": (top_p_of_everything, "everything", "wide"),
}
