"""A slice of the real target and the whole real drafter, at their released widths, random weights made on the device.

    python tests/benchmarks/real_size.py [--context 4096 32768] [--chunk 512 2048] [--attention triton]
    python tests/benchmarks/real_size.py --tiny               # the same path in a minute on a CPU

Prints what is in memory and the time of a prefill, drafter's context included: median of three, wall clock. One GPU of
about 80 GB or more. Random weights: the figures are about arithmetic and memory, not about text. Steps: see step.py.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import dspark_jax as ds
from dspark_jax.formats import MXFP8Array, NVFP4Array

CONFIGS = Path(__file__).parent.parent / "data" / "inventory" / "configs"


def configs(layers: int, tiny: bool) -> tuple[ds.TargetConfig, ds.DrafterConfig]:
    """The released geometry cut to `layers` target layers, one of them dense; the drafter reads five of them."""
    target = ds.TargetConfig.from_hf(json.loads((CONFIGS / "m31-flash.config.json").read_text()))
    drafter = ds.DrafterConfig.from_hf(json.loads((CONFIGS / "m31-dspark.config.json").read_text()))
    moe = tuple(i > 0 for i in range(layers))
    target = dataclasses.replace(target, num_layers=layers, moe_layers=moe, sparse_layers=(True,) * layers)
    drafter = dataclasses.replace(drafter, target_layer_ids=tuple(range(layers - 5, layers)))
    if tiny:
        small = dict(vocab_size=512, hidden_size=256, num_heads=8, head_dim=32, rotary_dim=16)
        target = dataclasses.replace(
            target,
            **small,
            num_experts=8,
            dense_mlp_size=256,
            expert_mlp_size=128,
            shared_mlp_size=128,
            index_head_dim=32,
            eos_token_ids=(),
            pad_token_id=0,
        )
        drafter = dataclasses.replace(drafter, **small, mlp_size=256, mask_token_id=500, markov_rank=16)
    return target, drafter


def formats(target: ds.TargetConfig, drafter: ds.DrafterConfig, experts: str) -> dict[str, str]:
    """Storage formats of the release: experts NVFP4, other linears MXFP8, the rest bf16."""
    result = {}
    linears = [f"attention/{n}_proj" for n in "qkvo"] + [f"attention/indexer/{n}_proj" for n in "qk"]
    mlp = [f"{n}_proj" for n in ("gate", "up", "down")]
    for i, moe in enumerate(target.moe_layers):
        names = linears + [f"moe/shared_expert/{n}" if moe else f"mlp/{n}" for n in mlp]
        result |= {f"target/layers/{i}/{n}/weight": "mxfp8" for n in names}
        if moe:
            result |= {f"target/layers/{i}/moe/experts/{n}/weight": experts for n in mlp}
    for i in range(drafter.num_layers):
        names = linears[:4] + [f"mlp/{n}" for n in mlp]
        result |= {f"drafter/layers/{i}/{n}/weight": "mxfp8" for n in names}
    return result


def fill(module: nnx.Module, key: jax.Array) -> nnx.Module:
    """The abstract module with random weights: codes drawn as bytes, scales that give rows of about unit gain."""
    graph, state = nnx.split(module)
    flat, programs = [], {}
    for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
        shape = variable.get_value()
        # One program a shape: layers repeat.
        make = programs.setdefault(str(shape), jax.jit(functools.partial(_random_weight, shape)))
        flat.append((path, variable.replace(make(jax.random.fold_in(key, i)))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _random_weight(weight, key: jax.Array):
    if isinstance(weight, MXFP8Array):
        bits = jax.random.bits(key, weight.codes.shape, jnp.uint8)
        # Exponents of 6 to 7 of E4M3: values of 0.5 to 2, never the NaN code.
        codes = jax.lax.bitcast_convert_type((bits & 0x87) | 0x30, jnp.float8_e4m3fn)
        return MXFP8Array(codes=codes, scale=jnp.full(weight.scale.shape, _exponent(weight.shape[-1]), jnp.uint8))
    if isinstance(weight, NVFP4Array):
        gain = jnp.full(weight.global_scale.shape, 3.0 * weight.shape[-1] ** 0.5, jnp.float32)
        return dataclasses.replace(
            weight,
            codes=jax.random.bits(key, weight.codes.shape, jnp.uint8),
            scale=jnp.ones(weight.scale.shape, jnp.float8_e4m3fn),
            global_scale=gain if weight.global_scale_op == "divide" else 1 / gain,
        )
    scale = weight.shape[-1] ** -0.5 if len(weight.shape) > 1 else 0.1
    return (scale * jax.random.normal(key, weight.shape, jnp.float32)).astype(weight.dtype)


def _exponent(inputs: int) -> int:
    return 127 - (inputs.bit_length() - 1) // 2


def seconds(call, *, repeat: int) -> float:
    """Median time of `call`, which returns arrays to wait for."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="target layers, at least 5; default 6")
    parser.add_argument("--experts", default="nvfp4/divide", choices=("nvfp4/divide", "mxfp8", "bf16"))
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens of the prompts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--chunk", type=int, nargs="+", default=[512], help="prompt tokens of one forward")
    parser.add_argument("--attention", choices=("triton", "xla"), help="default: what the library chooses")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    options = parser.parse_args()
    target_config, drafter_config = configs(options.layers, options.tiny)
    kinds = formats(target_config, drafter_config, options.experts)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.layers} layers, experts {options.experts}")
    start = time.perf_counter()
    how: dict[str, Any] = dict(formats=kinds, kernels=ds.Kernels(attention=options.attention))
    model = ds.Model(
        target=fill(nnx.eval_shape(lambda: ds.MiniMaxTarget(target_config, **how)), jax.random.key(0)),
        drafter=fill(nnx.eval_shape(lambda: ds.DSparkDrafter(drafter_config, **how)), jax.random.key(1)),
    )
    jax.block_until_ready(model)
    for name, part in (("target slice", model.target), ("drafter", model.drafter)):
        print(f"{name}: {sum(a.nbytes for a in jax.tree.leaves(part)) / 1e9:.2f} GB")
    print(f"made in {time.perf_counter() - start:.1f} s")
    params = ds.SamplingParams(temperature=1.0, top_p=0.95)
    for batch, context, chunk in itertools.product(options.batch, options.context, options.chunk):
        prompts = jax.random.randint(jax.random.key(2), (batch, context), 0, target_config.vocab_size, jnp.int32)
        lengths = jnp.full((batch,), context, jnp.int32)
        keys = ds.request_keys(range(batch))
        config = ds.GenerateConfig(max_new_tokens=64, prefill_chunk=chunk, stop_token_ids=())
        run = functools.partial(ds.prefill, model, prompts, lengths, keys, params, config=config)
        start = time.perf_counter()
        jax.block_until_ready(run())
        compiled = time.perf_counter() - start
        spent = seconds(run, repeat=3)
        print(
            f"batch {batch}, context {context}, chunks of {chunk}: prefill {spent * 1e3:.1f} ms, "
            f"{batch * context / spent:.0f} tokens/s (first call {compiled:.1f} s)",
            flush=True,
        )
    memory = jax.devices()[0].memory_stats()
    if memory:
        print(f"peak device memory {memory['peak_bytes_in_use'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
