"""What the caller fixes at compile time for a generation."""

import dataclasses
import enum
import inspect

DRAFT_METHODS = ("ancestral", "greedy", "none")
VERIFY_METHODS = ("block", "standard", "match")

_NOT_HERE = frozenset(
    """n best_of num_beams num_return_sequences repetition_penalty presence_penalty frequency_penalty
    logit_bias bad_words min_tokens guided_json guided_regex grammar""".split()
)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


class FinishReason(enum.IntEnum):
    """Why a row ended: RUNNING it has not, STOP a stop token, LENGTH max_new_tokens, CONTEXT the target's context is
    full, EMPTY its prompt has no token, INVALID the target gave nothing to draw from."""

    RUNNING = 0  # it has not
    STOP = 1  # it emitted a stop token
    LENGTH = 2  # it emitted max_new_tokens tokens
    CONTEXT = 3  # it fills the target's context (a prompt that does so still gets the one token behind it)
    EMPTY = 4  # its prompt has no token
    INVALID = 5  # the target gave it no law to draw from: logits that are all NaN or -inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Static options of `generate`: hashable, so pass it to `jax.jit` as a static argument.

    What differs from request to request (temperature and filters) is in `SamplingParams` instead, and changing it
    compiles nothing.

    Attributes:
      max_new_tokens: tokens to generate at most; shapes the output.
      num_draft_tokens: drafts of a step (K), 1 to the drafter's block size; None takes the block size.
      draft: "ancestral" draws each draft from the drafter's law given the draft before it, "greedy" takes the
        likeliest, "none" decodes one token a step without the drafter.
      verify: "block" or "standard" rejection sampling, or "match": the target draws each token itself and a draft
        counts if it is the same one. The law of the output is the target's with each. Unused without drafts.
      stop_token_ids: tokens that end a row, as its last; None takes the checkpoint's end-of-sequence tokens, () none.
      confidence_threshold: cut a block before the first draft whose confidence is below this; 0 verifies all.
      ragged_verify: rule for steps that the threshold may shorten. "standard" is what published engines use.
      record_steps: keep drafts, accepted counts, last tokens and confidences of every step.
      log_probs: also return the log-probability of each emitted token under the unfiltered target at temperature 1.
      expected_acceptance: also sum up what `standard` and `block` accept on average over their coins, from the same
        drafts (see `AcceptanceStats.expected_accepted`); with `record_steps` each step's, too.
      prefill_chunk: prompt tokens of one forward; bounds the memory of a long prompt.
      draft_attention: implementation of the drafter's attention kernels, None for the best on the device.
      benchmark_forced_acceptance: BENCHMARKS ONLY, the output is then meaningless: accept this many drafts a step on
        average, whatever the drafts are. None verifies.

    Raises:
      ValueError: a value out of its range or an unknown method.
      NotImplementedError: an option of other libraries that this one does not have.
    """

    max_new_tokens: int
    num_draft_tokens: int | None = None
    draft: str = "ancestral"
    verify: str = "block"
    stop_token_ids: tuple[int, ...] | None = None
    confidence_threshold: float = 0.0
    ragged_verify: str = "standard"
    record_steps: bool = False
    log_probs: bool = False
    expected_acceptance: bool = False
    prefill_chunk: int = 512
    draft_attention: str | None = None
    benchmark_forced_acceptance: float | None = None

    def __new__(cls, **options):
        unsupported = sorted(_NOT_HERE & options.keys())
        if unsupported:
            raise NotImplementedError(
                f"{unsupported[0]} is not implemented: the library samples one continuation a request with temperature,"
                " top-k, top-p and min-p (see SamplingParams)"
            )
        unknown = sorted(options.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            hint = " (it belongs in SamplingParams)" if unknown[0] in _SAMPLING else ""
            raise TypeError(f"unknown option {unknown[0]!r}{hint}; known: {', '.join(cls.__dataclass_fields__)}")
        return super().__new__(cls)

    def __post_init__(self):
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        _at_least("prefill_chunk", self.prefill_chunk, 1)
        _one_of("draft", self.draft, DRAFT_METHODS)
        _one_of("verify", self.verify, VERIFY_METHODS)
        _one_of("ragged_verify", self.ragged_verify, ("standard", "block"))
        if self.draft_attention is not None:
            _one_of("draft_attention", self.draft_attention, ("mosaic", "triton", "xla"))
        if self.num_draft_tokens is not None:
            _at_least("num_draft_tokens", self.num_draft_tokens, 1, "; use draft='none' to decode without drafts")
        if not _is_number(self.confidence_threshold) or not 0 <= self.confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold must be in [0, 1], found {self.confidence_threshold!r}")
        if self.stop_token_ids is not None:
            ids = tuple(self.stop_token_ids) if isinstance(self.stop_token_ids, tuple | list) else (None,)
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
                raise ValueError(f"stop_token_ids must be token ids, found {self.stop_token_ids!r}")
            object.__setattr__(self, "stop_token_ids", ids)
        forced = self.benchmark_forced_acceptance
        if forced is not None and not (_is_number(forced) and 0 <= forced < float("inf")):
            raise ValueError(f"benchmark_forced_acceptance must be a number that is not negative, found {forced!r}")


# For help() and editors: __new__ takes any name to be able to explain it.
GenerateConfig.__signature__ = inspect.signature(GenerateConfig.__init__)  # pyright: ignore[reportAttributeAccessIssue]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(name: str, value: int, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} must be an integer of at least {least} and below 2^31, found {value!r}{hint}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known: {', '.join(known)}")
