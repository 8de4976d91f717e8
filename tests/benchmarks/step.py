"""Times one draft-verify step of the real geometry on one GPU, whole and by part, beside the bytes it has to move.

    python tests/benchmarks/step.py [--layers 6] [--batch 1 8 64] [--context 4096 32768] [--weights native|bf16]
    python tests/benchmarks/step.py --graphs                  # wall time alone, with XLA's command buffers
    python tests/benchmarks/step.py --tiny                    # the same path in a minute on a CPU, wall clock

The target is a slice of the released geometry (one dense layer, the rest MoE), the drafter is the whole released one;
random weights are made on the device in their storage formats. Acceptance is forced to 2.6 of 7 drafts. Caches are
filled with random keys instead of a prefill. Times are sums of the CUPTI kernel durations of one call, median of many;
"wall" is the time from call to call of the whole step. The profiler cannot tell the kernels of a command buffer apart,
so these are off unless `--graphs` is given, which leaves the kernel times out. A floor is bytes over the fastest
stream that this process measured: weights (of the experts that were chosen), the keys and values that the selection or
the window names, index keys, and logits.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Set before jax is imported; `attention` would turn the search for the best matrix products off.
GRAPHS = "--graphs" in sys.argv
os.environ.setdefault("XLA_FLAGS", "" if GRAPHS else "--xla_gpu_enable_command_buffer=")

# ruff: noqa: E402
import attention as timing
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from real_size import configs, fill, formats

import dspark_jax as ds
from dspark_jax import sampling
from dspark_jax.attention import LayerCache
from dspark_jax.speculation import Plan, verify_block

FORCED = 2.6


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of the step: `function(carry, *args) -> carry, out` with the carry donated, how often a step runs it, and
    the bytes it has to move each time."""

    name: str
    function: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]
    times: int
    nbytes: float


class WallClock:
    """Stands in for the profiler where there is no GPU."""

    def microseconds(self, launch: Callable[[], Any]) -> tuple[float, float]:
        launch()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            launch()
            times.append(time.perf_counter() - start)
        return (1e6 * float(np.median(times)),) * 2


def nbytes(*trees: Any) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(trees))


def random_like(tree: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    make = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype))
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    return jax.tree.unflatten(structure, [make(k, leaf) for k, leaf in zip(keys, leaves, strict=True)])


def make_state(model: ds.Model, batch: int, context: int, config: ds.GenerateConfig, params: ds.SamplingParams):
    """A running state in the middle of a row: short prompts are prefilled, then the caches are filled at random."""
    prompts = jnp.ones((batch, 16), jnp.int32)
    lengths = jnp.full((batch,), 16, jnp.int32)
    state = ds.prefill(model, prompts, lengths, ds.request_keys(range(batch)), params, config=config)
    return dataclasses.replace(
        state,
        anchor=jnp.arange(batch, dtype=jnp.int32) % model.target.config.vocab_size,
        position=jnp.full((batch,), context, jnp.int32),
        cache=random_like(state.cache, 5),
        draft_cache=None if state.draft_cache is None else random_like(state.draft_cache, 6),
    )


def parts(model: ds.Model, state: Any, config: ds.GenerateConfig, context: int) -> list[Part]:
    """The parts of a step. Only shapes and caches are taken from `state`, which stays usable."""
    target, drafter = model.target, model.drafter
    assert drafter is not None
    t, d = target.config, drafter.config
    plan = Plan.of(model, config)
    drafts, batch = plan.num_drafts, state.anchor.shape[0]
    half = jnp.dtype(target.compute_dtype).itemsize
    positions = state.position[:, None] + jnp.arange(drafts + 1, dtype=jnp.int32)[None, :]
    x = random_like(jax.ShapeDtypeStruct((batch, drafts + 1, t.hidden_size), target.compute_dtype), 7)
    keys = sampling.step_keys(state.keys, state.step)
    logits = random_like(jax.ShapeDtypeStruct((batch, drafts + 1, t.vocab_size), jnp.float32), 8)
    hidden = x[:, :drafts]

    def draft_body(carry, drafter, embed, head, anchor, p0, cache):
        return carry, drafter.block(anchor, p0, cache, num_slots=drafts, embed=embed, head=head)

    def draft_chain(carry, drafter, base, hidden, anchor, keys, temperature):
        allowed = jnp.arange(base.shape[-1]) != d.mask_token_id
        return carry, sampling.draft(
            base,
            hidden,
            anchor,
            markov=drafter.markov_head,
            temperature=temperature,
            keys=keys,
            method=config.draft,
            allowed=allowed,
        )

    def draft_context(cache, drafter, features, positions):
        return drafter.write_context(features, positions, cache), ()

    def attention(cache, layer, x, positions):
        out, cache, blocks = layer.attention(layer.input_norm(x), positions, cache)
        return cache, (x + out, blocks)

    def index(index_keys, indexer, x, positions):
        blocks, index_keys = indexer(x, positions, index_keys)
        return index_keys, blocks

    def moe(carry, layer, x, positions):
        out, experts, _ = layer.moe(layer.post_attention_norm(x), positions)
        return carry, (x + out, experts)

    def dense(carry, layer, x):
        return carry, x + layer.mlp(layer.post_attention_norm(x))

    def head(carry, target, x):
        return carry, target.lm_head.logits(target.norm(x))

    def verification(carry, logits, draft_tokens, log_q, keys, state):
        log_p = sampling.target_log_probs(logits, state.params)
        forced = dataclasses.replace(config, benchmark_forced_acceptance=None)
        lengths = jnp.full((batch,), drafts, jnp.int32)
        return carry, verify_block(draft_tokens, log_q, log_p, keys, lengths, state, forced, plan)

    base = logits[:, :drafts]
    temperature = jnp.asarray(state.params.temperature)
    chain = jax.jit(draft_chain)((), drafter, base, hidden, state.anchor, keys, temperature)[1]
    moe_layers = [i for i, is_moe in enumerate(t.moe_layers) if is_moe]
    dense_layers = [i for i in range(t.num_layers) if i not in moe_layers]
    one = moe_layers[0]
    layer = target.layers[one]
    chosen = np.asarray(jax.jit(moe)((), layer, x, positions)[1][1])
    active = len(np.unique(chosen))
    experts = nbytes(layer.moe.experts) * active / t.num_experts
    seen = min(context + drafts + 1, d.window or context)
    kv_row = 2 * d.num_kv_heads * d.head_dim * half
    selected = min(t.top_k_blocks * t.block_size, context)
    selected_bytes = batch * selected * 2 * t.num_kv_heads * t.head_dim * half
    index_bytes = batch * context * t.index_head_dim * half
    indexer = nbytes(layer.attention.indexer)
    logits_bytes, base_bytes = nbytes(logits), nbytes(base)
    features = [random_like(x, 20 + i) for i in range(len(plan.capture))]
    projections = [(block.attention.k_proj, block.attention.v_proj) for block in drafter.layers]
    slim = dataclasses.replace(state, cache=None, draft_cache=None, tokens=None, steps=None)

    def layer_cache(i: int) -> LayerCache:
        copy = jax.tree.map(jnp.copy, (state.cache.keys[i], state.cache.values[i], state.cache.index_keys[i]))
        return LayerCache(keys=copy[0], values=copy[1], index_keys=copy[2])

    one_cache = layer_cache(one)
    return [
        Part(
            "draft: body and head",
            draft_body,
            (),
            (drafter, target.embed_tokens, target.lm_head, state.anchor, state.position, state.draft_cache),
            1,
            nbytes(drafter.layers, drafter.norm, target.lm_head) + base_bytes + batch * seen * kv_row * d.num_layers,
        ),
        Part(
            "draft: Markov chain and draws",
            draft_chain,
            (),
            (drafter, base, hidden, state.anchor, keys, temperature),
            1,
            drafts * nbytes(drafter.markov_head.w2) + 2 * base_bytes,
        ),
        Part(
            "draft: context of the accepted",
            draft_context,
            jax.tree.map(jnp.copy, state.draft_cache),
            (drafter, features, positions),
            1,
            nbytes(drafter.fc, projections, features),
        ),
        Part(
            "attention with its index",
            attention,
            one_cache,
            (layer, x, positions),
            t.num_layers,
            nbytes(layer.attention) + selected_bytes + index_bytes,
        ),
        Part(
            "  of which index",
            index,
            jnp.copy(one_cache.index_keys),
            (layer.attention.indexer, x, positions),
            0,
            indexer + index_bytes,
        ),
        Part(
            f"experts ({active} of {t.num_experts} active)",
            moe,
            (),
            (layer, x, positions),
            len(moe_layers),
            experts + nbytes(layer.moe.shared_expert, layer.moe.router),
        ),
        Part(
            "dense feed-forward",
            dense,
            (),
            (target.layers[dense_layers[0]], x),
            len(dense_layers),
            nbytes(target.layers[dense_layers[0]].mlp),
        ),
        Part("head", head, (), (target, x), 1, nbytes(target.lm_head) + logits_bytes),
        Part(
            "filters and verification",
            verification,
            (),
            (logits, chain.tokens, chain.log_q, keys, slim),
            1,
            logits_bytes + nbytes(chain.log_q),
        ),
    ]


def time_part(part: Part, clock: Any) -> float:
    run = jax.jit(part.function, donate_argnums=0)
    carry = [part.carry]

    def launch() -> None:
        carry[0], out = run(carry[0], *part.args)
        jax.block_until_ready(out)

    return clock.microseconds(launch)[1]


def time_step(model: ds.Model, state: Any, config: ds.GenerateConfig, clock: Any, steps: int) -> tuple[float, float]:
    """-> microseconds of kernels and from call to call."""
    held = [state]

    def launch() -> None:
        held[0], committed = ds.step(model, held[0], config=config)
        jax.block_until_ready(committed)

    kernels = math.nan if GRAPHS else clock.microseconds(launch)[1]
    if GRAPHS:
        launch(), launch()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return kernels, 1e6 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="target layers, at least 5; default 6")
    parser.add_argument("--weights", default="native", choices=("native", "bf16"))
    parser.add_argument("--experts", default="nvfp4/divide", choices=("nvfp4/divide", "mxfp8"))
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--whole", action="store_true", help="leave out the parts")
    parser.add_argument("--graphs", action="store_true", help="command buffers on, wall time alone")
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    options = parser.parse_args()
    target_config, drafter_config = configs(options.layers, options.tiny)
    kinds = formats(target_config, drafter_config, options.experts) if options.weights == "native" else {}
    gpu = jax.default_backend() == "gpu"
    clock = timing.Clock() if gpu else WallClock()
    bandwidth = clock.copy_bandwidth() if gpu else math.nan
    kind = jax.devices()[0].device_kind
    print(f"{kind}, jax {jax.__version__}, stream {bandwidth:.2f} TB/s, {options.layers} layers, {options.weights}")
    model = ds.Model(
        target=fill(nnx.eval_shape(lambda: ds.MiniMaxTarget(target_config, formats=kinds)), jax.random.key(0)),
        drafter=fill(nnx.eval_shape(lambda: ds.DSparkDrafter(drafter_config, formats=kinds)), jax.random.key(1)),
    )
    print(f"target {nbytes(model.target) / 1e9:.2f} GB, drafter {nbytes(model.drafter) / 1e9:.2f} GB", flush=True)
    params = ds.SamplingParams(temperature=1.0, top_p=0.95)
    rows = []
    for batch in options.batch:
        for context in options.context:
            rows += run_case(model, batch, context, params, clock, bandwidth, options)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(rows, file, indent=1)


def run_case(
    model: ds.Model,
    batch: int,
    context: int,
    params: ds.SamplingParams,
    clock: Any,
    bandwidth: float,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    print(f"batch {batch}, context {context}", flush=True)
    make = functools.partial(ds.GenerateConfig, max_new_tokens=context + 512, stop_token_ids=())
    config = make(benchmark_forced_acceptance=FORCED)
    state = make_state(model, batch, context, config, params)
    rows, total, floors = [], 0.0, 0.0
    for part in [] if options.whole or GRAPHS else parts(model, state, config, context):
        spent, floor = time_part(part, clock), part.nbytes / bandwidth / 1e6
        total, floors = total + part.times * spent, floors + part.times * floor
        print(
            f"  {part.name:36}{spent:10.1f} us x {part.times}   {part.nbytes / 1e6:9.1f} MB, floor {floor:8.1f} us, "
            f"ratio {spent / floor:6.2f}",
            flush=True,
        )
        rows.append(dict(batch=batch, context=context, part=part.name, us=spent, times=part.times, floor=floor))
    kernels, wall = time_step(model, state, config, clock, options.steps)
    print(f"  {'sum of the parts':36}{total:10.1f} us      floor {floors:8.1f} us")
    print(f"  {'whole step, 7 drafts':36}{kernels:10.1f} us, wall {wall:.1f} us, ratio {kernels / (floors or 1):.2f}")
    rows.append(dict(batch=batch, context=context, part="whole", us=kernels, wall=wall, floor=floors))
    del state
    config = make(draft="none")
    kernels, wall = time_step(model, make_state(model, batch, context, config, params), config, clock, options.steps)
    print(f"  {'whole step, no drafts':36}{kernels:10.1f} us, wall {wall:.1f} us", flush=True)
    rows.append(dict(batch=batch, context=context, part="plain", us=kernels, wall=wall))
    return rows


if __name__ == "__main__":
    main()
