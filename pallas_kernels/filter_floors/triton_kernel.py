"""The Triton kernels of `filter_floors`: scan, bracket, collect and finish, launched one after the other.

A row is cut into CHUNKS chunks that lie across it: run i of chunk c holds tokens from (i * CHUNKS + c) * RUN on. So
neighbouring tokens, which are often alike, are spread over all chunks. How a row is cut does not depend on how many
rows there are, and neither do its sums. A score is (logit - peak) * inverse temperature, computed alike everywhere; as
it is never positive, the bits of its absolute value order it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Settings of a request: float32, in this order.
INVERSE, TOP_K, TOP_P, LEAST, FIND_BEST, SETTINGS = (tl.constexpr(i) for i in range(6))


@triton.jit
def clean(x):
    """Logits in float32, as the scores take them: NaN is -inf, and the largest is finite."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def scores(x, peak, inverse):
    """Of clean logits."""
    # The peak of a row without a finite logit is -inf, and -inf - -inf would be NaN.
    return (x - tl.where(peak > float("-inf"), peak, 0.0)) * inverse


@triton.jit
def chunk_tokens(chunk, CHUNKS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    place = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return (place // RUN * CHUNKS + chunk) * RUN + place % RUN


@triton.jit
def rank(score):
    """An integer that grows as the score falls."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def score_of(rank):
    return -rank.to(tl.float32, bitcast=True)


@triton.jit
def scan(
    logits_ptr, settings_ptr, top_ptr, sum_ptr, best_ptr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Of one chunk: the largest logit, the weights relative to it, and in greedy rows where it is first."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    token = chunk_tokens(chunk, CHUNKS, DEPTH, WIDTH, RUN)
    x = clean(tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf")))
    top = tl.max(x)
    setting = settings_ptr + row // ROWS * SETTINGS
    weight = tl.exp(scores(x, top, tl.load(setting + INVERSE)))
    at = row * CHUNKS + chunk
    tl.store(top_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(weight))
    if tl.load(setting + FIND_BEST) != 0:
        tl.store(best_ptr + at, tl.min(tl.where(x == top, token, VOCAB)))


@triton.jit
def bracket(
    logits_ptr, settings_ptr, top_ptr, sum_ptr, chunk_best_ptr,
    peak_ptr, best_ptr, mass_ptr, low_ptr, high_ptr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, SAMPLE: tl.constexpr,
    STEPS: tl.constexpr, SIGMAS: tl.constexpr, SPARE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One row a program: its peak and mass; and from a sample, scores between which the floor should lie.

    A guess that `finish` checks: it may make that slow and not wrong.
    """
    row = tl.program_id(0)
    setting = settings_ptr + row // ROWS * SETTINGS
    inverse, least = tl.load(setting + INVERSE), tl.load(setting + LEAST)
    top_k, top_p = tl.load(setting + TOP_K), tl.load(setting + TOP_P)
    chunk = tl.arange(0, CHUNKS_PADDED)
    at = row * CHUNKS + chunk
    tops = tl.load(top_ptr + at, mask=chunk < CHUNKS, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=chunk < CHUNKS, other=0.0)
    peak = tl.max(tops, 0)
    mass = tl.sum(sums * tl.exp(scores(tops, peak, inverse)), 0)
    tl.store(peak_ptr + row, peak)
    tl.store(mass_ptr + row, mass)
    best = tl.full([], 0, tl.int32)
    if tl.load(setting + FIND_BEST) != 0:
        first = tl.load(chunk_best_ptr + at, mask=chunk < CHUNKS, other=VOCAB)
        best = tl.min(tl.where(tops == peak, first, VOCAB), 0)
    tl.store(best_ptr + row, best)
    low = tl.full([], float("inf"), tl.float32)
    high = low  # nothing lies between
    if (top_k > 0) | (top_p < 1.0):
        # Sectors of 8 tokens, spread evenly.
        sectors: tl.constexpr = (VOCAB + 7) // 8
        taken: tl.constexpr = SAMPLE // 8 if sectors > SAMPLE // 8 else sectors
        each: tl.constexpr = sectors / taken
        place = tl.arange(0, SAMPLE)
        token = place // 8 * sectors // taken * 8 + place % 8
        inside = (place // 8 < taken) & (token < VOCAB)
        x = clean(tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=inside, other=float("-inf")))
        z = scores(x, peak, inverse)
        drawable = z > float("-inf")
        number = tl.sum(drawable.to(tl.int32), 0)
        if top_k > 0:
            above = top_k / each
            spread = tl.sqrt(above)
        else:
            # What may be dropped: all below the floor fits into it.
            weight = tl.where(z >= least, tl.exp(z), 0.0)
            below = tl.sum(tl.where(z >= least, 0.0, tl.exp(z)), 0)
            spare = (1.0 - top_p) * tl.maximum(mass - each * below, 1.0) / each
            begin = tl.minimum(tl.log(spare / SAMPLE), 0.0)  # even a whole row of such scores fits
            end = tl.full([], 0.0, tl.float32)
            for _ in range(STEPS):
                middle = 0.5 * (begin + end)
                fits = tl.sum(tl.where(z < middle, weight, 0.0), 0) <= spare
                begin = tl.where(fits, middle, begin)
                end = tl.where(fits, end, middle)
            tail = tl.where(z < begin, weight, 0.0)
            spread = tl.sqrt(tl.sum(tail * tail, 0)) * tl.exp(-begin)
            above = tl.sum((z >= begin).to(tl.int32), 0).to(tl.float32)
        most: tl.constexpr = MOST / each
        spread = SIGMAS * spread + SPARE
        wide = above + spread > most
        spread = tl.where(wide, tl.minimum(spread, 0.5 * most), spread)
        # Order statistics of the sample: at least `under` of it are from low on, at most `over` from high on.
        under = tl.ceil(above + spread).to(tl.int32)
        over = tl.where(wide, tl.floor(above - spread), 0.0).to(tl.int32)
        slack = (0.125 * spread).to(tl.int32) + 1
        lowest = rank(tl.min(tl.where(drawable, z, 0.0), 0))
        few, enough = tl.full([], -1, tl.int32), lowest
        of_few, of_enough = tl.full([], 0, tl.int32), number
        fine, many = few, tl.where(over < 1, 0, lowest)
        of_fine, of_many = of_few, number
        while ((enough - few > 1) & (of_enough - of_few > slack)) | ((many - fine > 1) & (of_many - of_fine > slack)):
            # Both searches in one sum; the rank -1 is that of NaN, above which there is nothing.
            middle, other = few + (enough - few) // 2, fine + (many - fine) // 2
            both = tl.sum((z >= score_of(middle)).to(tl.int32) + (z >= score_of(other)).to(tl.int32) * 65536, 0)
            here, there = both % 65536, both // 65536
            few, of_few = tl.where(here < under, middle, few), tl.where(here < under, here, of_few)
            enough, of_enough = tl.where(here < under, enough, middle), tl.where(here < under, of_enough, here)
            fine, of_fine = tl.where(there > over, fine, other), tl.where(there > over, of_fine, there)
            many, of_many = tl.where(there > over, other, many), tl.where(there > over, there, of_many)
        low = tl.where(under < number, score_of(enough), LOWEST)
        high = tl.where(fine < 0, float("inf"), score_of(fine))
    tl.store(low_ptr + row, low)
    tl.store(high_ptr + row, high)


@triton.jit
def collect(
    logits_ptr, settings_ptr, peak_ptr, low_ptr, high_ptr,
    total_ptr, over_mass_ptr, over_count_ptr, count_ptr, found_ptr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Of one chunk: the scores inside the bracket; what lies above it; and all weights if min-p leaves some out."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
    setting = settings_ptr + row // ROWS * SETTINGS
    least = tl.load(setting + LEAST)
    if (low < float("inf")) | (least > float("-inf")):
        token = chunk_tokens(chunk, CHUNKS, DEPTH, WIDTH, RUN)
        x = clean(tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf")))
        z = scores(x, tl.load(peak_ptr + row), tl.load(setting + INVERSE))
        weight = tl.exp(z)
        at = row * CHUNKS + chunk
        tl.store(over_mass_ptr + at, tl.sum(tl.where(z >= tl.maximum(high, least), weight, 0.0)))
        if least > float("-inf"):
            tl.store(total_ptr + at, tl.sum(tl.where(z >= least, weight, 0.0)))
        if tl.load(setting + TOP_K) > 0:
            tl.store(over_count_ptr + at, tl.sum(tl.where(z >= high, 1, 0)))
        # A thread holds whole columns: only their sums have to be added up across threads.
        inside = (z >= low) & (z < high)
        number = tl.where(inside, 1, 0)
        column = tl.sum(number, 0)
        count = tl.sum(column, 0)
        tl.store(count_ptr + at, count)
        if (count > 0) & (count <= SLOTS):
            slot = (tl.cumsum(column, 0) - column - 1)[None, :] + tl.cumsum(number, 0)
            found = found_ptr + at.to(tl.int64) * SLOTS
            tl.store(found + slot, z, mask=inside)


@triton.jit
def measure_of(z, least, by_count):
    """What a token counts for: 1, or its weight."""
    return tl.where(by_count, tl.where(z > float("-inf"), 1.0, 0.0), tl.where(z >= least, tl.exp(z), 0.0))


@triton.jit
def among_found(
    found_ptr, count_ptr, top_k, top_p, least, total, over_mass, over_count, low,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """-> whether the floor lies in the bracket, the floor, what is kept."""
    place = tl.arange(0, CHUNKS_PADDED * WIDTH)
    chunk, slot = place // WIDTH, place % WIDTH
    count = tl.load(count_ptr + chunk, mask=chunk < CHUNKS, other=0)
    z = tl.load(found_ptr + chunk * SLOTS + slot, mask=slot < count, other=float("-inf"))
    weight = measure_of(z, least, False)
    everything = low == LOWEST  # is in the bracket or above it
    good = tl.full([], True, tl.int1)
    floor = tl.full([], float("-inf"), tl.float32)
    for stage in tl.static_range(2):
        by_count = stage == 0
        if (top_k > 0) if by_count else (top_p < 1.0):
            over = over_count.to(tl.float32) if by_count else over_mass
            measure = measure_of(z, least, True) if by_count else weight
            reached = over + tl.sum(tl.where(z >= floor, measure, 0.0), 0)
            target = top_k if by_count else top_p * tl.where(top_k > 0, reached, total)
            if (over < target) & (target <= reached):
                begin = rank(tl.max(z, 0))
                end = rank(tl.maximum(tl.min(tl.where(z > float("-inf"), z, 0.0), 0), floor))
                while begin < end:
                    middle = begin + (end - begin) // 2
                    enough = over + tl.sum(tl.where(z >= score_of(middle), measure, 0.0), 0) >= target
                    begin = tl.where(enough, begin, middle + 1)
                    end = tl.where(enough, middle, end)
                floor = score_of(end)
            else:
                # Short of the target with everything counted: no floor at all.
                good = good & everything & (reached < target)
    kept = tl.where(floor > float("-inf"), over_mass + tl.sum(tl.where(z >= floor, weight, 0.0), 0), total)
    return good, floor, kept


@triton.jit
def measured_row(
    logits_ptr, peak, inverse, least, by_count, floors, VOCAB: tl.constexpr, TILE: tl.constexpr, FLOORS: tl.constexpr
):
    """`measured` for several floors, of the whole row."""
    sums = tl.zeros([FLOORS, TILE], tl.float32)
    place = tl.arange(0, TILE)
    for start in range(0, VOCAB, TILE):
        token = start + place
        x = clean(tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf")))
        z = scores(x, peak, inverse)
        sums += tl.where(z[None, :] >= floors[:, None], measure_of(z, least, by_count)[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def in_row(
    logits_ptr, peak, inverse, least, top_k, top_p, VOCAB: tl.constexpr, TILE: tl.constexpr, FLOORS: tl.constexpr
):
    """The floor and what is kept, in as many readings of the row as it takes."""
    index = tl.arange(0, FLOORS)
    floor = tl.full([], float("-inf"), tl.float32)
    for stage in tl.static_range(2):
        by_count = stage == 0
        if (top_k > 0) if by_count else (top_p < 1.0):
            everything = index * 0.0 + floor
            reached = tl.max(
                measured_row(logits_ptr, peak, inverse, least, by_count, everything, VOCAB, TILE, FLOORS), 0
            )
            target = top_k if by_count else top_p * reached
            begin, end = tl.full([], 0, tl.int32), tl.full([], 0x7F800000, tl.int32)  # the rank of -inf
            while begin < end:
                # The last one is short of the end, so that the search shrinks at least to one side of it.
                step = tl.maximum((end - begin) // (FLOORS + 1), 1)
                middles = tl.minimum(begin + step * (index + 1), end - 1)
                enough = (
                    measured_row(logits_ptr, peak, inverse, least, by_count, score_of(middles), VOCAB, TILE, FLOORS)
                    >= target
                )
                end = tl.min(tl.where(enough, middles, end), 0)
                begin = tl.max(tl.where(enough, begin, middles + 1), 0)
            floor = tl.maximum(floor, score_of(end))
    everything = index * 0.0 + floor
    kept = tl.max(measured_row(logits_ptr, peak, inverse, least, False, everything, VOCAB, TILE, FLOORS), 0)
    return floor, kept


@triton.jit
def finish(
    logits_ptr, settings_ptr, peak_ptr, mass_ptr, low_ptr,
    total_ptr, over_mass_ptr, over_count_ptr, count_ptr, found_ptr, numbers_ptr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, SLOTS: tl.constexpr,
    FEW: tl.constexpr, TILE: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """One row a program: the exact floor among the scores in the bracket, or in the row if the bracket missed it."""
    row = tl.program_id(0)
    setting = settings_ptr + row // ROWS * SETTINGS
    inverse, least = tl.load(setting + INVERSE), tl.load(setting + LEAST)
    top_k, top_p = tl.load(setting + TOP_K), tl.load(setting + TOP_P)
    peak = tl.load(peak_ptr + row)
    kept = tl.load(mass_ptr + row)
    floor = tl.full([], float("-inf"), tl.float32)
    searched = (top_k > 0) | (top_p < 1.0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    at = row * CHUNKS + chunk
    if least > float("-inf"):
        kept = tl.sum(tl.load(total_ptr + at, mask=chunk < CHUNKS, other=0.0), 0)
    if searched:
        low = tl.load(low_ptr + row)
        over_mass = tl.sum(tl.load(over_mass_ptr + at, mask=chunk < CHUNKS, other=0.0), 0)
        over_count = tl.full([], 0, tl.int32)
        if top_k > 0:
            over_count = tl.sum(tl.load(over_count_ptr + at, mask=chunk < CHUNKS, other=0), 0)
        fullest = tl.max(tl.load(count_ptr + at, mask=chunk < CHUNKS, other=0), 0)
        counts, found = count_ptr + row * CHUNKS, found_ptr + row.to(tl.int64) * (CHUNKS * SLOTS)
        total = kept
        good = tl.full([], False, tl.int1)
        if fullest <= FEW:
            good, floor, kept = among_found(
                found, counts, top_k, top_p, least, total, over_mass, over_count, low, CHUNKS, CHUNKS_PADDED, SLOTS, FEW
            )
        elif fullest <= SLOTS:
            good, floor, kept = among_found(
                found, counts, top_k, top_p, least, total, over_mass, over_count, low, CHUNKS, CHUNKS_PADDED, SLOTS,
                SLOTS,
            )  # fmt: skip
        if not good:
            floor, kept = in_row(
                logits_ptr + row.to(tl.int64) * VOCAB, peak, inverse, least, top_k, top_p, VOCAB, TILE, FLOORS
            )
    tl.store(numbers_ptr + row * 3, tl.where(peak > float("-inf"), peak, 0.0))
    tl.store(numbers_ptr + row * 3 + 1, tl.maximum(floor, least))
    tl.store(numbers_ptr + row * 3 + 2, tl.log(kept))
