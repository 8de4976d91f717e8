"""The drafter's training forward and its loss: many blocks of one sequence at once.

A block starts at an anchor, a token of the sequence, and sees the context before the anchor through the target's
features; all blocks of a sequence share the keys and values of that context. Source: DSpark (DeepSpec).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax import formats
from dspark_jax.config import DrafterConfig
from dspark_jax.layers import rms_normalize, rotate, swiglu_oai

Params = dict[str, jax.Array]

# Weight of slot k is exp(-k / DECAY); loss = CE_WEIGHT · CE + L1_WEIGHT · L1 + CONFIDENCE_WEIGHT · BCE.
DECAY = 4.0
CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
_EPSILON = 1e-6


def choose_anchors(key: jax.Array, loss_mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Anchors of each sequence: uniform without replacement among the tokens that are, and are followed by, a label.

    Args:
      key: decides the draw.
      loss_mask: bool [B, T], tokens that count as labels.
      count: anchors wanted.

    Returns:
      int32 [B, count], ascending, and bool [B, count]; False where a sequence has fewer candidates.
    """
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    draw = jnp.where(candidates, jax.random.uniform(key, candidates.shape), -1.0)
    best, anchors = lax.top_k(draw, count)
    order = jnp.argsort(jnp.where(best >= 0, anchors, loss_mask.shape[1]), axis=-1)
    valid = jnp.take_along_axis(best >= 0, order, axis=-1)
    return jnp.where(valid, jnp.take_along_axis(anchors, order, axis=-1), 0), valid


def block_mask(anchors: jax.Array, length: int, config: DrafterConfig) -> tuple[jax.Array, jax.Array]:
    """Visible context keys bool [B, A, K, T] and visible slots of the own block bool [K, K].

    Slot j of the block at anchor a stands at a + j. It sees context t < a and slots i, each less than `window` away;
    a causal drafter only slots i <= j.
    """
    window = length + config.block_size if config.window is None else config.window
    slot = jnp.arange(config.block_size, dtype=jnp.int32)
    position = (anchors[:, :, None] + slot[None, None, :])[..., None]
    time = jnp.arange(length, dtype=jnp.int32)[None, None, None, :]
    context = (time < anchors[:, :, None, None]) & (position - time < window)
    block = jnp.abs(slot[:, None] - slot[None, :]) < window
    return context, block & (slot[:, None] >= slot[None, :]) if config.causal else block


def blocks(
    weights: Params,
    embedding: jax.Array,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    config: DrafterConfig,
    *,
    dtype=jnp.bfloat16,
) -> jax.Array:
    """Hidden states of all blocks after the final norm, [B, A, K, H].

    Args:
      weights: float32 values by path.
      embedding: the target's table [V, H].
      features: [B, T, layers · H], the target's residual streams.
      tokens: int32 [B, T].
      anchors: int32 [B, A].
      config: the drafter's.
      dtype: of the activations.
    """
    c = config
    layers = [_Layer(weights, f"drafter/layers/{i}", c) for i in range(c.num_layers)]
    batch, length = tokens.shape
    time = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], tokens.shape)
    context = _norm(
        formats.linear(features.astype(dtype), weights["drafter/fc/weight"].astype(dtype)),
        weights["drafter/hidden_norm/weight"],
        c,
    )
    slot = jnp.arange(c.block_size, dtype=jnp.int32)
    positions = (anchors[:, :, None] + slot[None, None, :]).reshape(batch, -1)
    first = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
    ids = jnp.where(slot[None, None, :] == 0, first, c.mask_token_id).reshape(batch, -1)
    seen = block_mask(anchors, length, c)
    x = embedding[ids].astype(dtype)
    for layer in layers:
        x = x + layer.attention(layer.norm(x, "input_norm"), positions, context, time, seen)
        x = x + layer.glu(layer.norm(x, "post_attention_norm"))
    return _norm(x, weights["drafter/norm/weight"], c).reshape(batch, -1, c.block_size, x.shape[-1])


def _norm(x: jax.Array, weight: jax.Array, config: DrafterConfig, dtype=None) -> jax.Array:
    scale = 1.0 + weight if config.gemma_norm else weight
    return rms_normalize(x, scale, config.norm_eps, dtype or x.dtype)


@dataclasses.dataclass(frozen=True)
class _Layer:
    weights: Params
    path: str
    config: DrafterConfig

    def __getitem__(self, name: str) -> jax.Array:
        return self.weights[f"{self.path}/{name}/weight"]

    def norm(self, x: jax.Array, name: str, dtype=None) -> jax.Array:
        return _norm(x, self[name], self.config, dtype)

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        return formats.linear(x, self[name].astype(x.dtype))

    def heads(self, x: jax.Array, name: str, positions: jax.Array) -> jax.Array:
        c = self.config
        y = self.linear(x, f"attention/{name}_proj").reshape(*x.shape[:2], -1, c.head_dim)
        y = self.norm(y, f"attention/{name}_norm", jnp.float32)
        return rotate(y, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)

    def values(self, x: jax.Array) -> jax.Array:
        return self.linear(x, "attention/v_proj").reshape(*x.shape[:2], -1, self.config.head_dim)

    def attention(
        self,
        x: jax.Array,
        positions: jax.Array,
        context: jax.Array,
        time: jax.Array,
        seen: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """x [B, A·K, H], context [B, T, H] -> [B, A·K, H]."""
        c, k = self.config, self.config.block_size
        batch, rows, _ = x.shape
        precision = formats.precision(x.dtype)
        blocked = (batch, rows // k, k, c.num_kv_heads)
        q = self.heads(x, "q", positions).reshape(*blocked, -1, c.head_dim)
        keys, values = self.heads(x, "k", positions).reshape(*blocked, -1), self.values(x).reshape(*blocked, -1)
        far_keys, far_values = self.heads(context, "k", time), self.values(context)

        def scores(pattern: str, other: jax.Array, mask: jax.Array) -> jax.Array:
            s = jnp.einsum(pattern, q, other, preferred_element_type=jnp.float32, precision=precision)
            return jnp.where(jnp.broadcast_to(mask, s.shape), s * c.head_dim**-0.5, -jnp.inf)

        far = scores("bajhgd,bthd->bhgajt", far_keys, seen[0][:, None, None])
        near = scores("bajhgd,baihd->bhgaji", keys, seen[1][None, None, None, None])
        # A slot always sees itself, so the largest score is finite.
        peak = lax.stop_gradient(jnp.maximum(jnp.max(far, -1), jnp.max(near, -1)))[..., None]
        far, near = jnp.exp(far - peak), jnp.exp(near - peak)
        out = [
            jnp.einsum(pattern, p.astype(x.dtype), v, preferred_element_type=jnp.float32, precision=precision)
            for pattern, p, v in (("bhgajt,bthd->bajhgd", far, far_values), ("bhgaji,baihd->bajhgd", near, values))
        ]
        total = jnp.transpose(jnp.sum(far, -1) + jnp.sum(near, -1), (0, 3, 4, 1, 2))[..., None]
        mixed = ((out[0] + out[1]) / total).astype(x.dtype).reshape(batch, rows, -1)
        return self.linear(mixed, "attention/o_proj")

    def glu(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate, up = self.linear(x, "mlp/gate_proj"), self.linear(x, "mlp/up_proj")
        if c.swiglu_alpha is None or c.swiglu_limit is None:
            inner = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
        else:
            inner = swiglu_oai(gate, up, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
        return self.linear(inner, "mlp/down_proj")


def labels(
    tokens: jax.Array, loss_mask: jax.Array, anchors: jax.Array, valid: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> labels and previous tokens int32 [B, A, K], evaluated slots bool [B, A, K].

    Slot k's label is the token at a + 1 + k. It counts if it lies in the sequence and in the mask, and if all slots
    before it do.
    """
    length = tokens.shape[1]
    at = anchors[:, :, None] + jnp.arange(block + 1, dtype=jnp.int32)[None, None, :]
    flat = jnp.minimum(at, length - 1).reshape(tokens.shape[0], -1)
    found = jnp.take_along_axis(tokens, flat, axis=1).reshape(at.shape)
    counts = jnp.take_along_axis(loss_mask, flat, axis=1).reshape(at.shape) & (at < length)
    counts = jnp.cumprod(counts[..., 1:].astype(jnp.int32), axis=-1) > 0
    return found[..., 1:], found[..., :-1], counts & valid[..., None]


def loss(
    weights: Params,
    frozen: Params,
    features: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    loss_mask: jax.Array,
    anchors: jax.Array,
    valid: jax.Array,
    config: DrafterConfig,
    *,
    dtype=jnp.bfloat16,
    chunks: int = 1,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The recipe's loss and what is logged about it.

    Args:
      weights: the drafter's, float32 by path.
      frozen: the target's "target/embed_tokens/weight" and "target/lm_head/weight".
      features, hidden: the target's residual streams [B, T, layers · H] and its output after the final norm [B, T, H].
      tokens, loss_mask: int32 and bool [B, T].
      anchors, valid: what `choose_anchors` returned.
      config: the drafter's.
      dtype: of the activations.
      chunks: logits are computed for this many parts of the anchors in turn, to bound memory; it must divide them.
    """
    k = config.block_size
    drafted = blocks(weights, frozen["target/embed_tokens/weight"], features, tokens, anchors, config, dtype=dtype)
    label, previous, counted = labels(tokens, loss_mask, anchors, valid, k)
    at = jnp.minimum(anchors[:, :, None] + jnp.arange(k, dtype=jnp.int32)[None, None, :], tokens.shape[1] - 1)
    teacher = jnp.take_along_axis(hidden, at.reshape(at.shape[0], -1)[..., None], axis=1)
    teacher = teacher.reshape(*at.shape, hidden.shape[-1])
    parts = (drafted, teacher, label, previous, counted)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)

    def part(total: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        sums = _sums(weights, frozen["target/lm_head/weight"], *inputs, config)
        return total + sums, jnp.zeros((), jnp.float32)

    sums, _ = lax.scan(jax.checkpoint(part), jnp.zeros((5 + 2 * k,), jnp.float32), jax.tree.map(split, parts))
    ce, l1, bce = sums[0] / (sums[3] + _EPSILON), sums[1] / (sums[3] + _EPSILON), sums[2] / (sums[3] + _EPSILON)
    total = CE_WEIGHT * ce + L1_WEIGHT * l1
    if config.confidence_head:
        total = total + CONFIDENCE_WEIGHT * bce
    accepted, slots = sums[5 : 5 + k], sums[5 + k :]
    metrics = {
        "loss": total,
        "ce": ce,
        "l1": l1,
        "bce": bce,
        "tau": 1.0 + sums[4] / jnp.maximum(jnp.sum(valid, dtype=jnp.float32), 1.0),
        "accept": accepted / jnp.maximum(slots, 1.0),
    }
    return total, metrics


def _sums(
    weights: Params,
    head: jax.Array,
    drafted: jax.Array,
    teacher: jax.Array,
    label: jax.Array,
    previous: jax.Array,
    counted: jax.Array,
    config: DrafterConfig,
) -> jax.Array:
    """[Σ w·CE, Σ w·L1, Σ w·BCE, Σ w, Σ over blocks of Σ_k Π accept, Σ accept [K], slots [K]]."""
    precision = formats.precision(drafted.dtype)

    def scores(x: jax.Array, table: jax.Array) -> jax.Array:
        table = table.astype(x.dtype)
        return jnp.einsum("bajh,vh->bajv", x, table, preferred_element_type=jnp.float32, precision=precision)

    ours = scores(drafted, head)
    embedding = None
    if config.markov_type is not None:
        embedding = weights["drafter/markov_head/w1/weight"][previous].astype(drafted.dtype)
        ours = ours + scores(embedding, weights["drafter/markov_head/w2/weight"])
    log_q = jax.nn.log_softmax(ours, axis=-1)
    p = jax.nn.softmax(scores(teacher.astype(drafted.dtype), head), axis=-1)
    ce = -jnp.take_along_axis(log_q, label[..., None], axis=-1)[..., 0]
    l1 = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
    accept = jnp.clip(1.0 - 0.5 * lax.stop_gradient(l1), 0.0, 1.0)
    bce = jnp.zeros_like(ce)
    if config.confidence_head:
        inputs = drafted.astype(jnp.float32)
        if config.confidence_with_markov and embedding is not None:
            inputs = jnp.concatenate([inputs, embedding.astype(jnp.float32)], axis=-1)
        logit = formats.linear(inputs, weights["drafter/confidence_head/weight"])[..., 0]
        logit = logit + weights["drafter/confidence_head/bias"][0]
        bce = jax.nn.softplus(logit) - accept * logit
    k = config.block_size
    counts = counted.astype(jnp.float32)
    w = counts * jnp.exp(-jnp.arange(k, dtype=jnp.float32) / DECAY)[None, None, :]
    survival = jnp.cumprod(accept, axis=-1) * counts
    totals = [jnp.sum(w * ce), jnp.sum(w * l1), jnp.sum(w * bce), jnp.sum(w), jnp.sum(survival)]
    per_slot = [jnp.sum(accept * counts, axis=(0, 1)), jnp.sum(counts, axis=(0, 1))]
    return jnp.concatenate([jnp.stack(totals), *per_slot])
