"""Text in and text out: the checkpoint's tokenizer and chat template."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dspark_jax.checkpoint import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      backend: the fast tokenizer of `tokenizer.json`.
      chat_template: Jinja source, or None.
      special_tokens: names that templates refer to (bos_token, eos_token, ...) and their text.
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read tokenizer.json, and the template of chat_template.jinja or tokenizer_config.json, from a folder.

        Raises:
          CheckpointError: no folder, or one without tokenizer.json.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; name one that holds tokenizer.json")
        if not file.is_file():
            raise CheckpointError(f"{path} has no tokenizer.json; pass token ids instead of text")
        config = _json(path / "tokenizer_config.json")
        template = config.get("chat_template")
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        elif (path / "chat_template.json").is_file():
            template = _json(path / "chat_template.json").get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        return cls(
            backend=tokenizers.Tokenizer.from_file(str(file)),
            chat_template=template if isinstance(template, str) else None,
            special_tokens={k: v for k, v in special.items() if isinstance(v, str)},
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added to it."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens left out."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The checkpoint's chat template over `messages` ({"role", "content"}), up to where the answer begins.

        Raises:
          CheckpointError: the checkpoint has no chat template, or the template fails on these messages.
        """
        from jinja2 import TemplateError

        if self.chat_template is None:
            raise CheckpointError("the checkpoint has no chat template; leave --chat out and write the prompt in full")
        values = {"add_generation_prompt": True, **self.special_tokens, **variables}
        try:
            return _compile_template(self.chat_template).render(messages=list(messages), **values)
        except TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template failed: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@functools.cache
def _compile_template(source: str):
    # A template comes with a download: the sandbox keeps it from reaching Python objects.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str):
        raise ValueError(f"the chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes for HTML, which templates written for language models do not expect.
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


class TextStream:
    """Turns tokens into text piece by piece, holding back what later tokens may still change or cut.

    Held back: bytes of an unfinished character, and an end that may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        self.tokenizer, self.stop_strings = tokenizer, tuple(stop_strings)
        self.tokens: list[int] = []
        self.shown = ""
        self.stopped = False
        # Tokens before `_start` are decoded for good; decoding starts a little earlier to keep spaces right.
        self._start, self._context, self._done = 0, 0, ""

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        """-> text that is now certain. `last`: nothing follows, so nothing is held back. Stops at a stop string."""
        if self.stopped:
            return ""
        self.tokens.extend(tokens)
        text = self._done + self._tail()
        if not last and text.endswith("\ufffd"):
            text = text.rstrip("\ufffd")  # an unfinished character
        elif len(self.tokens) - self._start > 16:
            self._advance(text)
        found = [i for i in (text.find(s, max(0, len(self.shown) - len(s))) for s in self.stop_strings) if i >= 0]
        if found:
            self.stopped, text = True, text[: min(found)]
        elif not last:
            text = text[: len(text) - self._held(text)]
        new = text[len(self.shown) :]
        self.shown += new
        return new

    def _tail(self) -> str:
        context = self.tokenizer.decode(self.tokens[self._context : self._start])
        return self.tokenizer.decode(self.tokens[self._context :])[len(context) :]

    def _advance(self, text: str) -> None:
        self._done, self._context, self._start = text, max(0, len(self.tokens) - 4), len(self.tokens)

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self.stop_strings), default=0) - 1
        return next(
            (
                n
                for n in range(min(longest, len(text)), 0, -1)
                if any(s.startswith(text[-n:]) for s in self.stop_strings)
            ),
            0,
        )
