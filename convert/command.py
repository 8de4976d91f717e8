"""What the two command lines share: sizes as arguments, and errors as sentences and exit statuses."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from convert.errors import ConversionError
from convert.sizes import parse_bytes


def size_argument(text: str) -> int:
    """A size of the command line in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def carry_out(work: Callable[[], None], destination: Path, *, interrupted: str) -> int:
    """Do `work` -> exit status; what stops it is told on stderr, and `interrupted` after Ctrl-C."""
    if "jax" not in sys.modules:
        # Nothing is computed on a device; do not take the memory of one.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # A failed read is one sentence, not the traceback of every array that was being read beside it.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        work()
    except ConversionError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or destination}: {e.strerror or e}; correct that and try again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return 130
    return 0
