"""Convert a MiniMax-M3 / M3.1-Flash checkpoint, its DSpark drafter, or a drafter alone, for dspark_jax.

SRC is a folder with config.json and safetensors shards in bf16, MXFP8 or NVFP4 (or a mixture), or a hub repository
(owner/name or owner/name@revision). DST becomes a folder with the configurations, the tokenizer, layout.json, and
arrays/, one Orbax checkpoint. Until it is complete, everything lies in DST.partial.

  python -m convert.minimax MiniMax-M3.1-Flash/ ckpt/
  python -m convert.minimax MiniMax-M3.1-Flash/ ckpt/ --dry-run   # what would be written, from headers alone
  python -m convert.minimax MiniMax-M3.1-Flash/ ckpt/ --resume    # go on after an interruption
  python -m convert.minimax MiniMax-M3.1-Flash/ ckpt/ --verify    # also compare the result with the source
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convert.command import carry_out, size_argument
from convert.conversion import Options, convert, make_plan, summary
from convert.layout import describe_plan


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m convert.minimax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("source", metavar="SRC", help="checkpoint folder, or hub repository owner/name[@revision]")
    result.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not exist or be empty")
    result.add_argument(
        "--weights",
        choices=("native", "bf16"),
        default="native",
        help="native keeps quantised codes and scales as they are; bf16 dequantises them (default: native)",
    )
    result.add_argument("--dry-run", action="store_true", help="print what would be written and stop")
    result.add_argument(
        "--resume",
        action="store_true",
        help="go on with the unfinished conversion in DST.partial; what came from a shard whose size or time has "
        "changed is written again, and a finished DST is compared by headers and samples (--verify: by every byte)",
    )
    result.add_argument(
        "--verify",
        action="store_true",
        help="re-read the result and compare every array with SRC, before DST appears; a finished DST is only verified",
    )
    result.add_argument(
        "--max-memory",
        type=size_argument,
        default="8GiB",
        metavar="SIZE",
        help="bound on anonymous memory; bigger stacks of experts are split (default: 8GiB)",
    )
    result.add_argument(
        "--ignore-config-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accept this unknown key of config.json, which does not change the result (may be repeated)",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status."""
    args = parser().parse_args(argv)
    options = Options(
        weights=args.weights,
        resume=args.resume,
        verify=args.verify,
        max_memory=args.max_memory,
        ignore=tuple(args.ignore_config_key),
    )

    def work() -> None:
        if args.dry_run:
            print(describe_plan(make_plan(args.source, options)))
        else:
            print(summary(convert(args.source, args.destination, options)))
            print(f"done: {args.destination}")

    partial = f"{args.destination}.partial"
    return carry_out(work, args.destination, interrupted=f"go on with --resume, or delete {partial}")


if __name__ == "__main__":
    sys.exit(main())
