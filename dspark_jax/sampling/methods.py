"""The verification rules: what the coins decide and what the last token is drawn from.

Index i is the i-th draft: x_i in the papers, column i - 1 of every array here. p_i is target row i - 1, q_i what x_i
was drawn from, n = `draft_lengths`. A rule turns the ratios p_i(x_i) / q_i(x_i) into acceptance thresholds h_i, says
which drafts independent coins u_i accept, and from what the last token is drawn:

    standard  h_i = min(1, p_i/q_i); accept the drafts before the first u_i >= h_i; last token ~ (p - q)+
              (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)
    block     rho_i = min(1, rho_{i-1} p_i/q_i), Z_i = sum_v (rho_i p_{i+1}(v) - q_{i+1}(v))+,
              h_i = Z_i / (Z_i + 1 - rho_i) and h_n = rho_n;
              accept up to the last i with u_i < h_i; last token ~ (rho p - q)+
              (Sun et al. 2024, arXiv 2403.10444, Algorithm 2)
    match     the target draws a token in every row and drafts that equal it are accepted. Its law is the standard
              rule's for drafts that were certain (q one-hot): h_i = p_i(x_i), last token ~ p without x_i

After n accepted drafts the last token is drawn from the target's row n.
"""

import abc

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class VerificationRule(abc.ABC):
    """One way to decide how many drafts stand.

    Attributes:
      uses_proposal: a log_q may be given. False: the target draws every row and no coin is needed.
      uses_residual_mass: `thresholds` reads the residual mass Z.
    """

    uses_proposal = True
    uses_residual_mass = False

    @abc.abstractmethod
    def log_survival(self, log_ratio: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """log Pr(num_accepted >= i | drafts 1..i), from log p_i(x_i)/q_i(x_i): may be inf, -inf past the drafts."""

    @abc.abstractmethod
    def thresholds(
        self,
        log_ratio: Float[Array, "B K"],
        log_rho: Float[Array, "B K"],
        residual_mass: Float[Array, "B K"],
        draft_lengths: Int[Array, " B"],
    ) -> Float[Array, "B K"]:
        """h_1..h_K; `residual_mass` is Z, or anything where the rule does not use it."""

    @abc.abstractmethod
    def accepted(self, coins: Float[Array, "B K"], h: Float[Array, "B K"]) -> Int[Array, " B"]:
        """How many drafts the coins accept."""

    @abc.abstractmethod
    def residual_log_scale(self, log_rho: Float[Array, "B K"], num_accepted: Int[Array, " B"]) -> Float[Array, " B"]:
        """The log of what the target's row is multiplied by before the proposal is subtracted."""

    @abc.abstractmethod
    def survival(self, h: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """Pr(num_accepted >= i | all drafts)."""


class Standard(VerificationRule):
    """Token by token."""

    def log_survival(self, log_ratio):
        return jnp.cumsum(jnp.minimum(log_ratio, 0.0), axis=1)

    def thresholds(self, log_ratio, log_rho, residual_mass, draft_lengths):
        return jnp.exp(jnp.minimum(log_ratio, 0.0))

    def accepted(self, coins, h):
        return jnp.sum(jnp.cumprod(_passes(coins, h).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def residual_log_scale(self, log_rho, num_accepted):
        return jnp.zeros(num_accepted.shape, log_rho.dtype)

    def survival(self, h):
        return jnp.cumprod(h, axis=1)


class Block(VerificationRule):
    """All drafts together.

    Lossless because Pr(num_accepted >= i | drafts 1..i) = rho_i, by induction from h_n = rho_n: given drafts 1..i, the
    chance that a later one is accepted is E[rho_{i+1}] = rho_i - Z_i, so 1 - (1 - h_i)(1 - rho_i + Z_i) has to be
    rho_i, which gives h_i. Then the next token after any surviving prefix has the target's law.
    """

    uses_residual_mass = True

    def log_survival(self, log_ratio):
        rows = []
        log_rho = jnp.zeros_like(log_ratio[:, 0])
        for slot in range(log_ratio.shape[1]):
            step = log_ratio[:, slot]
            dead = (log_rho == -jnp.inf) | (step == -jnp.inf)
            log_rho = jnp.where(dead, -jnp.inf, jnp.minimum(jnp.where(dead, 0.0, log_rho) + step, 0.0))
            rows.append(log_rho)
        return jnp.stack(rows, axis=1)

    def thresholds(self, log_ratio, log_rho, residual_mass, draft_lengths):
        rho = jnp.exp(log_rho)
        # 1 - rho without cancellation near 1; and 0 / 0 means that p = q here, where any h is right.
        total = residual_mass - jnp.expm1(log_rho)
        h = jnp.where(total > 0, residual_mass / jnp.where(total > 0, total, 1.0), 1.0)
        slot = jnp.arange(log_rho.shape[1], dtype=jnp.int32)[None]
        h = jnp.where(slot + 1 == draft_lengths[:, None], rho, h)
        return jnp.where(rho > 0, h, 0.0)

    def accepted(self, coins, h):
        # Not the first failure: a draft that fails is still accepted when a later one passes.
        position = jnp.arange(1, h.shape[1] + 1, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(_passes(coins, h), position, 0), axis=1)

    def residual_log_scale(self, log_rho, num_accepted):
        last = jnp.take_along_axis(log_rho, jnp.maximum(num_accepted - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(num_accepted > 0, last, 0.0)

    def survival(self, h):
        return 1.0 - jnp.cumprod((1.0 - h)[:, ::-1], axis=1)[:, ::-1]


class Match(Standard):
    """The target draws every row; the law is the standard rule's with certain drafts."""

    uses_proposal = False


VERIFICATION_METHODS: dict[str, VerificationRule] = {"standard": Standard(), "block": Block(), "match": Match()}


def verification_rule(method: str) -> VerificationRule:
    """The rule of a name.

    Raises:
      ValueError: no rule has this name; the known ones are listed.
    """
    if method not in VERIFICATION_METHODS:
        raise ValueError(
            f"verification method {method!r} does not exist: choose one of {', '.join(VERIFICATION_METHODS)}."
        )
    return VERIFICATION_METHODS[method]


def _passes(coins: Float[Array, "B K"], h: Float[Array, "B K"]) -> Bool[Array, "B K"]:
    # Strict, or a coin of 0 would accept an impossible token; a certain one passes even a coin rounded up to 1.
    return (coins.astype(h.dtype) < h) | (h >= 1)
