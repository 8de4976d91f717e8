"""The Triton kernel of `spreading`: one program for the tiles, the others for places and rows."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def load_pairs(experts_ptr, positions_ptr, pair, CHOICES: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of each pair, -1 for one that names none, is padding or does not exist."""
    expert = tl.load(experts_ptr + pair, mask=pair < PAIRS, other=-1)
    position = tl.load(positions_ptr + pair // CHOICES, mask=pair < PAIRS, other=-1)
    return tl.where((position >= 0) & (expert < EXPERTS), tl.maximum(expert, -1), -1)


@triton.jit
def spread(
    x_ptr, experts_ptr, positions_ptr,
    tiles_ptr, places_ptr, counts_ptr, rows_ptr,  # outputs: see `spread_by_expert`
    CHOICES: tl.constexpr, CHOICES_PADDED: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
    MOST_PADDED: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert, pair = tl.arange(0, EXPERTS_PADDED), tl.arange(0, PAIRS_PADDED)
    of = load_pairs(experts_ptr, positions_ptr, pair, CHOICES, PAIRS, EXPERTS)
    pairs = tl.histogram(tl.maximum(of, 0), EXPERTS_PADDED, mask=of >= 0)
    tiles = (pairs + (TILE - 1)) // TILE
    if program == 0:
        used = tl.sum(tiles, axis=0)
        first = tl.cumsum(tiles, axis=0) - tiles
        tl.store(tiles_ptr, used)
        for i in range(0, tl.max(tiles, axis=0)):
            tl.store(tiles_ptr + 1 + first + i, expert, mask=i < tiles)
            tl.store(counts_ptr + first + i, tl.minimum(pairs - i * TILE, TILE), mask=i < tiles)
        index = tl.arange(0, MOST_PADDED)
        unused, nothing = (index >= used) & (index < MOST), tl.zeros((MOST_PADDED,), tl.int32)
        tl.store(tiles_ptr + 1 + index, nothing, mask=unused)
        tl.store(counts_ptr + index, nothing, mask=unused)
    else:
        BLOCKS: tl.constexpr = (WORDS + WIDTH - 1) // WIDTH
        row, block = (program - 1) // BLOCKS, (program - 1) % BLOCKS
        word = block * WIDTH + tl.arange(0, WIDTH)
        # Of each slab, pairs j of the inputs of thread q come from thread j of pairs q.
        inside = word % (4 * SWAPPED)
        source = word - inside + inside % 4 * SWAPPED + inside // 4
        values = tl.load(x_ptr + row * WORDS + source, mask=word < WORDS, other=0)
        choice = tl.arange(0, CHOICES_PADDED)
        mine = row * CHOICES + choice
        own = tl.where(choice < CHOICES, load_pairs(experts_ptr, positions_ptr, mine, CHOICES, PAIRS, EXPERTS), -1)
        before = tl.sum(tl.where(expert[None, :] < own[:, None], tiles[None, :], 0), axis=1)
        earlier = (of[None, :] == own[:, None]) & (pair[None, :] < mine[:, None])
        place = before * TILE + tl.sum(earlier.to(tl.int32), axis=1)
        if block == 0:
            tl.store(places_ptr + mine, tl.where(own >= 0, place, 0), mask=choice < CHOICES)
        tl.store(
            rows_ptr + place.to(tl.int64)[:, None] * WORDS + word[None, :],
            tl.broadcast_to(values[None, :], (CHOICES_PADDED, WIDTH)),
            mask=(own >= 0)[:, None] & (word < WORDS)[None, :],
        )  # fmt: skip
