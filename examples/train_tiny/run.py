"""Train a small target and its drafter from the standard library's sources, and export them as a published pair.

  python examples/train_tiny/run.py --out DIR                                  # everything
  python examples/train_tiny/run.py --out DIR --preset smoke --dtype float32   # a rehearsal on a CPU
  python examples/train_tiny/run.py --out DIR --stage drafter --stage check    # only these stages

Stages: tokenizer, target, export, sample, drafter, check. Each goes on from what DIR holds, so a killed run is started
again by the same command.
"""

import argparse
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STAGES = ("tokenizer", "target", "export", "sample", "drafter", "check")
ABLATIONS = ("no-markov", "causal")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="everything is written here")
    p.add_argument("--preset", choices=("tiny", "smoke"), default="tiny")
    p.add_argument("--corpus", type=Path, metavar="DIR", help="folder of .py files (default: the standard library)")
    p.add_argument("--stage", action="append", choices=(*STAGES, "all"), help="may be repeated (default: all)")
    p.add_argument("--minutes-target", type=float, default=5.0, metavar="M", help="plan steps that fit (default 5)")
    p.add_argument("--minutes-sample", type=float, default=1.0, metavar="M", help="default 1")
    p.add_argument("--sample-rows", type=int, metavar="N", help="texts that the target writes (default: the preset's)")
    p.add_argument("--minutes-drafter", type=float, default=4.0, metavar="M", help="default 4")
    p.add_argument("--target-steps", type=int, metavar="N", help="take exactly N steps instead")
    p.add_argument("--drafter-steps", type=int, metavar="N", help="take exactly N steps instead")
    p.add_argument("--ablation", choices=ABLATIONS, help="train this drafter instead, into DIR/pair-ABLATION")
    p.add_argument("--from-pair", type=Path, metavar="TAR", help="take tokenizer and target from an exported pair.tar")
    p.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop and save gracefully after this time")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the activations")
    p.add_argument("--seed", type=int, default=0)
    return p


class Run:
    """The stages, with what they share."""

    def __init__(self, options: argparse.Namespace):
        import jax.numpy as jnp
        import loop
        from settings import PRESETS

        self.options, self.folder = options, options.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.preset = PRESETS[options.preset]
        self.log = loop.Log(self.folder / "log.jsonl")
        self.dtype = jnp.dtype(options.dtype)
        self.stop_at = None if options.time_limit is None else time.monotonic() + options.time_limit
        suffix = f"-{options.ablation}" if options.ablation else ""
        self.target, self.target_converted = self.folder / "target", self.folder / "target-converted"
        self.pair, self.pair_converted = self.folder / f"pair{suffix}", self.folder / f"pair-converted{suffix}"
        self.drafter_file = self.folder / f"drafter{suffix}.npz"
        if options.from_pair is not None:
            self._unpack(options.from_pair)
        self._corpus: tuple[Any, ...] | None = None

    def _unpack(self, file: Path) -> None:
        with tarfile.open(file) as tar:
            members = [m for m in tar.getmembers() if m.isfile() and "dspark" not in Path(m.name).parts]
            self.target.mkdir(exist_ok=True)
            for member in members:
                content = tar.extractfile(member)
                assert content is not None
                (self.target / Path(member.name).name).write_bytes(content.read())
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.target / name, self.folder / name)

    def corpus(self) -> tuple[Any, ...]:
        """Documents, token streams, bytes of each token; the tokenizer is trained where there is none."""
        if self._corpus is None:
            import corpus
            import tokenizers

            began = time.monotonic()
            folder = self.options.corpus or corpus.standard_library()
            documents = corpus.read_documents(folder, most_bytes=self.preset.corpus_bytes)
            if not (self.folder / "tokenizer.json").exists():
                corpus.write_tokenizer(corpus.train_tokenizer(documents, self.preset.vocab_size), self.folder)
            tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
            streams = corpus.encode(documents, tokenizer)
            self.log.write("corpus", **corpus.describe(documents, streams, folder), seconds=time.monotonic() - began)
            self._corpus = documents, streams, corpus.token_bytes(tokenizer)
        return self._corpus

    def tokenizer_stage(self) -> None:
        """Tokenizer and token counts; every tenth file must decode to itself."""
        import tokenizers

        documents, _, _ = self.corpus()
        tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        for document in documents[::10]:
            ids = tokenizer.encode(document.text, add_special_tokens=False).ids
            if tokenizer.decode(ids, skip_special_tokens=True) != document.text:
                raise ValueError(f"{document.path} does not decode to itself")

    def target_stage(self) -> None:
        """Train the target."""
        import train_target

        _, streams, sizes = self.corpus()
        o = self.options
        train_target.train(
            self.preset,
            streams,
            sizes,
            self.folder,
            self.log,
            minutes=o.minutes_target,
            steps=o.target_steps,
            seed=o.seed,
            dtype=self.dtype,
            stop_at=self.stop_at,
        )

    def export_stage(self) -> None:
        """Write DIR/target, convert it, and check that what is loaded is what was trained."""
        import jax
        import jax.numpy as jnp
        import loop
        import storage
        import train_target
        from settings import target_json

        import dspark_jax as ds
        from convert.geometry import target_parameters
        from dspark_jax.config import TargetConfig

        config = TargetConfig.from_hf(target_json(self.preset))
        geometry = target_parameters(config)
        like = train_target.initial_state(geometry, self.preset.target, 0, layers=self.preset.layers)
        params = storage.unstack(loop.restore(self.folder / "target.npz", like)["params"], geometry)
        weights = train_target.export(params, self.preset, self.folder, self.target)
        shutil.rmtree(self.target_converted, ignore_errors=True)
        train_target.convert(self.target, self.target_converted)
        model = ds.load(self.target_converted, compute_dtype=jnp.float32)
        loaded = storage.module_params(model.target, "target")
        wrong = storage.differences(weights, loaded)
        _, streams, _ = self.corpus()
        rows = loop.fixed_windows(streams["held_out"], 2, self.preset.target.length)
        trained = jax.jit(lambda params: storage.rounded(params, geometry))(params)
        ours = jax.jit(lambda w, t: _logits(w, t, config))(trained, jnp.asarray(rows))
        theirs = jax.jit(ds.target_logits)(model, jnp.asarray(rows))
        gap = jnp.max(jnp.abs(ours - theirs), axis=-1)
        self.log.write(
            "export",
            different_weights=len(wrong),
            largest_logit_gap=float(jnp.max(gap)),
            share_of_tokens_beyond_1e_3=float(jnp.mean((gap > 1e-3).astype(jnp.float32))),
            bytes=_size(self.target),
        )
        if wrong:
            raise ValueError(f"{len(wrong)} weights differ after conversion, first {wrong[0]}")
        shutil.rmtree(self.pair, ignore_errors=True)
        shutil.copytree(self.target, self.pair)
        self._pack()

    def _pack(self) -> None:
        file = self.pair.with_suffix(".tar")
        with tarfile.open(file, "w") as tar:
            for path in sorted(self.pair.rglob("*")):
                if path.is_file():
                    tar.add(path, arcname=path.relative_to(self.pair).as_posix())
        self.log.write("pack", file=file.name, pair_bytes=_size(self.pair), tar_bytes=file.stat().st_size)

    def _teacher(self) -> Any:
        """The exported target, converted and loaded like any checkpoint."""
        import train_target

        import dspark_jax as ds

        if not self.target_converted.exists():
            train_target.convert(self.target, self.target_converted)
        return ds.load(self.target_converted, compute_dtype=self.dtype)

    def sample_stage(self, model: Any = None) -> tuple[Any, Any]:
        """Own outputs of the target."""
        import train_drafter

        _, streams, _ = self.corpus()
        p, o = self.preset, self.options
        return train_drafter.own_outputs(
            model or self._teacher(),
            streams["train"],
            self.folder / "samples.npz",
            self.log,
            rows=o.sample_rows or p.sample_rows,
            batch=p.sample_batch,
            prompt=p.sample_prompt,
            length=p.drafter.length,
            seed=o.seed,
            minutes=o.minutes_sample,
            stop_at=self.stop_at,
        )

    def drafter_stage(self) -> None:
        """Train the drafter on the exported target, write the pair and convert it."""
        import numpy as np
        import storage
        import train_drafter
        import train_target
        from settings import drafter_json

        import dspark_jax as ds

        _, streams, _ = self.corpus()
        p, o = self.preset, self.options
        model = self._teacher()
        rows, mask = np.zeros((0, 0)), None
        if (self.folder / "samples.npz").exists():
            rows = np.load(self.folder / "samples.npz")["rows"]
            mask = np.broadcast_to(np.arange(rows.shape[1]) >= p.sample_prompt, rows.shape)
        some = len(rows) > 0
        config_json = drafter_json(p, causal=o.ablation == "causal", markov=o.ablation != "no-markov")
        params = train_drafter.train(
            train_drafter.Teacher.of(model, self.dtype),
            config_json,
            p.drafter,
            train_drafter.Data(
                stream=streams["train"], rows=rows if some else None, mask=mask if some else None, share=p.sample_share
            ),
            streams["held_out"],
            self.drafter_file,
            self.log,
            anchors=p.anchors,
            eval_rows=p.eval_rows,
            minutes=o.minutes_drafter,
            steps=o.drafter_steps,
            seed=o.seed,
            stop_at=self.stop_at,
        )
        shutil.rmtree(self.pair, ignore_errors=True)
        shutil.copytree(self.target, self.pair)
        weights = train_drafter.export(params, config_json, self.pair / "dspark")
        self._pack()
        shutil.rmtree(self.pair_converted, ignore_errors=True)
        train_target.convert(self.pair, self.pair_converted)
        loaded = storage.module_params(ds.load_drafter(self.pair_converted), "drafter")
        wrong = storage.differences(weights, loaded)
        self.log.write("pair", different_weights=len(wrong), bytes=_size(self.pair))
        if wrong:
            raise ValueError(f"{len(wrong)} weights differ after conversion, first {wrong[0]}")

    def check_stage(self) -> None:
        """Measure the pair and print the table."""
        import checks

        documents, streams, sizes = self.corpus()
        figures = checks.run(self.pair_converted, self.preset, documents, streams, sizes, self.log, dtype=self.dtype)
        text = json.dumps(figures, indent=1) + "\n"
        self.pair_converted.with_name(f"{self.pair.name}-figures.json").write_text(text, encoding="utf-8")
        print(checks.table(figures), flush=True)


def _logits(weights: Any, tokens: Any, config: Any) -> Any:
    import jax.numpy as jnp
    from target_forward import forward, logits

    return logits(weights, forward(weights, tokens, config, dtype=jnp.float32).hidden)


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status."""
    options = parser().parse_args(argv)
    stages = options.stage or ["all"]
    run = Run(options)
    for stage in STAGES:
        if stage in stages or "all" in stages:
            began = time.monotonic()
            getattr(run, f"{stage}_stage")()
            run.log.write("stage", name=stage, seconds=round(time.monotonic() - began, 1))
    return 0


if __name__ == "__main__":
    # The library and the converter lie beside this folder in a checkout.
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
