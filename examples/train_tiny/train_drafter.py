"""Training of a DSpark drafter for any converted target, by the published recipe.

  python examples/train_tiny/train_drafter.py --target CKPT --data FILE_OR_FOLDER ... --out DIR

CKPT is a folder that `python -m convert.minimax` wrote. Data are token files (.npy: a stream [N] or rows [N, T]), text
files, or folders of text files; `--own-rows N` adds N continuations that the target writes itself, of beginnings cut
out of the data. DIR/dspark is then the drafter in the published layout: put it beside the target's shards and convert
again.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import drafter_forward
import jax
import jax.numpy as jnp
import loop
import numpy as np
import storage
from settings import Training, drafter_config
from target_forward import forward

import dspark_jax as ds
from convert.geometry import Parameter, drafter_parameters
from dspark_jax.config import DrafterConfig

Tree = Any
Features = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# A target of more experts is run by the library, which computes only the chosen ones.
_MOST_DENSE_EXPERTS = 16
EVALUATION_ANCHORS_SEED = 7


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen target: its features for the drafter, its last hidden state, its embedding and head.

    Attributes:
      model: what `ds.load` returned.
      weights: its dequantised values by path, or only embedding and head where the library runs it.
      dtype: of the activations.
    """

    model: ds.Model
    weights: storage.Params
    dtype: Any

    @classmethod
    def of(cls, model: ds.Model, dtype: Any) -> "Teacher":
        """Everything that training reads from `model`."""
        stored = storage.module_params(model.target, "target")
        if model.target.config.num_experts > _MOST_DENSE_EXPERTS:
            stored = {k: w for k, w in stored.items() if k in ("target/embed_tokens/weight", "target/lm_head/weight")}
        return cls(model, jax.jit(storage.values)(stored), dtype)

    def arrays(self) -> Tree:
        """What a compiled program takes as argument; `features` then reads it."""
        return self.weights, self.model.target

    def features(self, arrays: Tree, tokens: jax.Array, layers: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """-> residual streams behind `layers` [B, T, layers · H], output after the final norm [B, T, H]."""
        weights, target = arrays
        if len(weights) > 2:
            out = forward(weights, tokens, target.config, dtype=self.dtype, capture=layers)
            return jnp.concatenate(out.features, axis=-1), out.hidden
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        cache = target.make_cache(*tokens.shape)
        out = target(tokens, positions, cache, capture=layers, logits="none")
        return jnp.concatenate(out.features, axis=-1), out.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: a stream, of which every token counts, and rows with a mask.

    Attributes:
      stream: integers [N].
      rows: integers [R, T], or None.
      mask: bool [R, T], tokens of the rows that count as labels.
      share: rows of a batch that come from `rows`.
    """

    stream: np.ndarray
    rows: np.ndarray | None = None
    mask: np.ndarray | None = None
    share: float = 0.5

    def arrays(self) -> Tree:
        """On the device."""
        rows = None if self.rows is None or self.mask is None else (jnp.asarray(self.rows), jnp.asarray(self.mask))
        return jnp.asarray(self.stream), rows

    def without_last(self, count: int) -> tuple["Data", np.ndarray | None]:
        """The data without their last `count` rows, and those; all of them and None where there are too few."""
        if self.rows is None or self.mask is None or len(self.rows) < 4 * count:
            return self, None
        kept = dataclasses.replace(self, rows=self.rows[:-count], mask=self.mask[:-count])
        return kept, self.rows[-count:]

    def tokens(self) -> int:
        """In all."""
        return len(self.stream) + (0 if self.rows is None else self.rows.size)


def draw_batch(data: Tree, key: jax.Array, batch: int, length: int, share: float) -> tuple[jax.Array, jax.Array]:
    """-> tokens int32 and loss mask bool [B, T]."""
    stream, rows = data
    first, second = jax.random.split(key)
    own = 0 if rows is None else round(share * batch)
    tokens = loop.windows(stream, first, batch - own, length)
    mask = jnp.ones(tokens.shape, bool)
    if own:
        index = jax.random.randint(second, (own,), 0, rows[0].shape[0])
        tokens = jnp.concatenate([tokens, rows[0][index][:, :length].astype(jnp.int32)])
        mask = jnp.concatenate([mask, rows[1][index][:, :length]])
    return tokens, mask


def make_run(
    teacher: Teacher,
    config: DrafterConfig,
    geometry: Mapping[str, Parameter],
    options: Training,
    *,
    anchors: int,
    share: float,
    chunks: int,
    seed: int,
) -> Callable[..., tuple[Tree, dict[str, jax.Array]]]:
    """(state, teacher arrays, data, planned) -> state, metrics; `steps_per_call` steps in one compiled call."""
    optimizer, key = loop.Optimizer(options, storage.decays), jax.random.key(seed)

    def step(state: Tree, frozen: Tree, data: Tree, planned: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        here = jax.random.split(jax.random.fold_in(key, state["step"]))
        tokens, mask = draw_batch(data, here[0], options.batch, options.length, share)
        starts, valid = drafter_forward.choose_anchors(here[1], mask, anchors)
        features, hidden = teacher.features(frozen, tokens, config.target_layer_ids)

        def objective(params: storage.Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            return drafter_forward.loss(
                storage.unstack(storage.rounded(params, geometry), geometry),
                frozen[0],
                features,
                hidden,
                tokens,
                mask,
                starts,
                valid,
                config,
                dtype=teacher.dtype,
                chunks=chunks,
            )

        grads, metrics = jax.grad(objective, has_aux=True)(state["params"])
        rate = optimizer.rate(state["step"], planned)
        params, moments = optimizer.update(grads, state["optimizer"], state["params"], rate)
        state = {"step": state["step"] + 1, "planned": state["planned"], "params": params, "optimizer": moments}
        return state, metrics | {"rate": rate}

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Tree, frozen: Tree, data: Tree, planned: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        state, metrics = jax.lax.scan(
            lambda state, _: step(state, frozen, data, planned), state, length=options.steps_per_call
        )
        return state, jax.tree.map(lambda m: jnp.mean(m, axis=0), metrics)

    return run


def make_evaluate(
    teacher: Teacher, config: DrafterConfig, geometry: Mapping[str, Parameter], *, anchors: int, batch: int
) -> Callable[..., dict[str, Any]]:
    """(parameters, rows [N, T]) -> loss, acceptance by slot and expected length on fixed anchors."""

    @jax.jit
    def means(params: storage.Params, frozen: Tree, rows: jax.Array) -> dict[str, jax.Array]:
        weights = storage.unstack(storage.rounded(params, geometry), geometry)

        def part(inputs: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            tokens, index = inputs
            mask = jnp.ones(tokens.shape, bool)
            key = jax.random.fold_in(jax.random.key(EVALUATION_ANCHORS_SEED), index)
            starts, valid = drafter_forward.choose_anchors(key, mask, anchors)
            features, hidden = teacher.features(frozen, tokens, config.target_layer_ids)
            _, metrics = drafter_forward.loss(
                weights, frozen[0], features, hidden, tokens, mask, starts, valid, config, dtype=teacher.dtype
            )
            return metrics

        index = jnp.arange(rows.shape[0], dtype=jnp.int32)
        return jax.tree.map(lambda m: jnp.mean(m, axis=0), jax.lax.map(part, (rows, index)))

    def evaluate(params: storage.Params, rows: np.ndarray) -> dict[str, Any]:
        width = min(batch, len(rows))
        rows = rows[: len(rows) // width * width].reshape(-1, width, rows.shape[1])
        found = means(params, teacher.arrays(), jnp.asarray(rows))
        return {f"held_out_{name}": np.asarray(value).tolist() for name, value in found.items()}

    return evaluate


def train(
    teacher: Teacher,
    config_json: Mapping[str, Any],
    options: Training,
    data: Data,
    held_out: np.ndarray,
    file: Path,
    log: loop.Log,
    *,
    anchors: int,
    eval_rows: int,
    minutes: float | None,
    steps: int | None,
    seed: int,
    chunks: int = 1,
    stop_at: float | None = None,
) -> storage.Params:
    """Train (or go on from `file`) -> the drafter's parameters, float32 by path.

    Raises:
      ConfigError: the drafter does not fit the target.
    """
    config = DrafterConfig.from_hf(config_json)
    config.check_target(teacher.model.target.config)
    geometry = drafter_parameters(config)
    run = make_run(teacher, config, geometry, options, anchors=anchors, share=data.share, chunks=chunks, seed=seed)
    data, own = data.without_last(eval_rows)
    evaluate = make_evaluate(teacher, config, geometry, anchors=anchors, batch=options.batch)
    rows = loop.fixed_windows(held_out, eval_rows, options.length)
    frozen, arrays = teacher.arrays(), data.arrays()

    def evaluations(params: storage.Params) -> dict[str, Any]:
        found = evaluate(params, rows)
        if own is not None:
            tau = evaluate(params, own[:, : options.length].astype(np.int32))["held_out_tau"]
            found["held_out_rows_tau"] = tau
        return found

    job = loop.Job(
        name="drafter",
        file=file,
        options=options,
        run=lambda state, planned: run(state, frozen, arrays, planned),
        evaluate=lambda state: evaluations(state["params"]),
        epoch_tokens=data.tokens(),
        minutes=minutes,
        steps=steps,
    )
    params = storage.stack(storage.initial(geometry, jax.random.key(seed + 1), layers=config.num_layers))
    state = {
        "step": jnp.int32(0),
        "planned": jnp.int32(0),
        "params": params,
        "optimizer": loop.Optimizer(options, storage.decays).init(params),
    }
    return storage.unstack(loop.train(job, state, log, stop_at=stop_at)["params"], geometry)


def export(params: storage.Params, config_json: Mapping[str, Any], destination: Path) -> dict[str, Any]:
    """Write the drafter in the published layout -> its weights as stored."""
    geometry = drafter_parameters(DrafterConfig.from_hf(config_json))
    weights = jax.jit(lambda params: storage.stored(params, geometry))(params)
    storage.write_checkpoint(destination, config_json, weights)
    return weights


def own_outputs(
    model: ds.Model,
    stream: np.ndarray,
    file: Path,
    log: loop.Log,
    *,
    rows: int,
    batch: int,
    prompt: int,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    minutes: float | None = None,
    stop_at: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Continuations that the target writes of windows of the stream, kept in `file` -> rows [R, T], mask bool [R, T].

    A time limit ends between batches; a later call goes on.

    Raises:
      ValueError: `file` holds rows of another length.
    """
    began = time.monotonic()
    kind = np.min_scalar_type(model.target.config.vocab_size - 1)
    done = np.load(file)["rows"] if file.exists() else np.zeros((0, length), kind)
    if done.shape[1] != length:
        raise ValueError(f"{file} holds rows of {done.shape[1]} tokens, but {length} are wanted; delete it")
    config = ds.GenerateConfig(max_new_tokens=length - prompt, draft="none", stop_token_ids=())
    generate = jax.jit(ds.generate, static_argnames="config")
    params = ds.SamplingParams(temperature=temperature)
    model = storage.dequantised(model)
    last = 0.0
    while len(done) < rows:
        left = min(
            60 * minutes - (time.monotonic() - began) if minutes is not None else float("inf"),
            stop_at - time.monotonic() if stop_at is not None else float("inf"),
        )
        if left < last or left <= 0:
            log.write("sample", event="time limit", rows=len(done), wanted=rows)
            break
        start = time.monotonic()
        starts = np.random.default_rng([seed, len(done)]).integers(0, len(stream) - prompt, batch)
        prompts = np.stack([stream[s : s + prompt] for s in starts]).astype(np.int32)
        lengths = jnp.full((batch,), prompt, jnp.int32)
        keys = ds.request_keys(range(len(done), len(done) + batch))
        out = generate(model, jnp.asarray(prompts), lengths, keys, params, config=config)
        new = np.concatenate([prompts, np.asarray(out.tokens)], axis=1).astype(kind)
        done = np.concatenate([done, new])
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, rows=done)
        partial.replace(file)
        last = time.monotonic() - start
        log.write(
            "sample", rows=len(done), wanted=rows, seconds=last, tokens_per_second=batch * (length - prompt) / last
        )
    mask = np.broadcast_to(np.arange(length) >= prompt, done.shape)
    return done, mask


def read_data(paths: Sequence[Path], tokenizer: ds.Tokenizer | None, end: int) -> tuple[np.ndarray, np.ndarray | None]:
    """-> one stream of all texts and token streams, and the rows [R, T] of 2-D files.

    Raises:
      ValueError: nothing to read, rows of different lengths, or text without a tokenizer.
    """
    streams, rows = [], []
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".npy":
                array = np.load(file)
                (streams if array.ndim == 1 else rows).append(array.astype(np.uint32))
                continue
            if tokenizer is None:
                raise ValueError(f"{file} is text, but the target's folder has no tokenizer.json; give .npy files")
            ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"))
            streams.append(np.array([end, *ids], np.uint32))
    if not streams and not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: no data")
    if len({r.shape[1] for r in rows}) > 1:
        raise ValueError(f"rows of different lengths: {sorted({r.shape[1] for r in rows})}; cut them to one")
    joined = np.concatenate(rows) if rows else None
    return np.concatenate(streams) if streams else np.concatenate([*(joined if joined is not None else [])]), joined


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", type=Path, required=True, metavar="CKPT", help="converted target")
    p.add_argument("--data", type=Path, nargs="+", required=True, help=".npy token files, text files, folders of them")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints, log.jsonl and the drafter")
    p.add_argument("--prompt-length", type=int, default=0, help="of .npy rows: tokens that are no labels")
    p.add_argument("--held-out", type=float, default=0.02, help="share of the stream's end that is held out")
    p.add_argument("--own-rows", type=int, default=0, metavar="N", help="continuations that the target writes")
    p.add_argument("--own-prompt", type=int, default=64, help="tokens of their beginnings")
    p.add_argument("--own-batch", type=int, default=256)
    p.add_argument("--share", type=float, default=0.5, help="share of a batch that are rows, not stream")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--mlp-size", type=int, help="default: twice the hidden size")
    p.add_argument("--block-size", type=int, default=7)
    p.add_argument("--markov-rank", type=int, default=64, help="0 for no Markov head")
    p.add_argument("--window", type=int, default=256)
    p.add_argument("--target-layers", type=int, nargs="+", help="default: three spread over the target")
    p.add_argument("--mask-id", type=int, required=True, help="token that fills a block, one that texts do not hold")
    p.add_argument("--causal", action="store_true", help="slots see only earlier slots")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--anchors", type=int, default=64)
    p.add_argument("--chunks", type=int, default=1, help="parts of the anchors whose logits are held at once")
    p.add_argument("--epochs", type=float, default=10)
    p.add_argument("--rate", type=float, default=1e-3)
    p.add_argument("--warmup", type=int, default=200)
    p.add_argument("--steps-per-call", type=int, default=25)
    p.add_argument("--minutes", type=float, help="plan as many steps as fit")
    p.add_argument("--steps", type=int, help="take exactly these steps")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status."""
    a = parser().parse_args(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    log = loop.Log(a.out / "log.jsonl")
    model = ds.load(a.target, compute_dtype=a.dtype)
    text = json.loads((a.target / "config.json").read_text(encoding="utf-8"))
    target = model.target.config
    count = target.num_layers
    layers = tuple(a.target_layers or sorted({count // 4, count // 2, count - 1}))
    tokenizer = ds.Tokenizer.load(a.target) if (a.target / "tokenizer.json").is_file() else None
    stream, rows = read_data(a.data, tokenizer, target.eos_token_ids[0] if target.eos_token_ids else 0)
    cut = min(len(stream) - a.length, int((1 - a.held_out) * len(stream)))
    stream, held_out = stream[:cut], stream[cut:]
    if len(held_out) < a.length or len(stream) < a.length:
        raise ValueError(f"the data are too short for sequences of {a.length} tokens")
    mask = None if rows is None else np.broadcast_to(np.arange(rows.shape[1]) >= a.prompt_length, rows.shape)
    if a.own_rows:
        rows, mask = own_outputs(
            model,
            stream,
            a.out / "own.npz",
            log,
            rows=a.own_rows,
            batch=min(a.own_batch, a.own_rows),
            prompt=a.own_prompt,
            length=a.length,
            seed=a.seed,
        )
    options = Training(
        batch=a.batch,
        length=a.length,
        epochs=a.epochs,
        peak_rate=a.rate,
        warmup=a.warmup,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        steps_per_call=a.steps_per_call,
    )
    config_json = drafter_config(
        text.get("text_config", text),
        layers=a.layers,
        mlp_size=a.mlp_size or 2 * target.hidden_size,
        block=a.block_size,
        rank=a.markov_rank,
        window=a.window,
        target_layer_ids=layers,
        mask_id=a.mask_id,
        causal=a.causal,
    )
    params = train(
        Teacher.of(model, jnp.dtype(a.dtype)),
        config_json,
        options,
        Data(stream=stream, rows=rows, mask=mask, share=a.share),
        held_out,
        a.out / "drafter.npz",
        log,
        anchors=a.anchors,
        eval_rows=2 * a.batch,
        minutes=a.minutes,
        steps=a.steps,
        seed=a.seed,
        chunks=a.chunks,
    )
    export(params, config_json, a.out / "dspark")
    print(f"done: {a.out / 'dspark'}; copy it into the target's safetensors folder and convert that again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
