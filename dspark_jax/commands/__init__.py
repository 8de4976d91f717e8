"""The command line: one module a command, each with `add_arguments` and `run`."""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": "convert the bundled tiny checkpoint and generate from it, with and without speculation",
    "evaluate": "measure acceptance by draft length, drafting mode and verification rule",
    "generate": "continue prompts with a converted checkpoint",
    "info": "show geometry, formats and bytes of a converted checkpoint",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command -> exit status. Expected errors are one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_jax", description="MiniMax-M3 and its DSpark drafter in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in _COMMANDS.items():
        module = importlib.import_module(f"dspark_jax.commands.{name}")
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    # A failed read is one sentence, not the traceback of every array that was being read beside it.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        return options.run(options)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has enough of it
        return 0
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
