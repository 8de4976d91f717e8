"""Opening a source: a local folder or a hub repository, its configurations, and the plan that follows from them."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert import plan as planning
from convert.errors import ConversionError
from convert.geometry import drafter_parameters, target_parameters
from convert.safetensors_reader import Checkpoint, read_json
from dspark_jax.config import DRAFTER_ARCHITECTURES, ConfigError, DrafterConfig, TargetConfig

# Copied beside the arrays, byte for byte, where they are present.
SIDECARS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
QUANT_METHODS = ("mxfp8", "modelopt", "compressed-tensors")
MODELOPT_ALGORITHMS = ("MIXED_PRECISION", "NVFP4", "MXFP8")


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened source: checked configurations and headers.

    Attributes:
      name: what the user called it.
      folder: the local folder.
      target, drafter: checkpoint and configuration of each, or None where the source has none.
    """

    name: str
    folder: Path
    target: tuple[Checkpoint, TargetConfig] | None
    drafter: tuple[Checkpoint, DrafterConfig] | None

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(part[0] for part in (self.target, self.drafter) if part)

    def sidecars(self) -> dict[str, bytes]:
        """Relative path in the destination -> content of the configurations and tokenizer files."""
        files = {}
        places = [("", self.target), ("dspark/", self.drafter)]
        for prefix, part in places:
            if part:
                for name in SIDECARS:
                    path = part[0].folder / name
                    if path.exists() and not path.is_file():
                        raise ConversionError(f"{path} is no file; replace or remove it")
                    if path.is_file():
                        files[prefix + name] = path.read_bytes()
        return files

    def fingerprint(self) -> str:
        """Digest of configurations, headers and samples of the data."""
        digest = hashlib.sha256()
        for checkpoint in self.checkpoints:
            digest.update(checkpoint.fingerprint().encode())
        for name, content in sorted(self.sidecars().items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def plan(
        self,
        *,
        weights: planning.Weights,
        max_memory: int,
        batch_bytes: int = planning.BATCH_BYTES,
        parts: Mapping[str, int] | None = None,
    ) -> planning.Plan:
        """What to write; arguments as of `plan.schedule`.

        Raises:
          ConversionError: a tensor is unknown, missing or does not fit.
        """
        leaves: list[planning.Leaf] = []
        skipped: dict[tuple[str, str], tuple[int, int]] = {}
        parts_of_source = []
        if self.target:
            parts_of_source.append((self.target[0], "target", target_parameters(self.target[1])))
        if self.drafter:
            parts_of_source.append((self.drafter[0], "drafter", drafter_parameters(self.drafter[1])))
        for checkpoint, part, parameters in parts_of_source:
            found, left = planning.collect(checkpoint, part, parameters, weights)
            leaves += found
            for key, (count, size) in left.items():
                before = skipped.get(key, (0, 0))
                skipped[key] = before[0] + count, before[1] + size
        return planning.schedule(
            leaves, skipped, self.checkpoints, max_memory=max_memory, batch_bytes=batch_bytes, parts=parts
        )


def open_source(name: str, *, ignore: Sequence[str] = (), offline: bool = False) -> Source:
    """Open a checkpoint folder, or a hub repository (`owner/name`, `owner/name@revision`).

    Args:
      name: folder or repository.
      ignore: unknown keys of `config.json` to accept.
      offline: of a repository, take only what the local cache holds.

    Raises:
      ConversionError: something is missing, damaged, unknown or contradictory.
    """
    folder = _resolve(name, offline=offline)
    config = _config(folder / "config.json")
    if _is_drafter(config):
        return Source(name, folder, None, _drafter(folder, config, ignore))
    target = _target(folder, config, ignore)
    drafter = None
    if (bundled := _bundled_drafter(folder)) is not None:
        drafter = _drafter(bundled, _config(bundled / "config.json"), ignore)
        with _config_errors(bundled / "config.json"):
            drafter[1].check_target(target[1])
    return Source(name, folder, target, drafter)


def _resolve(name: str, *, offline: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if path.exists() or not match or name.startswith((".", "/", "~")):
        raise ConversionError(f"{name}: no such folder; SRC is a checkpoint folder or a hub repository owner/name")
    import huggingface_hub

    patterns = ["*.safetensors", "*.safetensors.index.json", *SIDECARS]
    patterns += [f"dspark/{p}" for p in patterns]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                match[1], revision=match[2], allow_patterns=patterns, local_files_only=offline
            )
        )
    except Exception as e:  # the client raises its own, requests', and OSErrors
        problem = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        remedy = "convert without --dry-run to download it" if offline else "check the name and the network"
        raise ConversionError(
            f"{name}: no such folder here, and the hub gave no repository of that name ({problem}); {remedy}"
        ) from e


def _bundled_drafter(folder: Path) -> Path | None:
    """The bundled drafter's folder, where there is one."""
    bundled = folder / "dspark"
    if bundled.exists() and not bundled.is_dir():
        raise ConversionError(f"{bundled} is a file and should be the drafter's folder; complete or remove it")
    return bundled if bundled.is_dir() else None


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConversionError(f"{path} is missing; a checkpoint folder holds its config.json")
    config = read_json(path)
    _check_quantization(config, path)
    return config


def _check_quantization(config: Mapping[str, Any], path: Path) -> None:
    """The formats come from the tensors; the config only must not announce one that is not known here."""
    text = config.get("text_config")
    entry = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if entry is None:
        return
    if not isinstance(entry, dict):
        raise ConversionError(f"{path}: quantization_config must be an object, found {entry!r}; correct the config")
    method = entry.get("quant_method")
    if method not in QUANT_METHODS:
        raise ConversionError(
            f"{path}: quantization_config.quant_method is {method!r}; known here: {', '.join(QUANT_METHODS)}"
        )
    if method == "mxfp8" and entry.get("weight_block_size", [1, 32]) != [1, 32]:
        raise ConversionError(
            f"{path}: quantization_config.weight_block_size is {entry['weight_block_size']}, but MXFP8 has [1, 32]; "
            "correct the config"
        )
    if method == "modelopt":
        layers = entry.get("quantized_layers") or {}
        if not isinstance(layers, dict):
            raise ConversionError(f"{path}: quantization_config.quantized_layers must be an object; correct the config")
        for where, layer in [("quant_algo", entry), *layers.items()]:
            known = MODELOPT_ALGORITHMS if layer is entry else MODELOPT_ALGORITHMS[1:]
            algorithm = layer.get("quant_algo") if isinstance(layer, dict) else layer
            if algorithm not in known:
                raise ConversionError(
                    f"{path}: quantization_config.{where} asks for {algorithm!r}; known here: {', '.join(known)}"
                )


def _is_drafter(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    names = config.get("architectures") or (text.get("architectures") if isinstance(text, dict) else None)
    return isinstance(names, list) and len(names) == 1 and names[0] in DRAFTER_ARCHITECTURES


def _target(folder: Path, config: dict[str, Any], ignore: Sequence[str]) -> tuple[Checkpoint, TargetConfig]:
    generation = folder / "generation_config.json"
    options = {"generation_config": read_json(generation) if generation.is_file() else None, "ignore": ignore}
    with _config_errors(folder / "config.json"):
        layers = TargetConfig.from_hf(config, **options).num_layers
    checkpoint = Checkpoint(folder)
    with _config_errors(folder / "config.json"):
        sparse = planning.sparse_layers(checkpoint, layers)
        return checkpoint, TargetConfig.from_hf(config, sparse_layers=sparse, **options)


def _drafter(folder: Path, config: dict[str, Any], ignore: Sequence[str]) -> tuple[Checkpoint, DrafterConfig]:
    with _config_errors(folder / "config.json"):
        parsed = DrafterConfig.from_hf(config, ignore=ignore)
    return Checkpoint(folder), parsed


class _config_errors:
    """Names the file in a `ConfigError`, which only knows its base name."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, ConfigError):
            text = re.sub(r"^(?:dspark/)?config\.json: ", "", str(error))
            raise ConversionError(f"{self.path}: {text}") from error


def describe(source: Source, fingerprint: str) -> dict[str, Any]:
    """The `source` entry of layout.json."""
    entry: dict[str, Any] = {
        "name": source.name if not os.path.isdir(source.name) else source.folder.resolve().name,
        "fingerprint": fingerprint,
        "tensors": sum(len(c.tensors) for c in source.checkpoints),
        "bytes": sum(c.nbytes for c in source.checkpoints),
    }
    for key, part in (("target", source.target), ("drafter", source.drafter)):
        if part:
            config = json.loads((part[0].folder / "config.json").read_bytes())
            entry[key] = {"architectures": config.get("architectures"), "shards": _shards(part[0])}
    return entry


def _shards(checkpoint: Checkpoint) -> int:
    return len({t.shard for t in checkpoint.tensors.values()})
