"""Time and memory of the sampling step: target_log_probs with its filters, then verify.

    python tests/benchmarks/sampling.py                                    # V = 200,064, K = 7, B = 64
    python tests/benchmarks/sampling.py --batch 2 --vocab 5000 --repeats 3  # a smoke run on a CPU

Beside the step stand the time to read the logits once (a row maximum), the filters and the verification methods alone,
and top-p by a sort of the vocabulary. Times are medians of calls that wait for their result. Memory is what the
compiled program holds: outputs, temporaries, and in total with its arguments.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from dspark_jax import sampling
from dspark_jax.sampling import filters


def sorted_log_probs(logits: jax.Array, params: sampling.SamplingParams) -> jax.Array:
    """Top-p by a full sort: the usual way, here for comparison only."""
    rows = params.broadcast(logits.shape[0])
    z = logits.astype(jnp.float32) / rows.temperature[:, None, None]
    log_p = jax.nn.log_softmax(z)
    ranked = -jnp.sort(-log_p, axis=-1)
    before = jnp.cumsum(jnp.exp(ranked), axis=-1) - jnp.exp(ranked)
    last = jnp.sum(before < rows.top_p[:, None, None], axis=-1, keepdims=True) - 1
    floor = jnp.take_along_axis(ranked, jnp.maximum(last, 0), axis=-1)
    return jax.nn.log_softmax(jnp.where(log_p >= floor, log_p, -jnp.inf))


def cases(settings: argparse.Namespace, params: sampling.SamplingParams) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """Name -> (function, names of its arguments)."""

    def verify(method: str) -> Callable:
        return lambda tokens, log_q, log_p, keys: sampling.verify(tokens, log_q, log_p, keys=keys, method=method)

    def step(method: str, log_probs: Callable) -> Callable:
        def run(tokens, log_q, logits, keys):
            proposal = None if method == "match" else log_q
            return sampling.verify(tokens, proposal, log_probs(logits, params), keys=keys, method=method)

        return run

    step_arguments = ("tokens", "log_q", "logits", "keys")
    found = {
        "read the logits once": (lambda logits: jnp.max(logits, axis=-1), ("logits",)),
        "log_softmax": (lambda logits: jax.nn.log_softmax(logits.astype(jnp.float32)), ("logits",)),
        "filters": (lambda logits: sampling.target_log_probs(logits, params), ("logits",)),
        "filters, none used": (
            lambda logits: sampling.target_log_probs(logits, sampling.SamplingParams()),
            ("logits",),
        ),
        "verify standard": (verify("standard"), ("tokens", "log_q", "log_p", "keys")),
        "verify block": (verify("block"), ("tokens", "log_q", "log_p", "keys")),
        "step standard": (step("standard", sampling.target_log_probs), step_arguments),
        "step block": (step("block", sampling.target_log_probs), step_arguments),
        "step match": (step("match", sampling.target_log_probs), step_arguments),
    }
    if settings.kernel:
        log_probs = functools.partial(sampling.target_log_probs, floors=pallas_kernels.filter_floors)
        found["filters, kernel"] = (lambda logits: log_probs(logits, params), ("logits",))
        found["step block, kernel"] = (step("block", log_probs), step_arguments)
    if not settings.no_sort:
        found["top-p by sorting"] = (lambda logits: sorted_log_probs(logits, params), ("logits",))
        found["step block, top-p by sorting"] = (step("block", sorted_log_probs), step_arguments)
    return found


def make_inputs(settings: argparse.Namespace) -> dict[str, jax.Array]:
    batch, slots, vocab = settings.batch, settings.drafts, settings.vocab

    @jax.jit
    def build(key: jax.Array) -> dict[str, jax.Array]:
        ours, theirs, drawn = jax.random.split(key, 3)
        logits = jax.random.normal(ours, (batch, slots + 1, vocab), jnp.float32) * settings.spread
        log_p = jax.nn.log_softmax(logits)
        noise = jax.random.normal(theirs, (batch, slots, vocab), jnp.float32)
        log_q = jax.nn.log_softmax(logits[:, :-1] + noise * (settings.spread / 4))
        tokens = jax.random.categorical(drawn, log_q).astype(jnp.int32)
        return {"logits": logits.astype(settings.dtype), "log_p": log_p, "log_q": log_q, "tokens": tokens}

    keys = sampling.step_keys(sampling.request_keys(range(batch)), 1)
    return build(jax.random.key(0)) | {"keys": keys}


def measure(function: Callable, arguments: tuple[jax.Array, ...], repeats: int) -> dict[str, float]:
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    low, median, high = np.percentile(times, [10, 50, 90]) * 1e3
    result = {"ms": median, "ms_p10": low, "ms_p90": high}
    if memory is not None:
        result["outputs_mib"] = memory.output_size_in_bytes / 2**20
        result["temporaries_mib"] = memory.temp_size_in_bytes / 2**20
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        result["total_mib"] = total / 2**20
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=7, help="K")
    parser.add_argument("--vocab", type=int, default=200_064)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the logits")
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the random logits")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--digit-bits", type=int, choices=[1, 2, 4], default=None, help="bits found per reading")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--kernel", action="store_true", help="also filter with pallas_kernels.filter_floors")
    parser.add_argument("--no-sort", action="store_true", help="leave out the variants that sort")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", default=None, metavar="FILE", help="also write the table there")
    settings = parser.parse_args()
    if settings.digit_bits:
        filters._DIGIT_BITS = settings.digit_bits
    inputs = make_inputs(settings)
    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}, B={settings.batch} K={settings.drafts} V={settings.vocab}",
        end="",
    )
    print(f" {settings.dtype}, logits {inputs['logits'].nbytes / 2**20:.0f} MiB, {filters._DIGIT_BITS} bits a reading")
    print(f"{'case':32} {'ms':>9} {'p10':>9} {'p90':>9} {'x read':>7} {'outputs':>9} {'temp MiB':>9} {'total':>8}")
    params = sampling.SamplingParams(temperature=0.9, top_p=settings.top_p, top_k=settings.top_k)
    results: dict[str, dict[str, float]] = {}
    for name, (function, arguments) in cases(settings, params).items():
        if settings.only not in name and name != "read the logits once":
            continue
        row = measure(function, tuple(inputs[argument] for argument in arguments), settings.repeats)
        results[name] = row
        ratio = row["ms"] / results["read the logits once"]["ms"]
        columns = [row.get(key, float("nan")) for key in ("outputs_mib", "temporaries_mib", "total_mib")]
        print(f"{name:32} {row['ms']:9.3f} {row['ms_p10']:9.3f} {row['ms_p90']:9.3f} {ratio:7.1f}", end="")
        print(f" {columns[0]:9.0f} {columns[1]:9.0f} {columns[2]:8.0f}", flush=True)
    if settings.json:
        with open(settings.json, "w") as file:
            json.dump({"settings": vars(settings), "device": device.device_kind, "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
