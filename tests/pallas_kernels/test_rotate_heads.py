"""`rotate_heads` against float64 in numpy: through XLA, as a Mosaic kernel in the interpreter, lowered, on a GPU."""

import copy
import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_marks import needs_sm90
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import Heads, _mosaic, rotate_heads
from pallas_kernels.rotate_heads import api, mosaic_sm90
from pallas_kernels.rotate_heads.mosaic_sm90 import FEW, MANY, rotate_heads_mosaic
from pallas_kernels.rotate_heads.problem import Problem, Segment

D = 128
# One rounding to bfloat16 is half a step of 2^-7 of the value; a pair that nearly cancels keeps the error of its parts.
RELATIVE, ABSOLUTE = 2.0**-8 * 1.01, 2e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads, tokens and constants. `layout`: (count, normed, cached) of each group of heads."""

    layout: tuple[tuple[int, bool, bool], ...]
    positions: tuple[tuple[int, ...], ...]
    slots: int = 16
    rotary_dim: int = 64
    theta: float = 5e6
    plus_one: bool = True
    ring: bool = False

    def draw(self, dtype=jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, jax.Array, list[Heads]]:
        draw = np.random.default_rng(seed)
        batch, tokens = np.shape(self.positions)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(draw.normal(size=shape), jnp.float32).astype(dtype)

        x = normal(batch, tokens, sum(count for count, _, _ in self.layout) * D) * jnp.asarray(3, dtype)
        heads = []
        for count, normed, cached in self.layout:
            shape = (batch, self.slots, D) if count == 1 else (batch, self.slots, count, D)
            weight, cache = normal(D) if normed else None, normal(*shape) if cached else None
            heads.append(Heads(count=count, weight=weight, cache=cache))
        return x, jnp.asarray(self.positions, jnp.int32), heads

    @property
    def static(self) -> dict:
        return dict(
            head_dim=D, rotary_dim=self.rotary_dim, theta=self.theta, eps=1e-6, plus_one=self.plus_one, ring=self.ring
        )

    def expected(self, x, positions, heads: list[Heads], mutant: str = "") -> list[np.ndarray]:
        x = np.asarray(x, np.float64).reshape(*x.shape[:2], -1, D)
        half, results, start = self.rotary_dim // 2, [], 0
        frequency = (self.theta ** (-np.arange(half) / half)).astype(
            np.float32
        )  # the angles are float32, by definition
        angle = (np.asarray(positions, np.float32)[..., None, None] * frequency).astype(np.float64)
        cos, sin = np.cos(angle), np.sin(angle)
        if mutant == "other direction":
            sin = -sin
        for each in heads:
            part = x[:, :, start : start + each.count]
            start += each.count
            if each.weight is not None:
                weight = np.asarray(each.weight, np.float64) + (self.plus_one and mutant != "no one")
                part = part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-6) * weight
                a, b = part[..., :half], part[..., half : 2 * half]
                if mutant == "neighbours":
                    a, b = part[..., : 2 * half : 2], part[..., 1 : 2 * half : 2]
                part = np.concatenate([a * cos - b * sin, b * cos + a * sin, part[..., 2 * half :]], -1)
            if each.cache is None:
                results.append(part)
                continue
            cache = np.array(each.cache, np.float64).reshape(*each.cache.shape[:2], each.count, D)
            for b, t in np.ndindex(*positions.shape):
                p = int(positions[b, t])
                p = p % self.slots if self.ring and p >= 0 else p
                if mutant == "padding written" and p < 0:
                    p = self.slots - 1
                if 0 <= p < self.slots:
                    cache[b, p] = part[b, t]
            results.append(cache.reshape(each.cache.shape))
        return results


TARGET = Case(
    layout=((64, True, False), (4, True, True), (4, False, True), (4, True, False), (1, True, True)),
    positions=((3, 4, 5), (14, 15, 16), (9, -1, -1)),
)
CASES = {
    "target": TARGET,
    "dense layer": dataclasses.replace(TARGET, layout=TARGET.layout[:3]),
    "drafter": Case(layout=((64, True, False), (4, True, False), (4, False, False)), positions=((500_000, 500_001),)),
    "context": Case(
        layout=((4, True, True), (4, False, True)) * 5, positions=((14, 15, 16, 17), (-1, 31, 32, -1)), ring=True
    ),
    "full rotation, plain norm": Case(
        layout=((16, True, False), (2, True, True), (2, False, True)), positions=((0, 1),), rotary_dim=D,
        plus_one=False, theta=1e6,
    ),
    "heads across the edge of a block": Case(
        layout=((60, False, False), (12, True, False), (70, True, True)), positions=((7,),)
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def wrong(actual, expected: list[np.ndarray]) -> list[int]:
    """Numbers of the results that are further off than rounding explains."""
    bad = []
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert got.shape == want.shape
        if not np.all(np.abs(np.asarray(got, np.float64) - want) <= RELATIVE * np.abs(want) + ABSOLUTE):
            bad.append(i)
    return bad


def mosaic(case: Case, x, positions, heads: list[Heads], interpret, together: int | None = None) -> list[jax.Array]:
    caches = [h.cache.reshape(*h.cache.shape[:2], h.count, D) for h in heads if h.cache is not None]
    weights = [h.weight for h in heads if h.weight is not None]
    problem = api._describe(x, positions, heads, *case.static.values())
    out = rotate_heads_mosaic(x, positions, *caches, *weights, problem=problem, together=together, interpret=interpret)
    return [o if h.cache is None else o.reshape(h.cache.shape) for o, h in zip(out, heads, strict=True)]


@every_case
def test_xla(case: Case) -> None:
    given = case.draw()
    assert not wrong(rotate_heads(*given, **case.static, implementation="xla"), case.expected(*given))


@every_case
@pytest.mark.parametrize("together", [FEW, MANY])
@pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")
def test_mosaic_interpreted(case: Case, together: int) -> None:
    x, positions, heads = case.draw()
    pieces = [(h.weight, h.cache) for h in heads]

    def with_pieces(x, pieces):
        return mosaic(
            case, x, positions,
            [Heads(count=h.count, weight=w, cache=c) for h, (w, c) in zip(heads, pieces, strict=True)],
            _mosaic.interpreter(detect_races=True), together,
        )  # fmt: skip

    run = jax.jit(with_pieces)
    actual = run(x, pieces)
    assert not wrong(actual, case.expected(x, positions, heads))
    # Bit for bit what XLA makes of it, but for an odd sum of squares that ends a bit lower.
    for got, want in zip(actual, rotate_heads(x, positions, heads, **case.static, implementation="xla"), strict=True):
        assert np.mean(np.asarray(got) != np.asarray(want)) < 1e-3


@pytest.mark.parametrize("mutant", ["other direction", "no one", "neighbours", "padding written"])
def test_mutants(mutant: str) -> None:
    given = TARGET.draw()
    assert wrong(rotate_heads(*given, **TARGET.static, implementation="xla"), TARGET.expected(*given, mutant=mutant))


@every_case
def test_lowers_to_cuda_with_the_caches_in_place(case: Case) -> None:
    x, positions, heads = case.draw()
    text = jax.jit(lambda x: mosaic(case, x, positions, heads, None)).trace(x).lower(lowering_platforms=("cuda",))
    text = text.as_text()
    assert text.count("mosaic_gpu_v2") == 1
    cached = sum(h.cache is not None for h in heads)
    assert len(re.findall("stablehlo.output_operand_alias<", text)) == cached


def test_errors() -> None:
    x, positions, heads = TARGET.draw()
    with pytest.raises(NotImplementedError, match=r"rotate_heads\(implementation='mosaic'\).*NVIDIA"):
        rotate_heads(x, positions, heads, **TARGET.static, implementation="mosaic")
    run = functools.partial(rotate_heads, implementation="xla", **TARGET.static)
    with pytest.raises(ValueError, match="x must be"):
        run(x[..., :-D], positions, heads)
    with pytest.raises(ValueError, match="heads must hold at least one group of heads, got none"):
        run(x, positions, [])
    with pytest.raises(ValueError, match="head_dim must be at least 1, got -8"):
        run(x, positions, heads, head_dim=-8)
    short = [*heads[:1], dataclasses.replace(heads[1], cache=heads[1].cache[..., :3, :]), *heads[2:]]
    with pytest.raises(ValueError, match=r"heads\[1\].cache must be"):
        run(x, positions, short)
    narrow = [dataclasses.replace(heads[0], weight=heads[0].weight[:64]), *heads[1:]]
    with pytest.raises(ValueError, match=r"heads\[0\].weight must be"):
        run(x, positions, narrow)
    with pytest.raises(TypeError, match="cache must have x's dtype"):
        run(x.astype(jnp.float32), positions, heads)
    with pytest.raises(ValueError, match="rotary_dim"):
        run(x, positions, heads, rotary_dim=63)


def test_errors_of_what_is_part_of_the_program() -> None:
    x, positions, heads = TARGET.draw()
    unchecked = inspect.unwrap(rotate_heads)  # the test run's shape checker would speak first

    def run(heads: Any = heads, **changes: Any) -> Any:
        return unchecked(x, positions, heads, **TARGET.static | changes, implementation="xla")

    def of_first(**changes: Any) -> list[Heads]:
        first = copy.copy(heads[0])
        for name, value in changes.items():
            object.__setattr__(first, name, value)  # past the shape checker, which looks at new ones
        return [first, *heads[1:]]

    for wrong, error, text in (
        (dict(heads=heads[0]), TypeError, "heads must be several Heads, such as a list, found Heads"),
        (dict(heads=[*heads[:-1], "x"]), TypeError, r"heads\[4\] must be a Heads, found str"),
        (dict(heads=of_first(count=64.0)), TypeError, r"heads\[0\].count must be a Python int, got float"),
        (dict(heads=[Heads(count=0), *heads]), ValueError, r"heads\[0\].count must be at least 1, got 0"),
        (dict(heads=of_first(weight=jnp.ones(D, jnp.int32))), TypeError, r"heads\[0\].weight must be floating point"),
        (dict(heads=of_first(cache=jnp.ones((3, 0, 64, D), x.dtype))), ValueError, r"cache must be \[3, S >= 1, 64"),
        (dict(head_dim=128.0), TypeError, "head_dim must be a Python int, got float"),
        (dict(rotary_dim=jnp.int32(64)), TypeError, "rotary_dim must be a Python int, got Array"),
        (dict(plus_one=jnp.asarray(True)), TypeError, "plus_one must be True or False"),
        (dict(ring=None), TypeError, "ring must be True or False, got NoneType"),
        (dict(theta=0.0), ValueError, "theta must be positive"),
        (dict(eps=-1.0), ValueError, "eps not negative"),
    ):
        with pytest.raises(error, match=text):
            run(**wrong)


def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 96 lie at multiples of 192 bytes, where the copy engine cannot read them; nothing is no launch."""
    monkeypatch.setattr(_mosaic, "require_sm90", lambda _: 132)
    x, problem = (
        jnp.zeros((1, 1, 192), jnp.bfloat16),
        Problem((Segment(0, 1, True, False),), 64, 64, 1e4, 1e-6, True, False),
    )
    mosaic_sm90.build(x, problem=problem)
    for head_dim in (32, 96, 160, 224, 320):
        with pytest.raises(NotImplementedError, match="heads of 64, 128, 192 and 256"):
            mosaic_sm90.build(x, problem=dataclasses.replace(problem, head_dim=head_dim))
    with pytest.raises(NotImplementedError, match="at least one token"):
        mosaic_sm90.build(x[:, :0], problem=problem)


def test_inside_shard_map_with_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses kernels that write into what varies (the mutant); without its checks, or split, it takes them."""
    monkeypatch.setattr(_mosaic, "require_sm90", lambda _: 132)
    mesh, spec = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
    shape = jax.ShapeDtypeStruct

    def trace(checked: bool, implementation: str | None) -> str:
        def run(x: jax.Array, positions: jax.Array, cache: jax.Array) -> jax.Array:
            heads = [Heads(count=1, cache=cache)]
            static = dict(head_dim=D, rotary_dim=64, theta=1e4, eps=1e-6, plus_one=True)
            return rotate_heads(x, positions, heads, implementation=implementation, **static)[0]

        mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=checked)
        arrays = shape((8, 2, D), jnp.bfloat16), shape((8, 2), jnp.int32), shape((8, 16, 1, D), jnp.bfloat16)
        return str(jax.make_jaxpr(mapped)(*arrays))

    assert "name=rotate_heads" in trace(False, "mosaic") and "name=rotate_heads" not in trace(True, None)
    with pytest.raises(NotImplementedError, match="use check_vma=False"):
        trace(True, "mosaic")
    monkeypatch.setattr(_mosaic, "writable", lambda *_: True)
    with pytest.raises(ValueError, match="varying manual axis types"):
        trace(True, "mosaic")


def test_more_tokens_than_a_second_axis_of_a_grid_takes() -> None:
    """CUDA's grids end at 65,535 but along their first axis."""
    rows = 70_000
    x, positions = (jax.ShapeDtypeStruct(s, d) for s, d in (((1, rows, 1280), jnp.bfloat16), ((1, rows), jnp.int32)))
    problem = Problem((Segment(0, 20, False, False),), 64, 64, 1e4, 1e-6, True, False)
    run = functools.partial(rotate_heads_mosaic, problem=problem, together=16)
    traced = str(jax.make_jaxpr(run)(x, positions))
    assert re.findall(r"grid=\((.*?)\)", traced) == [f"{2 * rows},"]


@needs_sm90
@every_case
@pytest.mark.parametrize("together", [FEW, MANY])
def test_gpu(case: Case, together: int) -> None:
    for seed in range(2):
        x, positions, heads = case.draw(seed=seed)
        run = jax.jit(lambda x, positions, heads=heads: mosaic(case, x, positions, heads, None, together))
        actual = run(x, positions)
        assert not wrong(actual, case.expected(x, positions, heads))
        again = run(x, positions)
        assert all(np.array_equal(a, b) for a, b in zip(actual, again, strict=True))
