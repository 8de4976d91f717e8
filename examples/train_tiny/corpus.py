"""The corpus, the Python standard library's own sources, and a byte-level BPE of them."""

import dataclasses
import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
import tokenizers
from settings import END_OF_TEXT, END_OF_TEXT_ID, MASK
from tokenizers import decoders, models, pre_tokenizers, trainers

# Generated tables and texts that are not code.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages encodings pydoc_data lib-dynload ensurepip".split()
)
# A file of which less than this share is letters, underscores, blanks and line ends is a table of data.
_TEXT_SHARE = 0.72
# One file in about this many is held out.
_HELD_OUT = 20
# Newlines with the indent behind them, words with the blank before, up to three digits, the rest of the symbols.
_PATTERN = r"\n+[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+"


@dataclasses.dataclass(frozen=True)
class Document:
    """One source file; `held_out` files are in no training."""

    path: str
    text: str
    held_out: bool


def standard_library() -> Path:
    """Sources of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(folder: Path, *, most_bytes: int | None = None) -> list[Document]:
    """Every distinct UTF-8 .py file of `folder` that is code, by path; held out or not by a hash of the path.

    `most_bytes` ends the reading early; the files are then a draw by the same hash.

    Raises:
      ValueError: the folder holds no such file.
    """
    documents, seen, size = [], set(), 0
    relatives = sorted((f.relative_to(folder) for f in folder.rglob("*.py")), key=lambda f: f.as_posix())
    if most_bytes is not None:
        relatives.sort(key=lambda f: _digest(f.as_posix())[::-1])
    for relative in relatives:
        if _SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = (folder / relative).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not text.strip() or END_OF_TEXT in text or MASK in text:
            continue
        seen.add(digest)
        if sum(text.count(c) for c in _TEXT_CHARACTERS) < _TEXT_SHARE * len(text):
            continue
        path = relative.as_posix()
        documents.append(Document(path, text, _is_held_out(path)))
        size += len(text)
        if most_bytes is not None and size >= most_bytes:
            break
    if not any(d.held_out for d in documents) or all(d.held_out for d in documents):
        raise ValueError(f"{folder} holds too few .py files of code to train on and to hold some out")
    return sorted(documents, key=lambda d: d.path)


_TEXT_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_ \n"


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def _is_held_out(path: str) -> bool:
    return int.from_bytes(_digest(path)[:8], "big") % _HELD_OUT == 0


def train_tokenizer(documents: list[Document], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of the documents that are not held out: it decodes to exactly what was encoded."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents if not d.held_out), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives only {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def encode(documents: list[Document], tokenizer: tokenizers.Tokenizer) -> dict[str, np.ndarray]:
    """Token streams "train" and "held_out" (uint16), an end-of-text token before every file and at the end."""
    streams = {}
    for name, held_out in (("train", False), ("held_out", True)):
        texts = [d.text for d in documents if d.held_out == held_out]
        parts = []
        for ids in (e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)):
            parts += [np.array([END_OF_TEXT_ID], np.uint16), np.array(ids, np.uint16)]
        streams[name] = np.concatenate([*parts, np.array([END_OF_TEXT_ID], np.uint16)])
    return streams


def token_bytes(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Bytes that each token stands for, int32 [V]; 0 for the special ones. One letter of the alphabet is one byte."""
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, i in tokenizer.get_vocab().items():
        sizes[i] = 0 if token in (END_OF_TEXT, MASK) else len(token)
    return sizes


def describe(documents: list[Document], streams: dict[str, np.ndarray], folder: Path) -> dict[str, object]:
    """What the corpus is, for the log."""
    kept = [d for d in documents if not d.held_out]
    return {
        "folder": str(folder),
        "python": sys.version.split()[0],
        "files": len(documents),
        "held_out_files": len(documents) - len(kept),
        "train_bytes": sum(len(d.text.encode()) for d in kept),
        "held_out_bytes": sum(len(d.text.encode()) for d in documents if d.held_out),
        "train_tokens": len(streams["train"]),
        "held_out_tokens": len(streams["held_out"]),
    }
