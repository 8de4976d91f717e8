"""A conversion in a process of its own that kills itself with SIGKILL at a chosen point and logs where it was.

    python kill_child.py SRC DST OPTIONS LOG EVENT COUNT DELAY

Kills DELAY seconds after the COUNT-th EVENT of this process has begun; EVENT "never" lets it finish.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from convert import conversion, writer


def main(source: str, destination: str, options: str, log: str, event: str, count: str, delay: str) -> None:
    seen: Counter[str] = Counter()

    def say(text: str) -> None:
        with open(log, "a") as f:
            f.write(f"{os.getpid()} {time.monotonic():.4f} {text}\n")

    def kill() -> None:
        say("SIGKILL")
        os.kill(os.getpid(), signal.SIGKILL)

    def at(name: str, what: str = "") -> None:
        seen[name] += 1
        say(f"{name} {what}".rstrip())
        if name == event and seen[name] == int(count):
            if float(delay):
                threading.Timer(float(delay), kill).start()
            else:
                kill()

    def hook(owner: object, attribute: str, name: str, describe) -> None:
        right = getattr(owner, attribute)

        def wrapped(*args, **kwargs):
            at(name, describe(*args))
            result = right(*args, **kwargs)
            say(f"{name} done")
            return result

        setattr(owner, attribute, wrapped)

    hook(writer.ocp.partial, "save", "save", lambda path, tree: Path(path).parent.name)
    hook(writer, "_merge", "merge", lambda batches, into: "")
    hook(writer.ocp.partial, "finalize", "finalize", lambda path: "")
    hook(writer.Writer, "publish", "publish", lambda self: "")
    remove, right = writer.shutil.rmtree, writer.os.rename

    def rmtree(path, **options):
        if Path(path).name.endswith(".partial"):
            at("clean")
        remove(path, **options)

    writer.shutil.rmtree = rmtree

    def rename(old, new):
        if Path(old).parent.name == "batches":
            at("rename", Path(old).name)
        right(old, new)

    writer.os.rename = rename
    conversion.convert(source, Path(destination), conversion.Options(**json.loads(options)))
    say("finished")


if __name__ == "__main__":
    main(*sys.argv[1:])
