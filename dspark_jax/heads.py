"""The small heads behind the drafter: a Markov bias from the token before, and the confidence of a draft.

A block's slots are computed together and do not see what the others draft. The Markov head makes up for it: drafting
walks through the slots and adds to the logits of each a bias that depends on the token chosen just before.

Sources: DSpark (DeepSpec) for the heads, in the order of inputs that its checkpoints use.
"""

import abc
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dspark_jax import formats, sampling
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.layers import Scope
from pallas_kernels import markov_draw


class Affine(nnx.Module):
    """y = x W^T + b in float32, whatever the dtype of x."""

    def __init__(self, scope: Scope, out_size: int, in_size: int):
        self.weight = scope.param("weight", (out_size, in_size), (None, None), scale=in_size**-0.5)
        self.bias = scope.param("bias", (out_size,), (None,), scale=0.1)

    def __call__(self, x: Float[Array, "*batch I"]) -> Float32[Array, "*batch O"]:
        y = formats.linear(x.astype(jnp.float32), self.weight.get_value())
        return y + jnp.broadcast_to(self.bias.get_value().astype(jnp.float32), y.shape)


class MarkovTable(nnx.Module):
    """A table [V, r] of the Markov head: looked up by token, or multiplied to score every token."""

    def __init__(self, scope: Scope, vocab_size: int, rank: int):
        self.weight = scope.param("weight", (vocab_size, rank), ("vocab", None), scale=rank**-0.5)

    def lookup(self, tokens: Int[Array, " B"], dtype) -> Float[Array, "B r"]:
        return self.weight.get_value()[tokens].astype(dtype)

    def scores(self, x: Float[Array, "B r"]) -> Float32[Array, "B V"]:
        """x · table^T, accumulated in float32."""
        weight = formats.dequantize(self.weight.get_value(), x.dtype)
        return jnp.einsum(
            "br,vr->bv", x, weight, preferred_element_type=jnp.float32, precision=formats.precision(x.dtype)
        )


class MarkovHead(nnx.Module, abc.ABC):
    """Bias on a slot's logits from the token before it: W2 · f(W1[prev], hidden).

    Called once a slot, in order: `bias, embedding, carry = markov(prev, hidden_k, carry)`. The first slot's `prev` is
    the anchor and its carry comes from `init_carry`.
    """

    def __init__(self, scope: Scope, config: DrafterConfig):
        self.w1 = MarkovTable(scope / "w1", config.vocab_size, config.markov_rank)
        self.w2 = MarkovTable(scope / "w2", config.vocab_size, config.markov_rank)
        self.rank = config.markov_rank

    def init_carry(self, batch: int) -> Float32[Array, "B r"] | None:
        """What the first slot of a block gets as carry; None for a head without a state."""
        del batch
        return None

    @abc.abstractmethod
    def latent(
        self, embedding: Float[Array, "B r"], hidden: Float[Array, "B H"], carry: Float32[Array, "B r"] | None
    ) -> tuple[Float[Array, "B r"], Float32[Array, "B r"] | None]:
        """-> what W2 multiplies, carry of the next slot."""

    def __call__(
        self, prev: Int[Array, " B"], hidden: Float[Array, "B H"], carry: Float32[Array, "B r"] | None = None
    ) -> tuple[Float32[Array, "B V"], Float[Array, "B r"], Float32[Array, "B r"] | None]:
        """One slot.

        Args:
          prev: int32 [B], the token before the one this slot drafts.
          hidden: [B, H], the slot's output of the drafter, after the final norm.
          carry: the state that the slot before returned; None stands for `init_carry`.

        Returns:
          bias float32 [B, V] to add to the slot's logits, W1[prev] [B, r] (the confidence head reads it), new carry.
        """
        embedding = self.w1.lookup(prev, hidden.dtype)
        if carry is None:
            carry = self.init_carry(prev.shape[0])
        latent, carry = self.latent(embedding, hidden, carry)
        # Rounded to the compute dtype so that the table, the bulk of the work, is read as it is stored.
        return self.w2.scores(latent.astype(hidden.dtype)), embedding, carry

    def latents(
        self, prev: Int[Array, " B"], embedding: Float[Array, "B r"], latent: Float[Array, "B r"]
    ) -> tuple[Float[Array, "N r"], Int[Array, " B"]]:
        """-> rows [N, r], and which of them W2 multiplies."""
        del embedding
        return latent, jnp.arange(prev.shape[0], dtype=jnp.int32)

    def draw_slot(
        self,
        logits: Float32[Array, "B K V"],
        slot: int,
        prev: Int[Array, " B"],
        hidden: Float[Array, "B H"],
        carry: Float32[Array, "B r"] | None,
        settings: sampling.SlotDraw,
        *,
        implementation: str | None = None,
    ) -> sampling.DrawnSlot:
        """One slot, and the draw of its token: for `sampling.draft`.

        Raises:
          NotImplementedError: `pallas_kernels.markov_draw` cannot serve it so, or the tables are not plain arrays of
            the compute dtype.
        """
        table, dtype = self.w2.weight.get_value(), hidden.dtype
        if not isinstance(table, jax.Array) or table.dtype != dtype:
            raise NotImplementedError(f"the draw of a slot needs a table of {dtype}, got {type(table).__name__}.")
        embedding = self.w1.lookup(prev, dtype)
        if carry is None:
            carry = self.init_carry(prev.shape[0])
        latent, carry = self.latent(embedding, hidden, carry)
        rows, index = self.latents(prev, embedding, latent.astype(dtype))
        drawn = markov_draw(
            logits,
            rows,
            index,
            table,
            settings.allowed,
            settings.words,
            settings.inverse_temperature,
            settings.drawn,
            slot=slot,
            keep=settings.keep,
            implementation=implementation,
        )
        return sampling.DrawnSlot(*drawn, embedding, carry)


class VanillaMarkov(MarkovHead):
    """bias = W2 · e, e = W1[prev]."""

    def latents(self, prev, embedding, latent):
        # Straight from the table: nothing has to look up a row in front of the product.
        table = self.w1.weight.get_value()
        plain = isinstance(table, jax.Array) and table.dtype == latent.dtype
        return (table, prev) if plain else super().latents(prev, embedding, latent)

    def latent(self, embedding, hidden, carry):
        return embedding, carry


class GatedMarkov(MarkovHead):
    """bias = W2 · (sigmoid(G [h; e] + b) · e)."""

    def __init__(self, scope: Scope, config: DrafterConfig):
        super().__init__(scope, config)
        self.gate_proj = Affine(scope / "gate_proj", self.rank, config.hidden_size + self.rank)

    def latent(self, embedding, hidden, carry):
        gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, embedding], axis=-1)))
        return gate * embedding.astype(jnp.float32), carry


class RnnMarkov(MarkovHead):
    """[gate; candidate; output] = J [s; e; h] + b, bias = W2 · tanh(output), s' = z s + (1 - z) tanh(candidate) with
    z = sigmoid(gate). The state s is float32 and starts at 0 in every block.
    """

    def __init__(self, scope: Scope, config: DrafterConfig):
        super().__init__(scope, config)
        self.joint_proj = Affine(scope / "joint_proj", 3 * self.rank, 2 * self.rank + config.hidden_size)

    def init_carry(self, batch: int) -> Float32[Array, "B r"] | None:
        return jnp.zeros((batch, self.rank), jnp.float32)

    def latent(self, embedding, hidden, carry):
        assert carry is not None
        inputs = [x.astype(jnp.float32) for x in (carry, embedding, hidden)]
        gate, candidate, output = jnp.split(self.joint_proj(jnp.concatenate(inputs, axis=-1)), 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        return jnp.tanh(output), keep * carry + (1.0 - keep) * jnp.tanh(candidate)


class NoMarkov(nnx.Module):
    """Stands where a drafter has no Markov head: bias 0, embeddings of size 0, no parameters."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def init_carry(self, batch: int) -> None:
        del batch

    def __call__(
        self, prev: Int[Array, " B"], hidden: Float[Array, "B H"], carry: None = None
    ) -> tuple[Float32[Array, "B V"], Float[Array, "B 0"], None]:
        """As `MarkovHead`."""
        del carry
        batch = prev.shape[0]
        return jnp.zeros((batch, self.vocab_size), jnp.float32), jnp.zeros((batch, 0), hidden.dtype), None


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}


def make_markov_head(scope: Scope, config: DrafterConfig) -> MarkovHead | NoMarkov:
    """The Markov head that `config` names."""
    if config.markov_type is None:
        return NoMarkov(config.vocab_size)
    return MARKOV_HEADS[config.markov_type](scope, config)


class ConfidenceHead(Affine):
    """Logit of the probability that a slot's draft is accepted, given that all drafts before it are.

    Reads the slot's hidden state and, if `confidence_with_markov`, the Markov embedding of the token before it.
    """

    def __init__(self, scope: Scope, config: DrafterConfig):
        self.with_markov = config.confidence_with_markov
        super().__init__(scope, 1, config.hidden_size + config.markov_rank * self.with_markov)

    def __call__(
        self, hidden: Float[Array, "B K H"], prev_embeddings: Float[Array, "B K r"] | None = None
    ) -> Float32[Array, "B K"]:
        """-> confidence logits, before the sigmoid.

        Args:
          hidden: [B, K, H] after the drafter's final norm.
          prev_embeddings: [B, K, r], W1 of the token before each draft (the anchor for the first), as `draft` returns
            them. A head that does not read them ignores them.

        Raises:
          ValueError: the head reads the embeddings and there are none.
        """
        x = hidden.astype(jnp.float32)
        if self.with_markov:
            if prev_embeddings is None:
                raise ValueError("this confidence head reads Markov embeddings; pass Draft.prev_embeddings")
            x = jnp.concatenate([x, prev_embeddings.astype(jnp.float32)], axis=-1)
        return super().__call__(x)[..., 0]


def check_head_tensors(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ConfigError` unless the heads in a checkpoint are those that its config names.

    A head that the config does not name would be left out without a word, and one of another type would be computed
    wrongly: both only show as bad drafts.

    Args:
      config: the drafter's configuration.
      shapes: shape of every tensor of the drafter by parameter path ("drafter/markov_head/w1/weight", ...); those that
        belong to no head are not looked at.

    Raises:
      ConfigError: Markov type, Markov rank or the confidence head differ, or a tensor is missing, unknown or misshapen.
    """
    markov, confidence = "drafter/markov_head", "drafter/confidence_head"
    found = {path: tuple(shape) for path, shape in shapes.items() if re.match(f"({markov}|{confidence})/", path)}
    inputs = {"gate_proj": "gated", "joint_proj": "rnn"}
    types = {inputs.get(path.split("/")[2], "vanilla") for path in found if path.startswith(f"{markov}/")}
    stored = next((name for name in ("rnn", "gated", "vanilla") if name in types), None)
    if stored != config.markov_type:
        raise ConfigError(
            f"markov_head_type and markov_rank of the config ask for {_named(config.markov_type)}, but the checkpoint "
            f"holds the tensors of {_named(stored)}; correct the config"
        )
    w1 = found.get(f"{markov}/w1/weight")
    if w1 is not None and w1[-1] != config.markov_rank:
        raise ConfigError(
            f"markov_rank is {config.markov_rank}, but {markov}/w1/weight has shape {w1}; correct the config"
        )
    if config.confidence_head != any(path.startswith(f"{confidence}/") for path in found):
        has = "has none" if config.confidence_head else "holds one"
        raise ConfigError(
            f"enable_confidence_head is {config.confidence_head}, but the checkpoint {has}; correct the config"
        )
    expected = _head_shapes(config)
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise ConfigError(
                f"{path} has shape {found.get(path, 'none (it is missing)')} in the checkpoint, but the config asks "
                f"for {expected.get(path, 'no such tensor')}; check markov_head_type, markov_rank and "
                "confidence_head_with_markov"
            )


def _named(markov_type: str | None) -> str:
    return "no Markov head" if markov_type is None else f"a Markov head of type {markov_type!r}"


def _head_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    heads = nnx.eval_shape(lambda: _Heads(config))
    return {
        "drafter/" + "/".join(map(str, path)): tuple(leaf.get_value().shape)
        for path, leaf in nnx.to_flat_state(nnx.state(heads, nnx.Param))
    }


class _Heads(nnx.Module):
    def __init__(self, config: DrafterConfig):
        scope = Scope("drafter")
        self.markov_head = make_markov_head(scope / "markov_head", config)
        self.confidence_head = ConfidenceHead(scope / "confidence_head", config) if config.confidence_head else None
