"""The Triton kernels of `markov_draw`: score, one program a chunk of the vocabulary, and pick, one program a row.

The noise of a token is 46 bits: two threefry words, the second of which only matters where the first is small. So
`score` makes the first for every token, which bounds the noise from above, and the whole of it for the few tokens that
this bound leaves: the largest noisy score is exact and most of the second words are never made.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
ULP_23, ULP_47 = tl.constexpr(2.0**-23), tl.constexpr(2.0**-47)
# -log(x) is at most ABOVE - BELOW * (the bits of x as an integer): a chord of the logarithm, and more than rounding.
BELOW, ABOVE = tl.constexpr(0.6931471805599453 * 2.0**-23), tl.constexpr(0.6931471805599453 * 127 + 2.0**-10)


@triton.jit
def mix(a, b, R: tl.constexpr):
    a += b
    return a, ((b << R) | (b >> (32 - R))) ^ a


@triton.jit
def mix_odd(a, b):
    a, b = mix(a, b, 13)
    a, b = mix(a, b, 15)
    a, b = mix(a, b, 26)
    return mix(a, b, 6)


@triton.jit
def mix_even(a, b):
    a, b = mix(a, b, 17)
    a, b = mix(a, b, 29)
    a, b = mix(a, b, 16)
    return mix(a, b, 24)


@triton.jit
def uniform(first, second, place):
    """The number in [0, 1) that `jax.random.uniform` draws at a place (uint32) under a threefry key of two words."""
    third = first ^ second ^ 0x1BD11BDA
    b = place + second
    a, b = mix_odd(b * 0 + first, b)
    a, b = mix_even(a + second, b + (third + 1))
    a, b = mix_odd(a + third, b + (first + 2))
    a, b = mix_even(a + first, b + (second + 3))
    a, b = mix_odd(a + second, b + (third + 4))
    bits = (a + third) ^ (b + (first + 5))
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def most_noise(high):
    """At least the noise of any number that begins with `high`: x is at most -log(1 - x)."""
    return ABOVE - BELOW * (high + ULP_47).to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def noise(high, low):
    """-log(-log(1 - x)) of the number x that the two words make."""
    x = tl.where(high >= 0.5, high, high + ULP_23 * low + ULP_47)
    s = tl.where(high >= 0.5, 0.0, x / (2.0 - x))
    q = s * s
    series = 1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15)))
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * series)))
    return -tl.log(tl.where(high >= 0.5, -tl.log(1.0 - x), 2.0 * s * series))


@triton.jit
def score(
    logits_ptr, index_ptr, words_ptr, settings_ptr, latents_ptr, table_ptr, allowed_ptr, slot_plus_2,
    out_ptr, part_ptr, best_ptr,
    BATCH: tl.constexpr, SLOTS: tl.constexpr, LATENTS: tl.constexpr, VOCAB: tl.constexpr, RANK: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Logits of one chunk in some rows; of each row the largest one, the mass relative to it, the best noisy score."""
    group, chunk, slot = tl.program_id(0), tl.program_id(1), slot_plus_2 - 2
    token = chunk * WIDTH + tl.arange(0, WIDTH)
    inside = token < VOCAB
    row = group * KEPT + tl.arange(0, KEPT)
    real = row < BATCH
    live = real[:, None] & inside[None, :]
    at = (row.to(tl.int64) * SLOTS + slot)[:, None] * VOCAB + token[None, :]
    base = tl.load(logits_ptr + at, mask=live, other=0.0)
    usable = tl.load(allowed_ptr + token, mask=inside, other=0) != 0
    # A product has at least 16 rows: those that are none of ours are zeros.
    place = group * KEPT + tl.arange(0, ROWS)
    ours = (place < BATCH) & (tl.arange(0, ROWS) < KEPT)
    latent = tl.load(index_ptr + place, mask=ours, other=0).to(tl.int64)
    latent = tl.where(latent < 0, latent + LATENTS, latent) * RANK
    bias = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, RANK, STEP):
        column = start + tl.arange(0, STEP)
        x = tl.load(
            latents_ptr + latent[:, None] + column[None, :], mask=ours[:, None] & (column < RANK)[None, :], other=0.0
        )
        w = tl.load(
            table_ptr + token.to(tl.int64)[None, :] * RANK + column[:, None],
            mask=inside[None, :] & (column < RANK)[:, None], other=0.0,
        )  # fmt: skip
        bias = tl.dot(x, w, bias)
    if KEPT < ROWS:
        parts = tl.reshape(bias, [ROWS // KEPT, KEPT, WIDTH])
        bias = tl.sum(tl.where(tl.arange(0, ROWS // KEPT)[:, None, None] == 0, parts, 0.0), 0)
    x = base + bias
    x = tl.where((x == x) & live & usable[None, :], tl.minimum(x, LARGEST), float("-inf"))
    if KEEP or KEPT < ROWS:
        tl.store(out_ptr + at, x, mask=live)
    if KEPT < ROWS:
        # A product leaves copies of few rows in many threads, and each would work on its own: read them anew.
        tl.debug_barrier()
        x = tl.load(out_ptr + at, mask=live, other=float("-inf"))
    top = tl.max(x, 1)
    inverse = tl.load(settings_ptr + row * 2, mask=real, other=1.0)
    drawn = tl.load(settings_ptr + row * 2 + 1, mask=real, other=0.0) != 0.0
    z = (x - tl.where(top > float("-inf"), top, 0.0)[:, None]) * inverse[:, None]
    mass = tl.sum(tl.exp(z), 1)
    words = words_ptr + (row * SLOTS + slot) * 2
    first, second = tl.load(words, mask=real, other=0), tl.load(words + 1, mask=real, other=0)
    bound = z
    if tl.max(drawn.to(tl.int32), 0) > 0:
        high = uniform(first[:, None], second[:, None], token.to(tl.uint32)[None, :])
        bound = tl.where(drawn[:, None], z + most_noise(high), z)
    ahead = tl.max(bound, 1)
    best = tl.full([KEPT], float("-inf"), tl.float32)
    chosen = tl.full([KEPT], VOCAB, tl.int32)
    while tl.max((ahead > best).to(tl.int32), 0) > 0:
        candidate = tl.min(tl.where(bound == ahead[:, None], token[None, :], VOCAB), 1)
        here = token[None, :] == candidate[:, None]
        exact = tl.max(tl.where(here, z, float("-inf")), 1)
        where = candidate.to(tl.uint32)
        exact += tl.where(drawn, noise(uniform(first, second, where), uniform(first, second, where + VOCAB)), 0.0)
        better = (exact > best) | ((exact == best) & (candidate < chosen) & (exact > float("-inf")))
        best, chosen = tl.where(better, exact, best), tl.where(better, candidate, chosen)
        bound = tl.where(here, float("-inf"), bound)
        ahead = tl.max(bound, 1)
    part = part_ptr + row * (3 * CHUNKS) + chunk
    tl.store(part, top, mask=real)
    tl.store(part + CHUNKS, mass, mask=real)
    tl.store(part + 2 * CHUNKS, best, mask=real)
    tl.store(best_ptr + row * CHUNKS + chunk, chosen, mask=real)


@triton.jit
def pick(
    part_ptr, best_ptr, settings_ptr, token_ptr, numbers_ptr,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
):  # fmt: skip
    """One row: what its chunks left, put together."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    part = part_ptr + row * (3 * CHUNKS) + chunk
    top = tl.load(part, mask=inside, other=float("-inf"))
    mass = tl.load(part + CHUNKS, mask=inside, other=0.0)
    best = tl.load(part + 2 * CHUNKS, mask=inside, other=float("-inf"))
    chosen = tl.load(best_ptr + row * CHUNKS + chunk, mask=inside, other=VOCAB)
    peak = tl.max(top, 0)
    some = peak > float("-inf")
    peak = tl.where(some, peak, 0.0)
    lower = (top - peak) * tl.load(settings_ptr + row * 2)
    total = tl.sum(mass * tl.exp(lower), 0)
    best += lower
    token = tl.min(tl.where(best == tl.max(best, 0), chosen, VOCAB), 0)
    tl.store(token_ptr + row, tl.where(some, token, -1))
    tl.store(numbers_ptr + row * 2, peak)
    tl.store(numbers_ptr + row * 2 + 1, tl.log(tl.where(some, total, 1.0)))
