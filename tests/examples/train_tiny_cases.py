"""The smallest pair that training and export are tested with."""

import dataclasses

import jax
import jax.numpy as jnp
import settings
import storage

from convert.geometry import drafter_parameters, target_parameters
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.target import MiniMaxTarget

# float32 against float32 on logits of size 1: sums of at most 64 terms in another order.
TOLERANCE = 1e-4

MICRO = dataclasses.replace(
    settings.SMOKE,
    name="micro",
    vocab_size=320,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rotary_dim=8,
    index_dim=8,
    block_size=4,
    top_k_blocks=3,
    dense_size=64,
    draft_size=64,
    target_layer_ids=(0, 1),
    window=9,
    markov_rank=8,
    anchors=6,
    target=dataclasses.replace(settings.SMOKE.target, batch=4, length=32, warmup=4, steps_per_call=8),
    drafter=dataclasses.replace(settings.SMOKE.drafter, batch=4, length=32, warmup=4, steps_per_call=8),
)
TARGET = TargetConfig.from_hf(settings.target_json(MICRO))
GEOMETRY = target_parameters(TARGET)
DRAFTER = DrafterConfig.from_hf(settings.drafter_json(MICRO))
DRAFT_GEOMETRY = drafter_parameters(DRAFTER)


def random_target(seed: int) -> tuple[MiniMaxTarget, storage.Params]:
    target = MiniMaxTarget(
        TARGET, formats=dict.fromkeys(GEOMETRY, "f32"), key=jax.random.key(seed), compute_dtype=jnp.float32
    )
    return target, storage.values(storage.module_params(target, "target"))


def random_drafter(config: DrafterConfig, seed: int) -> tuple[DSparkDrafter, storage.Params]:
    formats = dict.fromkeys(drafter_parameters(config), "f32")
    drafter = DSparkDrafter(config, formats=formats, key=jax.random.key(seed), compute_dtype=jnp.float32)
    return drafter, storage.values(storage.module_params(drafter, "drafter"))


def tokens_of(key: jax.Array, rows: int, length: int) -> jax.Array:
    return jax.random.randint(key, (rows, length), 0, MICRO.vocab_size)
