"""Speculative sampling as pure functions of arrays, usable without the rest of the library.

A step: `draft` a block, run the target on it, `target_log_probs` of its logits, `verify`. Shape letters are those of
`dspark_jax`. `acceptance`, `residual_log_probs`, `num_accepted_probs` and `expected_acceptance_length` are the same
verification without coins.
"""

from dspark_jax.sampling.drafting import DRAFTING_METHODS, Draft, DrawnSlot, SlotDraw, draft, sample
from dspark_jax.sampling.filters import RowFloors, search_floors, target_log_probs
from dspark_jax.sampling.keys import Purpose, purpose_keys, request_keys, step_keys
from dspark_jax.sampling.laws import acceptance, expected_acceptance_length, num_accepted_probs, residual_log_probs
from dspark_jax.sampling.methods import VERIFICATION_METHODS
from dspark_jax.sampling.params import GREEDY_TEMPERATURE, SamplingParams, is_greedy
from dspark_jax.sampling.verification import Verified, verify

__all__ = [
    "DRAFTING_METHODS",
    "GREEDY_TEMPERATURE",
    "VERIFICATION_METHODS",
    "Draft",
    "DrawnSlot",
    "Purpose",
    "RowFloors",
    "SamplingParams",
    "SlotDraw",
    "Verified",
    "acceptance",
    "draft",
    "expected_acceptance_length",
    "is_greedy",
    "num_accepted_probs",
    "purpose_keys",
    "request_keys",
    "residual_log_probs",
    "sample",
    "search_floors",
    "step_keys",
    "target_log_probs",
    "verify",
]
