"""With 64-bit types on, in a process of its own and without annotation checks, as a user may run it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import sampling_oracles as oracles

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
from dspark_jax import sampling

report = {"x64": jax.config.jax_enable_x64}
golden = dict(np.load(sys.argv[1]))
inputs = [jnp.asarray(x) for x in (golden["draft_tokens"].astype(np.int64), golden["log_q"], golden["log_p"])]
lengths = jnp.asarray(golden["draft_lengths"].astype(np.int64))
slots = golden["draft_tokens"].shape[1]

@jax.jit(static_argnames="method")
def tables(draft_tokens, log_q, log_p, lengths, method):
    options = {"method": method, "draft_lengths": lengths}
    log_rho, h = sampling.acceptance(draft_tokens, log_q, log_p, **options)
    ends = [jnp.minimum(i, lengths) for i in range(slots + 1)]
    final = jnp.stack([sampling.residual_log_probs(log_q, log_p, log_rho, end, **options) for end in ends], axis=1)
    return sampling.num_accepted_probs(h, method=method), jnp.exp(final)

for method in ("standard", "block"):
    probs, final = tables(*inputs, lengths, method)
    wanted = golden[f"{method}/num_accepted_probs"]
    difference = np.abs(np.asarray(final) - golden[f"{method}/final"])[wanted > 1e-6]
    report[method] = float(max(np.abs(np.asarray(probs) - wanted).max(), difference.max()))
    report[f"{method} dtype"] = str(probs.dtype)

keys = sampling.step_keys(sampling.request_keys(np.arange(4)), jnp.asarray([0, 1, 2, 3]))
logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 6)))
top_p = np.array([0.9, 1.0, 0.5, 0.7])
params = sampling.SamplingParams(temperature=[0.0, 1.0, 1.0, 0.5], top_k=4, top_p=top_p, min_p=0.01)

@jax.jit
def step(logits, anchor, params, keys):
    log_p = sampling.target_log_probs(logits, params)
    drafted = sampling.draft(
        logits[:, :2], logits[:, :2], anchor, markov=lambda t, h, c: (0 * h, h, c),
        temperature=params.temperature, keys=keys, method="ancestral",
    )
    verified = [
        sampling.verify(drafted.tokens, log_q, log_p, keys=keys, method=method, greedy=params.greedy)
        for method, log_q in (("standard", drafted.log_q), ("block", drafted.log_q), ("match", None))
    ]
    return log_p, drafted, verified

log_p, drafted, verified = step(logits, jnp.asarray(np.zeros(4, np.int64)), params, keys)
report["dtypes"] = sorted({str(x.dtype) for x in (log_p, drafted.log_q)} | {str(x.dtype) for v in verified for x in v})
report["drawn"] = np.asarray(drafted.tokens).tolist()

errors = {}
for name, arguments in {
    "drafts": (drafted.tokens[:, :1], drafted.log_q, log_p),
    "proposal": (drafted.tokens, drafted.log_q[..., :4], log_p),
    "slots": (drafted.tokens[:, :0], None, log_p[:, :1]),
}.items():
    try:
        sampling.verify(*arguments, keys=keys, method="block")
    except ValueError as error:
        errors[name] = str(error)
report["errors"] = errors
print(json.dumps(report))
"""

# float64 throughout; the tables were made in float64 too.
FLOAT64_TOLERANCE = 1e-12


@functools.cache
def run(name: str, *, x64: bool) -> dict:
    environment = os.environ | {
        "JAX_ENABLE_X64": "1" if x64 else "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(oracles.DATA / f"{name}.npz")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_float64_laws_and_32_bit_results():
    report = run("ragged_v3_k4", x64=True)
    assert report["x64"]
    assert report["standard dtype"] == report["block dtype"] == "float64"
    assert max(report["standard"], report["block"]) < FLOAT64_TOLERANCE
    assert report["dtypes"] == ["float32", "int32"]
    assert "[B, K+1, V]" in report["errors"]["drafts"] and "(4, 1)" in report["errors"]["drafts"]
    assert "[B, K, V]" in report["errors"]["proposal"] and "(4, 2, 4)" in report["errors"]["proposal"]
    assert "K >= 1" in report["errors"]["slots"]


def test_the_tolerance_tells_float64_from_float32_and_the_tokens_are_the_same():
    narrow, wide = run("ragged_v3_k4", x64=False), run("ragged_v3_k4", x64=True)
    assert min(narrow["standard"], narrow["block"]) > 100 * FLOAT64_TOLERANCE
    assert narrow["drawn"] == wide["drawn"]
