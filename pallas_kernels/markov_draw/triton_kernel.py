"""The Triton kernels of `markov_draw`: score, one program a chunk of the vocabulary, and pick, one program a row.

The noise of a token is 46 bits: two threefry words, the second of which only matters where the first is small. So
`score` makes the first for every token, which bounds the noise from above, and leaves the largest bound of its chunk.
`pick` makes the whole of it for the tokens of the chunk with the best bound, and of those whose bound is better than
what it has found: the largest noisy score is exact, and most of the second words are never made.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
ULP_23, ULP_47 = tl.constexpr(2.0**-23), tl.constexpr(2.0**-47)
# -log(x / 2**32) is at most ABOVE - BELOW * (the bits of x as an integer): a chord of the logarithm, and more than
# rounding. Of x = 0 that is more than any noise.
BELOW, ABOVE = tl.constexpr(0.6931471805599453 * 2.0**-23), tl.constexpr(0.6931471805599453 * 159 + 2.0**-10)


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
def halves(first, second, place):
    """Two uint32 whose exclusive or is what threefry makes of a place (uint32) under a key of two words."""
    third = first ^ second ^ 0x1BD11BDA
    b = place + second
    a, b = mix_odd(b * 0 + first, b)
    a, b = mix_even(a + second, b + (third + 1))
    a, b = mix_odd(a + third, b + (first + 2))
    a, b = mix_even(a + first, b + (second + 3))
    a, b = mix_odd(a + second, b + (third + 4))
    return a + third, b + (first + 5)


@triton.jit
def uniform(first, second, place):
    """The number in [0, 1) that `jax.random.uniform` draws at a place under a key."""
    a, b = halves(first, second, place)
    return (((a ^ b) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def least_noise(first, second, place):
    """What the noise is at most ABOVE less than: a number x in [0, 1) has the noise -log(-log(1 - x)) <= -log(x)."""
    a, b = halves(first, second, place)
    # The bits of x that `uniform` takes, as a float32: 2**32 * x, and exact.
    return BELOW * ((a ^ b) & 0xFFFFFE00).to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)


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
def of_rows(x, AXIS: tl.constexpr):
    """One number a row, as it lies in a tile whose tokens run along AXIS."""
    return x[:, None] if AXIS == 1 else x[None, :]


@triton.jit
def of_tokens(x, AXIS: tl.constexpr):
    return x[None, :] if AXIS == 1 else x[:, None]


@triton.jit
def bias_of(
    latents_ptr, latent, real, table_ptr, token, inside,
    RANK: tl.constexpr, ROWS: tl.constexpr, AXIS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of one chunk in some rows."""
    line = token.to(tl.int64) * RANK
    if ROWS == 1:
        # All of the chunk's loads go out at once, and its row of the table is summed by eight threads.
        sums = tl.zeros([WIDTH, STEP], tl.float32)
        for start in tl.static_range(0, RANK, STEP):
            column = start + tl.arange(0, STEP)
            here = column < RANK
            w = tl.load(table_ptr + line[:, None] + column[None, :], mask=inside[:, None] & here[None, :], other=0.0)
            x = tl.load(latents_ptr + tl.sum(latent, 0) + column, mask=here, other=0.0)
            sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
        bias = tl.sum(sums, 1)[None, :]
    else:
        across: tl.constexpr = 1 - AXIS
        bias = tl.zeros([ROWS, WIDTH] if AXIS == 1 else [WIDTH, ROWS], tl.float32)
        for start in range(0, RANK, STEP):
            column = start + tl.arange(0, STEP)
            here = column < RANK
            place = of_tokens(line, AXIS) + of_tokens(column, across)
            w = tl.load(table_ptr + place, mask=of_tokens(inside, AXIS) & of_tokens(here, across), other=0.0)
            place = of_rows(latent, AXIS) + of_rows(column, across)
            x = tl.load(latents_ptr + place, mask=of_rows(real, AXIS) & of_rows(here, across), other=0.0)
            bias = tl.dot(x, w, bias) if AXIS == 1 else tl.dot(w, x, bias)
    return bias


@triton.jit
def score(
    logits_ptr, index_ptr, words_ptr, settings_ptr, latents_ptr, table_ptr, allowed_ptr, slot_plus_2,
    out_ptr, part_ptr,
    BATCH: tl.constexpr, SLOTS: tl.constexpr, LATENTS: tl.constexpr, VOCAB: tl.constexpr, RANK: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, AXIS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Logits of one chunk in some rows; of each row the largest one, the mass relative to it, the best bound.

    A tile is [ROWS, WIDTH] with AXIS 1, [WIDTH, ROWS] with AXIS 0. In rows that are not drawn, the place of the largest
    logit stands where the bound is in others.
    """
    group, chunk, slot = tl.program_id(0), tl.program_id(1), slot_plus_2 - 2
    # Every other slot begins where the one before has ended, with what the cache still holds of the table.
    chunk = tl.where(slot % 2 == 1, CHUNKS - 1 - chunk, chunk)
    token = chunk * WIDTH + tl.arange(0, WIDTH)
    inside = token < VOCAB
    row = group * ROWS + tl.arange(0, ROWS)
    real = row < BATCH
    # What has to come from memory is asked for before anything waits.
    latent = tl.load(index_ptr + row, mask=real, other=0).to(tl.int64)
    words = words_ptr + (row * SLOTS + slot) * 2
    first, second = tl.load(words, mask=real, other=0), tl.load(words + 1, mask=real, other=0)
    inverse = tl.load(settings_ptr + row * 2, mask=real, other=1.0)
    drawn = tl.load(settings_ptr + row * 2 + 1, mask=real, other=0.0) != 0.0
    at = of_rows((row.to(tl.int64) * SLOTS + slot) * VOCAB, AXIS) + of_tokens(token, AXIS)
    live = of_rows(real, AXIS) & of_tokens(inside, AXIS)
    base = tl.load(logits_ptr + at, mask=live, other=0.0)
    usable = tl.load(allowed_ptr + token, mask=inside, other=0) != 0
    latent = tl.where(latent < 0, latent + LATENTS, latent) * RANK
    some_drawn = tl.max(drawn.to(tl.int32), 0) > 0
    some_greedy = tl.min((drawn | (real == 0)).to(tl.int32), 0) == 0
    bias = bias_of(latents_ptr, latent, real, table_ptr, token, inside, RANK, ROWS, AXIS, WIDTH, STEP)
    x = base + (bias + of_tokens(tl.where(usable, 0.0, float("-inf")), AXIS))
    x = tl.where(x == x, tl.minimum(x, LARGEST), float("-inf"))
    if KEEP or some_drawn:
        tl.store(out_ptr + at, x, mask=live)
    top = tl.max(x, AXIS)
    z = (x - of_rows(tl.where(top > float("-inf"), top, 0.0), AXIS)) * of_rows(inverse, AXIS)
    part = part_ptr + row * (3 * CHUNKS) + chunk
    tl.store(part, top, mask=real)
    tl.store(part + CHUNKS, tl.sum(tl.exp(z), AXIS), mask=real)
    if some_drawn:
        bound = z - least_noise(of_rows(first, AXIS), of_rows(second, AXIS), of_tokens(token.to(tl.uint32), AXIS))
        tl.store(part + 2 * CHUNKS, ABOVE + tl.max(bound, AXIS), mask=real & drawn)
    if some_greedy:
        best = tl.min(tl.where(x == of_rows(top, AXIS), of_tokens(token, AXIS), VOCAB), AXIS)
        tl.store(part + 2 * CHUNKS, best.to(tl.float32), mask=real & (drawn == 0))


@triton.jit
def pick(
    out_ptr, words_ptr, settings_ptr, part_ptr, slot_plus_2,
    token_ptr, numbers_ptr,
    SLOTS: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: what its chunks left, put together, and the exact scores of those that the best token may be in."""
    row, slot = tl.program_id(0), slot_plus_2 - 2
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    part = part_ptr + row * (3 * CHUNKS) + chunk
    top = tl.load(part, mask=inside, other=float("-inf"))
    mass = tl.load(part + CHUNKS, mask=inside, other=0.0)
    bound = tl.load(part + 2 * CHUNKS, mask=inside, other=float("-inf"))
    inverse = tl.load(settings_ptr + row * 2)
    peak = tl.max(top, 0)
    some = peak > float("-inf")
    base = tl.where(some, peak, 0.0)
    lower = (top - base) * inverse
    total = tl.sum(mass * tl.exp(lower), 0)
    token = tl.full([], VOCAB, tl.int32)
    if tl.load(settings_ptr + row * 2 + 1) != 0.0:
        words = words_ptr + (row * SLOTS + slot) * 2
        first, second = tl.load(words), tl.load(words + 1)
        line = out_ptr + (row.to(tl.int64) * SLOTS + slot) * VOCAB
        best = tl.full([], float("-inf"), tl.float32)
        bound += lower
        ahead, here = tl.max(bound, 0, return_indices=True)
        while ahead > best:
            place = here * WIDTH + tl.arange(0, WIDTH)
            x = tl.load(line + place, mask=place < VOCAB, other=float("-inf"))
            where = place.to(tl.uint32)
            exact = noise(uniform(first, second, where), uniform(first, second, where + VOCAB)) + (x - base) * inverse
            most, at = tl.max(exact, 0, return_indices=True)
            at += here * WIDTH
            better = (most > best) | ((most == best) & (at < token))
            best, token = tl.where(better, most, best), tl.where(better, at, token)
            bound = tl.where(chunk == here, float("-inf"), bound)
            ahead, here = tl.max(bound, 0, return_indices=True)
    else:
        token = tl.min(tl.where(top == peak, bound, VOCAB), 0).to(tl.int32)
    tl.store(token_ptr + row, tl.where(some, token, -1))
    tl.store(numbers_ptr + row * 2, base)
    tl.store(numbers_ptr + row * 2 + 1, tl.log(tl.where(some, total, 1.0)))
