"""Online softmax on accumulators of the Mosaic kernels: [64, columns] in registers, base 2 inside."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _mosaic as gpu

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NO_MAXIMUM = -1e30  # finite: exp2(old - new) stays defined for rows without keys


def start(columns: int) -> tuple[Any, Any, Any]:
    """(values, maximum, total) before any key."""
    rows = (gpu.ROWS,)
    return gpu.full((gpu.ROWS, columns), 0.0), gpu.full(rows, NO_MAXIMUM), gpu.full(rows, 0.0)


def resume(values: Any, lse: Any) -> tuple[Any, Any, Any]:
    """The state of a finished attention: `values` with its natural log-sum-exp."""
    maximum = jnp.maximum(lse * LOG2_E, NO_MAXIMUM)
    total = jnp.exp2(lse * LOG2_E - maximum)
    return values * gpu.along_rows(total, values.shape), maximum, total


def hide(visible: Any, scores: Any, scale: float) -> Any:
    """Scores that `weigh` gives no weight where they are not visible."""
    return jnp.where(visible, scores, -jnp.inf if scale >= 0 else jnp.inf)


def weigh(scores: Any, state: tuple[Any, Any, Any], scale: float, dtype: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """Weights of a tile of scores, rounded to `dtype`, and the state to which weights @ values are to be added."""
    values, maximum, total = state
    factor = (scale or 1e-30) * LOG2_E  # 0 times the infinity of a hidden score is no number
    # The largest scaled score, whatever the sign of the scale.
    extreme = scores.max(axis=1) if factor >= 0 else -((-scores).max(axis=1))
    new = jnp.maximum(maximum, extreme * factor)
    decay = jnp.exp2(maximum - new)
    weights = jnp.exp2(scores * factor - gpu.along_rows(new, scores.shape))
    values *= gpu.along_rows(decay, values.shape)
    total *= decay
    rounded = weights.astype(dtype)
    total += weights.sum(axis=1)
    return rounded, (values, new, total)


def finish(state: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Normalised values and the base-2 log-sum-exp; 0 and -inf for rows without a key."""
    values, maximum, total = state
    seen = total != 0  # also where a score was NaN
    safe = jnp.where(seen, total, 1.0)
    return values * gpu.along_rows(1.0 / safe, values.shape), jnp.where(seen, maximum + jnp.log2(safe), -jnp.inf)


def merge_rows(splits: int, load_lse: Callable[[int], Any], load_values: Callable[[int], Any]) -> tuple[Any, Any]:
    """`finish` of all splits together, from values [64, columns] and base-2 log-sum-exp [64] of each."""
    parts = [load_lse(i) for i in range(splits)]
    maximum = jnp.maximum(parts[0], NO_MAXIMUM)
    for part in parts[1:]:
        maximum = jnp.maximum(maximum, part)
    total = jnp.exp2(parts[0] - maximum)
    values = load_values(0)
    values *= gpu.along_rows(total, values.shape)
    for i in range(1, splits):
        weights = jnp.exp2(parts[i] - maximum)
        total += weights
        part = load_values(i)
        values += part * gpu.along_rows(weights, part.shape)
    return finish((values, maximum, total))
