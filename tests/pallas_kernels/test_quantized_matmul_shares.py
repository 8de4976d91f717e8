"""Tiles that blocks of the Mosaic kernel of `quantized_matmul` share evenly: the cut, the exchange, the choice."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from quantized_matmul_cases import assert_mlp, assert_product, random_weight, random_x

from pallas_kernels import _dispatch, _mosaic, _quantized_mosaic
from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, take_apart
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, scale_steps, spare_rows
from pallas_kernels._quantized_mosaic_cut import Exchange, Shares
from pallas_kernels.quantized_matmul import mosaic_sm90, tuning

pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")  # the interpreter's threads, harmless

RACES, PLAIN = _mosaic.interpreter(detect_races=True), _mosaic.interpreter()
SWIGLU = Swiglu(1.702, 7.0, rounded=True)


def parts_of(weights) -> tuple[list, tuple]:
    taken = [take_apart(weight) for weight in weights]
    return [part for w in taken for part in (w.codes, w.scale, w.global_scale)], tuple(w.format for w in taken)


def run(x, weights, **static) -> list:
    flat, forms = parts_of(weights)
    out = mosaic_sm90.quantized_matmuls_mosaic(x, *flat, forms=forms, **static)
    return np.split(np.asarray(out), np.cumsum([weight.codes.shape[0] for weight in weights])[:-1], axis=1)


def weights_of(form: str, sizes: tuple[int, ...], inputs: int) -> list:
    ops = itertools.cycle(("multiply", "divide"))
    return [random_weight(form, i, out, inputs, op=op) for i, (out, op) in enumerate(zip(sizes, ops, strict=False))]


CUTS = [  # tiles, units of each, blocks: real launches, tiles longer than a share, shares of one unit, one block
    (154, 12, 132), (96, 16, 132), (96, 24, 132), (192, 12, 132), (48, 12, 132), (96, 6, 132),
    (3, 8, 7), (2, 24, 48), (5, 3, 4), (7, 4, 1), (1, 5, 3), (4, 2, 8), (132, 6, 132),
]  # fmt: skip


@pytest.mark.parametrize("of_x", [1, 2, 3])
@pytest.mark.parametrize("tiles, units, blocks", CUTS)
def test_every_unit_is_done_once_and_every_part_is_fetched(tiles: int, units: int, blocks: int, of_x: int) -> None:
    tiles = -(-tiles // of_x) * of_x
    shares = Shares(tiles, units, blocks, of_x)
    done, lengths = np.zeros((tiles // of_x, of_x, units), int), []
    left, fetched, owners, owning = set(), set(), set(), set()
    for block in range(blocks):
        count, before = int(shares.pieces(jnp.int32(block))), 0
        for item in range(count):
            piece = jax.tree.map(int, vars(shares.piece(jnp.int32(block), jnp.int32(item))))
            assert 0 <= piece["first"] < piece["end"] <= units and piece["before"] == before
            tile = piece["tile"], piece["block"]
            done[*tile, piece["first"] : piece["end"]] += 1
            before += piece["end"] - piece["first"]
            if piece["first"] > 0:
                assert item == 0 and piece["others"] == 0  # so that a block leaves one part at most, and at once
                left.add((block, tile))
                owners.add((piece["owner"], tile))
            assert (piece["others"] > 0) == (piece["first"] == 0 and piece["end"] < units)
            if piece["first"] == 0:
                assert piece["owner"] == block and piece["others"] <= shares.most_others
            fetched |= {(block - 1 - i, tile) for i in range(piece["others"])}
            owning |= {(block, tile)} if piece["others"] else set()
        lengths.append(before)
    assert (done == 1).all() and fetched == left and owners == owning
    assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1


FEW = Tiling(tokens=8, step=128, stages=4, split=2, scale_stages=3, unit=512)
CASES = [  # format, rows, outputs of the weights, inputs, multiprocessors, tiling
    ("mxfp8", 1, (192,), 1024, 2, FEW),
    ("mxfp8", 7, (128,), 2048, 5, dataclasses.replace(FEW, split=1, stages=3)),  # tiles that three blocks share
    ("nvfp4", 8, (128, 64, 192), 768, 4, dataclasses.replace(FEW, unit=256)),
    ("nvfp4", 64, (64,), 1536, 132, Tiling(tokens=64, step=128, stages=2, unit=512)),  # fewer units than blocks
    ("mxfp8", 20, (128, 64), 1024, 7, dataclasses.replace(FEW, split=1, stages=3)),  # three tiles of x
]
SLOW_CASES = [
    ("mxfp8", 8, (64, 192), 1536, 5, dataclasses.replace(FEW, split=4, step=128)),
    ("mxfp8", 56, (256, 128), 1024, 4, Tiling(tokens=56, step=128, stages=2, warpgroups=2, unit=1024)),
    ("mxfp8", 16, (128, 256), 1024, 5, Tiling(tokens=16, step=256, stages=4, warpgroups=2, split=2, unit=512)),
]
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_interpreted(case: tuple) -> None:
    form, rows, sizes, inputs, multiprocessors, tiling = case
    weights, x = weights_of(form, sizes, inputs), random_x(rows, rows, inputs)
    outs = run(x, weights, tiling=tiling, multiprocessors=multiprocessors, interpret=RACES)
    for out, weight in zip(outs, weights, strict=True):
        assert_product(out, x, weight)


PAIR = dataclasses.replace(FEW, warpgroups=2)


def run_mlp(x, weights, tilings=(PAIR, FEW), multiprocessors=5, interpret=RACES):
    flat, forms = parts_of(weights)
    static = dict(forms=forms, swiglu=SWIGLU, tilings=tilings, multiprocessors=multiprocessors, interpret=interpret)
    return mosaic_sm90.quantized_mlp_mosaic(x, *flat, **static)


def mlp_weights(forms: tuple[str, ...], outputs: int = 64) -> list:
    shapes = ((512, 1024), (512, 1024), (outputs, 512))
    return [random_weight(form, i, *shape) for i, (form, shape) in enumerate(zip(forms, shapes, strict=True))]


WIDE_PAIR = dataclasses.replace(PAIR, warpgroups=4, split=1)  # two of gate, two of up


@pytest.mark.parametrize(
    "forms, rows, first",
    [
        (("mxfp8",) * 3, 7, PAIR),
        pytest.param(("nvfp4", "nvfp4", "mxfp8"), 64, PAIR, marks=pytest.mark.slow),
        (("mxfp8", "mxfp8", "nvfp4"), 5, WIDE_PAIR),
        pytest.param(("mxfp8",) * 3, 11, PAIR, marks=pytest.mark.slow),
        pytest.param(("nvfp4",) * 3, 5, dataclasses.replace(WIDE_PAIR, unit=None), marks=pytest.mark.slow),
    ],
    ids=["mxfp8-7", "mixed-64", "wide", "two tiles of x", "wide-whole"],
)
def test_mlp_interpreted(forms: tuple, rows: int, first: Tiling) -> None:
    """Gate, up and SwiGLU in 16 units among 5 blocks, written in the order of a second launch that shares tiles too."""
    weights, x = mlp_weights(forms), random_x(rows, rows, 1024) * jnp.bfloat16(2.0**-6)
    tokens = 8 if rows < 64 else 64
    tilings = tuple(dataclasses.replace(t, tokens=tokens, stages=2) for t in (first, FEW))
    assert_mlp(run_mlp(x, weights, tilings), x, *weights)


@pytest.mark.parametrize("form, unit", [("mxfp8", 512), ("nvfp4", None)])
def test_zeros_behind_the_rows_are_for_the_next_launch(form: str, unit: int | None) -> None:
    """Beside the same rows; the counters of the next launch lie there, and all of it is written."""
    weight, x = take_apart(random_weight(form, 1, 192, 1024)), random_x(1, 8, 1024)
    tiling = dataclasses.replace(FEW, unit=unit)
    x = jnp.pad(x, ((0, spare_rows(tiling, 1024, 2)), (0, 0)))
    static = dict(tiling=tiling, multiprocessors=2, interpret=RACES)
    rows, longer = (_quantized_mosaic.multiply(x, [weight], spare=spare, **static) for spare in (0, 8))
    assert longer.shape == (16, 192) and np.array_equal(longer[:8], rows) and not np.asarray(longer[8:]).any()


def test_counters_have_room_and_start_at_zero() -> None:
    assert spare_rows(dataclasses.replace(FEW, unit=None), 512, 132) == 0
    for multiprocessors, inputs, rows in [(132, 6144, 8), (132, 512, 8), (132, 32, 16), (1, 512, 8)]:
        found = spare_rows(FEW, inputs, multiprocessors)
        assert found == rows and found * inputs * 2 >= multiprocessors * 4
    x = random_x(1, 7, 512)
    ordered = mosaic_sm90._in_order(MXFP8, x, FEW, 132)
    assert ordered.shape == (16, 512) and not np.asarray(ordered[7:]).any()


def test_the_same_bits_as_of_whole_tiles_where_no_tile_is_cut() -> None:
    weights, x = weights_of("mxfp8", (128, 128), 1024), random_x(1, 5, 1024)
    static = dict(multiprocessors=4, interpret=PLAIN)
    shared = run(x, weights, tiling=FEW, **static)
    whole = run(x, weights, tiling=dataclasses.replace(FEW, unit=None), **static)
    for a, b in zip(shared, whole, strict=True):
        assert np.array_equal(a, b)


def not_added(exchange: Exchange, block, finisher) -> list:
    return [jnp.zeros_like(part) for part in take(exchange, block, finisher)]


def added_twice(exchange: Exchange, block, finisher) -> list:
    return [part + part for part in take(exchange, block, finisher)]


def of_the_wrong_block(exchange: Exchange, block, finisher) -> list:
    return take(exchange, block + 1, finisher)


def gate_for_up(exchange: Exchange, block, finisher) -> list:
    return take(exchange, block, finisher)[::-1]


def signalled_before_it_is_written(exchange: Exchange, block, owner, finisher, parts) -> None:
    exchange.signal(block, owner, finisher)
    exchange.write(block, finisher, parts)


def not_signalled(exchange: Exchange, block, owner, finisher, parts) -> None:
    exchange.write(block, finisher, parts)


def without_the_last_unit(shares: Shares, block):
    return ((shares.blocks - 1 - block) * (shares.tiles * shares.units - 1)) // shares.blocks


take = Exchange.take


@functools.cache
def nine_units() -> tuple:
    """Result, x and weight of 3 tiles of 3 units among 4 blocks."""
    weights, x = [random_weight("mxfp8", 1, 192, 1536, plain=True)], random_x(1, 7, 1536)
    return *run(x, weights, tiling=FEW, multiprocessors=4, interpret=PLAIN), x, weights[0]


@pytest.mark.parametrize(
    "of, name, mutant",
    [
        (Exchange, "take", not_added),
        (Exchange, "take", added_twice),
        (Exchange, "take", of_the_wrong_block),
        (Exchange, "leave", signalled_before_it_is_written),
        (Exchange, "leave", not_signalled),
        (Shares, "start", without_the_last_unit),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_mutants_are_caught(of: type, name: str, mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_product(*nine_units())
    monkeypatch.setattr(of, name, mutant)
    with pytest.raises(AssertionError, match="of the elements are wrong"):
        assert_product(*nine_units.__wrapped__())


@pytest.mark.parametrize("mutant", [not_added, gate_for_up], ids=lambda m: m.__name__)
def test_mutants_of_the_mlp_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = mlp_weights(("mxfp8",) * 3), random_x(2, 8, 1024) * jnp.bfloat16(2.0**-6)
    monkeypatch.setattr(Exchange, "take", mutant)
    with pytest.raises(AssertionError, match="too far"):
        assert_mlp(run_mlp(x, weights, interpret=PLAIN), x, *weights)


def abstract(form, out: int, inputs: int) -> list:
    shape, f8 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn
    codes = shape((out, form.bytes(inputs)), f8 if form is MXFP8 else jnp.uint8)
    scale = shape((out, inputs // form.block), jnp.uint8 if form is MXFP8 else f8)
    return [codes, scale, shape((), jnp.float32)]


ATTENTION, CONTEXT = (8192, 512, 512, 512, 128), (512,) * 10  # q, k, v and the index; k and v of five layers
# Outputs, inputs, rows, gate and up with a SwiGLU; whether shared tiles were faster on an H200.
MEASURED = [
    (12288, 6144, 8, True, True), (6144, 12288, 8, False, False), (ATTENTION, 6144, 8, False, True),
    (6144, 8192, 8, False, False), (3072, 6144, 8, True, True), (6144, 3072, 8, False, False),
    (12288, 6144, 64, True, True), (6144, 12288, 64, False, True), (ATTENTION, 6144, 64, False, True),
    (6144, 8192, 64, False, True), (3072, 6144, 64, True, True), (6144, 3072, 56, False, False),
    (CONTEXT, 6144, 56, False, True),
    (12288, 6144, 128, True, True), (6144, 12288, 128, False, True), (ATTENTION, 6144, 128, False, True),
    (6144, 8192, 128, False, True), (6144, 3072, 128, False, False), (CONTEXT, 6144, 128, False, True),
    (12288, 6144, 256, True, False), (6144, 12288, 256, False, True), (ATTENTION, 6144, 256, False, True),
    (6144, 8192, 256, False, True), (3072, 6144, 256, True, False), (6144, 3072, 256, False, False),
    (12288, 6144, 512, True, False), (ATTENTION, 6144, 512, False, True), (8192, 6144, 512, False, False),
    (6144, 8192, 512, False, False), (6144, 12288, 512, False, False),
    (3072, 6144, 512, True, False), (6144, 3072, 512, False, False), (CONTEXT, 6144, 512, False, False),
]  # fmt: skip


@pytest.mark.parametrize("out, inputs, rows, swiglu, shared", MEASURED)
def test_tiles_are_shared_where_that_was_faster(
    out, inputs: int, rows: int, swiglu: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = functools.partial(tuning.choose_mosaic, MXFP8, rows, out, inputs, swiglu=swiglu)
    assert bool(choose().unit) == shared
    monkeypatch.setattr(tuning, "EXCHANGE", float("inf"))
    assert choose().unit is None


def test_tiles_that_fill_the_multiprocessors_stay_whole() -> None:
    assert tuning.choose_mosaic(MXFP8, 8, 8192, 6144).unit is None  # 128 tiles
    assert tuning.choose_mosaic(MXFP8, 64, 64 * 132, 6144).unit is None
    assert tuning.choose_mosaic(MXFP8, 513, 9856, 6144).unit is None  # not timed


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("sizes, inputs", [(ATTENTION, 6144), ((6144,), 8192)], ids=["attention", "o"])
def test_launches_of_the_model_lower_to_cuda(sizes: tuple, inputs: int, rows: int, form) -> None:
    candidate = next(c for c in tuning.find(form, rows).mosaic if c.unit)
    static = dict(forms=(form,) * len(sizes), tiling=candidate.tiling(rows, form, inputs))
    parts = [part for size in sizes for part in abstract(form, size, inputs)]
    run = functools.partial(mosaic_sm90.quantized_matmuls_mosaic, **static)
    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), *parts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    # XLA has to know that the kernel writes into x: another launch may read the same one.
    assert len(re.findall("stablehlo.output_operand_alias<", text)) == 1


@pytest.mark.parametrize("rows", [64, 300])
@pytest.mark.parametrize("checked, split", [(True, True), (True, False), (False, True)])
def test_inside_shard_map(checked: bool, split: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks take no kernel that writes into what varies (the mutant): tiles are not shared there."""
    mesh, chosen, choose = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,)), [], mosaic_sm90.choose_mosaic
    monkeypatch.setattr(mosaic_sm90, "choose_mosaic", lambda *a, **b: chosen.append(choose(*a, **b)) or chosen[-1])
    own, everywhere = PartitionSpec("x" if split else None), PartitionSpec()
    weight = abstract(MXFP8, 6144, 6144)
    one = functools.partial(mosaic_sm90.quantized_matmuls_mosaic, forms=(MXFP8,))
    mlp = functools.partial(mosaic_sm90.quantized_mlp_mosaic, forms=(MXFP8,) * 3, swiglu=SWIGLU)

    def shapes() -> list:
        mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=own, check_vma=checked)
        x = jax.ShapeDtypeStruct((4 * rows if split else rows, 6144), jnp.bfloat16)
        return [
            jax.eval_shape(mapped(run, in_specs=(own, *[everywhere] * len(parts))), x, *parts).shape[1]
            for run, parts in ((one, weight), (mlp, weight * 3))
        ]

    assert shapes() == [6144] * 2
    assert any(tiling.unit for tiling in chosen) == (not (checked and split))
    if checked and split:
        monkeypatch.setattr(_mosaic, "writable", lambda *_: True)
        with pytest.raises(ValueError, match="varying manual axis types"):
            shapes()


def test_a_vmapped_batch_may_be_more_rows_than_were_seen() -> None:
    """Of 64 outputs, which tiles of two warpgroups do not cut."""
    program = mosaic_sm90._program((MXFP8,), 132)
    run = jax.vmap(_dispatch.opaque_rows("quantized_matmul", program), in_axes=(0, None, None, None))
    out = jax.eval_shape(run, jax.ShapeDtypeStruct((16, 8, 512), jnp.bfloat16), *abstract(MXFP8, 64, 512))
    assert out.shape == (16, 8, 64)


def test_units_are_validated() -> None:
    with pytest.raises(ValueError, match="multiple of step 128 times split 2, got 384"):
        dataclasses.replace(FEW, unit=384)
    with pytest.raises(ValueError, match="few is for tiles of experts and unit for those without, got 8 and 512"):
        dataclasses.replace(FEW, tokens=16, few=8)
    with pytest.raises(NotImplementedError, match="in units of 512, cannot cut 6400 inputs of mxfp8"):
        scale_steps(MXFP8, FEW, 6400)
    assert scale_steps(MXFP8, FEW, 6144) == 4 and scale_steps(NVFP4, FEW, 6144) == 4
    assert scale_steps(MXFP8, dataclasses.replace(FEW, unit=None), 6144) > 4
    weight = take_apart(random_weight("mxfp8", 1, 128, 512))
    with pytest.raises(ValueError, match="tiles are shared where there are no experts"):
        experts = jnp.zeros(2, jnp.int32)
        _quantized_mosaic.multiply(random_x(1, 16, 512), [weight], tiling=FEW, experts=experts, interpret=PLAIN)
