"""Cut prompts out of the files of the standard library that no training sees (see examples/train_tiny/corpus.py).

    python examples/acceptance/held_out.py --out examples/acceptance/held_out.jsonl

Each prompt begins at a function or class and ends with the last character of a line; it names its file, line and
Python version. The newline is left to the model: with the next line's indentation it is one token, and a newline alone
says that no indented line follows. The standard library differs between patch versions, so the prompts are committed
and not cut anew.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

import tokenizers

sys.path.insert(0, str(Path(__file__).parent.parent / "train_tiny"))
import corpus  # the split is the training's

TOKENIZER = Path(__file__).parent.parent.parent / "dspark_jax" / "assets" / "tiny" / "tokenizer.json"
SHORTEST, LONGEST = 64, 256
_START = re.compile(r"( {4})?(async def|def|class|@)\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--library", type=Path, default=corpus.standard_library(), help="default: this interpreter's")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="default: the bundled checkpoint's")
    parser.add_argument("--count", type=int, default=256, help="prompts to cut; default 256")
    options = parser.parse_args()
    tokenizer = tokenizers.Tokenizer.from_file(str(options.tokenizer))
    documents = [d for d in corpus.read_documents(options.library) if d.held_out]
    queues = [spread(cut(d.path, d.text, tokenizer)) for d in documents]
    prompts = []
    while len(prompts) < options.count and any(queues):  # a prompt from each file in turn: long files do not dominate
        prompts += [queue.pop(0) for queue in queues if queue]
    if len(prompts) < options.count:
        raise SystemExit(f"{options.library} gives only {len(prompts)} prompts, {options.count} were asked for")
    prompts = sorted(prompts[: options.count], key=lambda p: (p["file"], p["line"]))
    version = sys.version.split()[0]
    lines = [json.dumps(p | {"python": version}, ensure_ascii=False) + "\n" for p in prompts]
    options.out.write_text("".join(lines), encoding="utf-8")
    sizes = sorted(len(tokenizer.encode(p["prompt"], add_special_tokens=False).ids) for p in prompts)
    print(
        f"{len(prompts)} prompts of {sizes[0]} to {sizes[-1]} tokens (median {sizes[len(sizes) // 2]}) "
        f"from {len({p['file'] for p in prompts})} held-out files"
    )


def cut(path: str, text: str, tokenizer: tokenizers.Tokenizer) -> list[dict]:
    """Prompts of a file, none overlapping another, each as long as a hash of its place says."""
    lines = text.splitlines(keepends=True)
    prompts, free = [], 0
    for start, line in enumerate(lines):
        if start < free or not _START.match(line):
            continue
        digest = hashlib.sha256(f"{path}:{start}".encode()).digest()
        wanted = SHORTEST + int.from_bytes(digest[:4], "big") % (LONGEST - SHORTEST + 1)
        end, size = start, 0
        while end < len(lines):
            text = "".join(lines[start : end + 1]).rstrip()
            longer = len(tokenizer.encode(text, add_special_tokens=False).ids)
            if longer > wanted:
                break
            end, size = end + 1, longer
        if size >= SHORTEST:
            prompts.append({"file": path, "line": start + 1, "prompt": "".join(lines[start:end]).rstrip()})
            free = end
    return prompts


def spread(items: list) -> list:
    """The same items, so ordered that every beginning of the list is spread over the whole of it."""
    order = sorted(range(len(items)), key=lambda i: f"{i:032b}"[::-1])
    return [items[i] for i in order]


if __name__ == "__main__":
    main()
