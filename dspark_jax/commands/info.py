"""`python -m dspark_jax info CKPT`: what a converted checkpoint holds, read from its descriptions alone."""

import argparse
import collections
import dataclasses
import json
import math
from pathlib import Path

from dspark_jax._words import counted

# Bytes of one parameter, scales included.
_BYTES = {"bf16": 2.0, "f32": 4.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m convert.minimax` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--arrays", action="store_true", help="list every array")


def run(options: argparse.Namespace) -> int:
    """Run the command -> exit status."""
    from dspark_jax.checkpoint import Layout

    layout = Layout.read(options.checkpoint)
    parts: dict[str, dict[str, list]] = collections.defaultdict(dict)
    for path, entry in layout.arrays.items():
        size = math.prod(entry["shape"])
        total = parts[path.split("/")[0]].setdefault(entry["format"], [0, 0, 0.0])
        total[0] += 1
        total[1] += size
        total[2] += size * _BYTES[entry["format"]]
    configs = {"target": layout.target, "drafter": layout.drafter}
    if options.json:
        report = {
            name: {
                "config": dataclasses.asdict(config),
                "formats": {f: dict(arrays=a, parameters=n, bytes=round(b)) for f, (a, n, b) in parts[name].items()},
            }
            for name, config in configs.items()
            if config is not None
        }
        print(json.dumps(report | {"weights": layout.record["weights"], "skipped": layout.record.get("skipped", [])}))
        return 0
    print(f"{layout.path}  (format version {layout.record['format_version']}, weights {layout.record['weights']})")
    for name, config in configs.items():
        if config is None:
            print(f"\n{name}: none")
            continue
        print(f"\n{name}")
        for field, value in _geometry(config).items():
            print(f"  {field:<24}{value}")
        for kind, (arrays, parameters, size) in sorted(parts[name].items()):
            print(f"  {kind:<6}{arrays:>6} arrays {parameters / 1e6:>14,.3f} M parameters {size / 1e6:>14,.3f} MB")
    for entry in layout.record.get("skipped", []):
        print(f"\nskipped {counted(entry['count'], 'tensor') if 'count' in entry else 'tensors'}: {entry['reason']}")
    if options.arrays:
        print()
        for path, entry in layout.arrays.items():
            print(f"{entry['format']:<6} {entry['shape']!s:<22} {path}")
    return 0


def _geometry(config) -> dict[str, str]:
    """The config's fields, per-layer flags counted."""
    shown = {}
    for field, value in dataclasses.asdict(config).items():
        if isinstance(value, tuple) and value and isinstance(value[0], bool):
            value = f"{sum(value)} of {len(value)}"
        shown[field] = str(value)
    return shown
