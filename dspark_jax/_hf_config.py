"""Reading `config.json` files strictly: which keys exist, how they are spelled, which values can be computed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Keys that cannot change what a text forward computes: bookkeeping, training options, the vision side.
_INERT = frozenset(
    """architectures model_type auto_map torch_dtype dtype transformers_version return_dict output_hidden_states
    output_attentions output_router_logits use_cache is_encoder_decoder initializer_range attention_dropout
    router_aux_loss_coef router_jitter_noise num_mtp_modules num_nextn_predict_layers num_reward_heads
    bos_token_id eos_token_id pad_token_id quantization_config vision_config text_config
    image_token_index image_token_id video_token_index video_token_id image_seq_length image_grid_pinpoints
    vision_feature_layer vision_feature_select_strategy projector_hidden_size projector_hidden_act
    multimodal_projector_bias process_image_mode img_token_compression_config""".split()
)


_LARGEST = 2**31


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else text[:77] + "..."


class ConfigError(ValueError):
    """A configuration that is missing something, contradicts itself, or asks for what the library does not compute."""


class Reader:
    """Reads keys of one `config.json`, remembers which were used, and refuses contradictions.

    Fields under `text_config` count; the same field at top level must agree with it where it is present.
    """

    def __init__(self, config: Mapping[str, Any], name: str):
        if not isinstance(config, Mapping):
            raise ConfigError(f"{name}: expected a JSON object, found {type(config).__name__}")
        self.name = name
        self.top = config
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ConfigError(f"{name}: text_config must be a JSON object, found {type(nested).__name__}")
        self.fields: Mapping[str, Any] = config if nested is None else nested
        self.used: set[str] = set()

    def has(self, key: str) -> bool:
        return self.get(key, object, None) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = dataclasses.MISSING) -> Any:
        self.used.add(key)
        top, value = self.top.get(key), self.fields.get(key)
        if value is None:
            value = top
        elif top is not None and top != value:
            raise ConfigError(
                f"{self.name}: {key} is {value!r} under text_config but {top!r} at top level; make the two agree"
            )
        if value is None:
            if default is dataclasses.MISSING:
                raise ConfigError(
                    f"{self.name}: {key} is missing; add it with the value the checkpoint was trained with"
                )
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and not {bool, object} & set(kinds)) or not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self.name}: {key} must be of type {names}, found {value!r}")
        return value

    def size(self, key: str, default: Any = dataclasses.MISSING) -> int:
        value = self.get(key, int, default)
        if not 0 < value < _LARGEST:
            raise ConfigError(f"{self.name}: {key} must be positive and below 2^31, found {shown(value)}")
        return value

    def number(self, key: str, default: Any = dataclasses.MISSING) -> float:
        value = self.get(key, (int, float), default)
        # Compared before it becomes a float: an integer can be too large for one.
        if not 0 < value < 1e30:
            raise ConfigError(f"{self.name}: {key} must be a positive number, found {shown(value)}")
        return float(value)

    def expect(self, key: str, allowed: Sequence[Any], default: Any = dataclasses.MISSING) -> Any:
        value = self.get(key, object, default)
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise ConfigError(f"{self.name}: {key} is {value!r}, but only {known} can be computed here")
        return value

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        value = self.get(key, list)
        if len(value) != length or any(v not in (0, 1) for v in value):
            raise ConfigError(f"{self.name}: {key} must list {length} zeros or ones, one per layer, found {value!r}")
        return tuple(bool(v) for v in value)

    def nested(self, key: str) -> "Reader":
        return Reader(self.get(key, Mapping), f"{self.name}: {key}")

    def finish(self, ignore: Sequence[str] = ()) -> None:
        """Raise on a key that nobody read: it might change the answer."""
        inert = set() if self.name.endswith("sparse_attention_config") else _INERT
        unknown = sorted(set(self.fields) - self.used - inert - set(ignore))
        if unknown:
            raise ConfigError(
                f"{self.name}: unknown key {unknown[0]!r} = {self.fields[unknown[0]]!r} might change the result; "
                f"if it does not, pass --ignore-config-key {unknown[0]}"
            )


def architecture(reader: Reader, known: Sequence[str]) -> str:
    names = reader.top.get("architectures") or reader.fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ConfigError(f"{reader.name}: architectures is {names!r}; known here: {', '.join(known)}")
    return names[0]


def rope(reader: Reader, head_dim: int, *, full: bool = False) -> tuple[int, float]:
    """-> rotary_dim, theta. `full`: the architecture rotates the whole head and its config has no rotary keys."""
    if reader.has("rope_scaling"):
        scaling = reader.get("rope_scaling", Mapping)
        if scaling.get("rope_type", scaling.get("type")) != "default":
            raise ConfigError(f"{reader.name}: rope_scaling {dict(scaling)!r} is not implemented; only plain RoPE is")
    reader.used.add("rope_scaling")
    partial = None
    if reader.has("rope_parameters"):
        rope = reader.nested("rope_parameters")
        rope.expect("rope_type", ("default",), "default")
        theta = rope.number("rope_theta")
        partial = rope.get("partial_rotary_factor", (int, float), None)
        if reader.has("rope_theta") and reader.number("rope_theta") != theta:
            raise ConfigError(f"{reader.name}: rope_theta differs from rope_parameters.rope_theta; make the two agree")
    else:
        theta = reader.number("rope_theta")
    if partial is None:
        partial = reader.get("partial_rotary_factor", (int, float), None)
    reader.used.add("partial_rotary_factor")
    if partial is not None and not 0 < partial <= 1:
        raise ConfigError(f"{reader.name}: partial_rotary_factor must be in (0, 1], found {shown(partial)}")
    given = reader.get("rotary_dim", int, None)
    if given is None and partial is None:
        if not full:
            raise ConfigError(f"{reader.name}: rotary_dim and partial_rotary_factor are both missing; give one of them")
        return head_dim, theta
    rotary: int = given if partial is None else round(partial * head_dim)  # pyright: ignore[reportAssignmentType]
    if given not in (None, rotary):
        raise ConfigError(
            f"{reader.name}: rotary_dim {given} contradicts partial_rotary_factor {partial} of head_dim {head_dim}"
        )
    if not 0 < rotary <= head_dim or rotary % 2:
        raise ConfigError(f"{reader.name}: rotary_dim must be even and in 1..{head_dim} (head_dim), found {rotary}")
    return rotary, theta


def heads(reader: Reader) -> tuple[int, int, int]:
    heads, kv_heads = reader.size("num_attention_heads"), reader.size("num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(
            f"{reader.name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads, reader.size("head_dim")


def minimax_switches(reader: Reader) -> tuple[float, float]:
    """Checks what every MiniMax backbone fixes -> swiglu alpha, limit."""
    reader.expect("hidden_act", ("swigluoai",))
    reader.expect("use_gemma_norm", (True,))
    reader.expect("use_qk_norm", (True,))
    reader.expect("qk_norm_type", ("per_head",))
    reader.expect("attention_output_gate", (False,), False)
    reader.expect("tie_word_embeddings", (False,), False)
    reader.expect("swiglu_beta", (1.0,), 1.0)
    return reader.number("swiglu_alpha"), reader.number("swiglu_limit")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids as a tuple, from the int, list or null that configs use."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ConfigError(f"{name} must be a token id or a list of them, found {value!r}")
    return tuple(values)


def moe_layers(r: Reader, layers: int) -> tuple[bool, ...]:
    if not r.has("mlp_layer_types"):
        return r.flags("moe_layer_freq", layers)
    types = r.get("mlp_layer_types", list)
    if len(types) != layers or any(t not in ("dense", "sparse") for t in types):
        raise ConfigError(
            f"{r.name}: mlp_layer_types must name 'dense' or 'sparse' for {layers} layers, found {types!r}"
        )
    r.used.add("moe_layer_freq")
    return tuple(t == "sparse" for t in types)


def sparse_attention(r: Reader, layers: int, kv_heads: int) -> tuple[tuple[bool, ...], dict[str, int]]:
    """-> block-sparse layers, indexer sizes. Two spellings: nested as released, flat as re-saved."""
    names = dict(index_heads="index_n_heads", index_head_dim="index_head_dim", block_size="index_block_size")
    if r.has("layer_types"):
        kinds = {"minimax_m3_sparse": True, "full_attention": False}
        types = r.get("layer_types", list)
        unknown = [t for t in types if not isinstance(t, str) or t not in kinds]
        if unknown or len(types) != layers:
            problem = f"unknown {unknown[0]!r}" if unknown else f"{len(types)} entries for {layers} layers"
            raise ConfigError(f"{r.name}: layer_types has {problem}; known here: {', '.join(kinds)}")
        r.expect("index_local_blocks", (1,))
        sizes = {ours: r.size(theirs) for ours, theirs in names.items()}
        return tuple(kinds[t] for t in types), sizes | {"top_k_blocks": r.size("index_topk_blocks")}
    if not r.has("sparse_attention_config"):
        raise ConfigError(
            f"{r.name}: sparse_attention_config is missing; without it engines disagree on what to compute"
        )
    s = r.nested("sparse_attention_config")
    s.expect("use_sparse_attention", (True,))
    s.expect("sparse_score_type", ("max",))
    s.expect("sparse_init_block", (0,), 0)
    s.expect("sparse_local_block", (1,))
    sparse = s.flags("sparse_attention_freq", layers)
    no_value = s.flags("sparse_disable_index_value", layers)
    if any(a and not b for a, b in zip(sparse, no_value, strict=True)):
        raise ConfigError(
            f"{s.name}: sparse_disable_index_value must be 1 in every sparse layer: no index value path here"
        )
    result = dict(
        index_heads=s.size("sparse_num_index_heads"),
        index_head_dim=s.size("sparse_index_dim"),
        block_size=s.size("sparse_block_size"),
        top_k_blocks=s.size("sparse_topk_blocks"),
    )
    s.finish()
    return sparse, result


# Training options of public drafters, and containers that are read through `DraftReader`.
DRAFT_INERT = (
    "num_target_layers num_anchors shift_label confidence_head_alpha max_window_layers loss_decay_gamma "
    "dflash_config dspark_config"
).split()


class DraftReader:
    """Reads a drafter's own fields, which configs spell `x`, `dspark_x`, `dspark_config.x` or `dflash_config.x`."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.groups = [(g, reader.get(g, Mapping)) for g in ("dspark_config", "dflash_config") if reader.has(g)]

    def has(self, key: str) -> bool:
        return self.get(key, object, None) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = dataclasses.MISSING) -> Any:
        r = self.reader
        found = {f"{g}.{key}": fields[key] for g, fields in self.groups if fields.get(key) is not None}
        for spelling in (f"dspark_{key}", key):
            value = r.get(spelling, kind, None)
            if value is not None:
                found[spelling] = value
        if not found:
            if default is dataclasses.MISSING:
                raise ConfigError(f"{r.name}: {key} is missing; add dspark_{key} with the value of the training run")
            return default
        (first, value), *others = found.items()
        for other, again in others:
            if again != value:
                raise ConfigError(f"{r.name}: {first} is {value!r} but {other} is {again!r}; make the two agree")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ConfigError(f"{r.name}: {first} has the wrong type: {value!r}")
        return value

    def expect(self, key: str, allowed: Sequence[Any], default: Any) -> None:
        value = self.get(key, object, default)
        if value not in allowed:
            raise ConfigError(f"{self.reader.name}: {key} is {value!r}, but only {list(allowed)} can be computed here")


def draft_window(r: Reader, layers: int) -> tuple[int | None, bool]:
    """-> effective attention window, causal. Causality is judged against the window however the window is spelled.

    A sliding layer does not make a block causal: only explicit causal metadata does.
    """
    d = DraftReader(r)
    window = None
    given = r.get("layer_types", list, None)
    types = ["full_attention"] if given is None else given
    unknown = [t for t in types if t not in ("sliding_attention", "full_attention")]
    if unknown or (given is not None and len(types) != layers):
        problem = f"unknown {unknown[0]!r}" if unknown else f"{len(types)} entries for {layers} layers"
        raise ConfigError(f"{r.name}: layer_types has {problem}; known here: sliding_attention, full_attention")
    sliding = r.get("sliding_window", int, None)
    enabled = r.get("use_sliding_window", bool, None)
    if d.get("use_swa", bool, False):
        window = d.get("swa_window_size", int)
    elif len(set(types)) > 1:
        raise ConfigError(
            f"{r.name}: layer_types mixes sliding and full attention; one window for all layers is needed"
        )
    elif types[0] == "sliding_attention":
        if sliding is None or enabled is False:
            raise ConfigError(
                f"{r.name}: layer_types says sliding_attention but sliding_window is {sliding!r}; give the window"
            )
        window = sliding
    elif enabled:
        raise ConfigError(f"{r.name}: use_sliding_window is true but layer_types has no sliding_attention layer")
    d.get("swa_window_size", int, None)
    if window is not None and not 0 < window < _LARGEST:
        raise ConfigError(f"{r.name}: the attention window must be positive and below 2^31, found {shown(window)}")
    causal = d.get("is_causal", bool, d.get("causal", bool, None))
    non_causal = d.get("sliding_window_non_causal", bool, None)
    if causal is None:
        causal = non_causal is False
    elif non_causal is not None and causal == non_causal:
        raise ConfigError(f"{r.name}: is_causal {causal} contradicts sliding_window_non_causal {non_causal}")
    return window, causal
