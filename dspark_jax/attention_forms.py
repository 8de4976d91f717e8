"""Which form of attention a call takes: the one place that decides, and the form that goes through `pallas_kernels`.

Calls are of two kinds. A step has at most `STEP_TOKENS` tokens a row and reads what it needs of the cache, so its cost
is bytes. A chunk of a prompt has more, and its cost is products. The loops over the cache in `attention` serve every
call, have derivatives and can be split over devices; they go by the name `LOOPS`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.kernels import Kernels
from pallas_kernels import block_sparse_decode, windowed_decode
from pallas_kernels._dispatch import device_of

STEP_TOKENS = 16
LOOPS = "xla"

Work = Literal["selection", "sparse", "dense"]
Form = str | None  # of `pallas_kernels`, which choose for themselves where it is None, or `LOOPS`

# A chunk's forms on a GPU, fastest first, as tests/benchmarks/prefill.py measures them: chunks of 512 tokens of the
# released geometry, on an H200. Behind 2,048 / 8,192 / 32,768 tokens they take, in microseconds, dense: Mosaic 62 / 216
# / 805, Triton 89 / 325 / 1,231, loops 411 / 1,572 / 6,199; sparse: Triton 96 / 136 to 260 / 155 to 338, loops as
# before; scores and selection of blocks: Triton 37 / 45 / 77, loops 48 / 122 / 430. The first form that can serve a
# call takes it. `LOOPS` comes last, as it serves all. cuDNN is none of them: its causal mask counts from the first
# query and key, so a chunk behind others takes two calls and a merge, 82 / 268 / 978.
CHUNK_FORMS: Mapping[Work, tuple[str, ...]] = {
    "selection": ("triton", LOOPS),
    "sparse": ("triton", LOOPS),
    "dense": ("mosaic", "triton", LOOPS),
}


def choose(kernels: Kernels, work: Work, tokens: int, *arrays: Array) -> tuple[Form, ...]:
    """Forms to try in turn for a call of `tokens` tokens a row on `arrays`; see `Kernels.attention`.

    The device is that of the arrays, and under `jax.jit` the default one. Without a GPU the loops are the best choice
    even for a step: gathering the selected keys took 1.2 to 1.4 of their time on a CPU.

    Raises:
      NotImplementedError: the form that is named does not do such work.
    """
    if kernels.attention == "mosaic" and work != "dense":
        raise NotImplementedError(
            "Kernels(attention='mosaic') has no block-sparse form, and this layer of the target is block-sparse: name "
            "'triton', or None for the best form of each layer."
        )
    if kernels.attention is not None:
        return (kernels.attention,)
    if device_of(*arrays).platform != "gpu":
        return (LOOPS,)
    return (None,) if tokens <= STEP_TOKENS else CHUNK_FORMS[work]


def selects_everything(*, tokens: int, slots: int, block_size: int, top_k: int) -> bool:
    """Whether the selections of a chunk hold every block of the cache, so that it can be attended to as a whole.

    A query at position p selects its own block and the best of those before it: all of them as long as they are
    `top_k`. Blocks behind its own are hidden from it either way.
    """
    return tokens > STEP_TOKENS and slots <= top_k * block_size


def attend_with_kernels(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    positions: Int[Array, "B T"],
    *,
    blocks: Int[Array, "B T Hkv top_k"] | None = None,
    block_size: int,
    implementation: Form,
) -> Float[Array, "B T Hq D"]:
    """`attention.attend` through `pallas_kernels`, which read the selected blocks only.

    S is a multiple of `block_size`. The positions of a row are consecutive, with padding behind them; the output of a
    token at position -1 is meaningless, but finite. The kernels cut any number of tokens into groups of neighbours
    themselves, so a chunk is one call like a step.
    """
    batch, tokens = positions.shape
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    start = jnp.max(jnp.where(positions < 0, -tokens, positions - offset), axis=1)
    # The cache as pages of one block each, without a copy.
    k_pages, v_pages = (x.reshape(-1, block_size, *x.shape[2:]) for x in (k, v))
    table = jnp.asarray(np.arange(k_pages.shape[0], dtype=np.int32).reshape(batch, -1))  # a constant, no kernel
    common: dict[str, Any] = dict(implementation=implementation)
    if blocks is None:
        length = jnp.clip(jnp.max(positions, axis=1) + 1, 0, k.shape[1])
        return windowed_decode(q, k_pages, v_pages, table, start, length, window=None, **common)[0]
    return block_sparse_decode(q, k_pages, v_pages, table, blocks, start, block_size=block_size, **common)[0]
