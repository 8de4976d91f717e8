"""Tokenizers, chat templates, text that grows token by token."""

import json
import random

import pytest
import tokenizers

import dspark_jax as ds
from dspark_jax.commands.demo import BUNDLED
from dspark_jax.text import TextStream

TEMPLATE = """{{ bos_token }}{% for m in messages %}
<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def byte_tokenizer() -> ds.Tokenizer:
    """One token a byte, so that characters and stop strings are split in every way; token 256 is special."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    # The alphabet's order is that of code points; id i must be byte i.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert sorted(char.values()) == sorted(alphabet)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={char[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return ds.Tokenizer(backend=backend)


@pytest.fixture(scope="module")
def by_bytes() -> ds.Tokenizer:
    return byte_tokenizer()


def test_the_byte_tokenizer_is_one(by_bytes):
    text = "añb €😀 \n"
    assert by_bytes.encode(text) == list(text.encode())
    assert by_bytes.decode([*text.encode(), 256]) == text


# Text that grows


TEXTS = (
    "plain words and  spaces\n",
    "añb",
    "€uro and 😀😀 faces, ÷ signs",
    "日本語のテキストはトークンの境界をまたぐ。" * 4,
    "long enough to be decoded in several pieces: " + "x y z " * 30,
)


def pieces(stream: TextStream, tokens: list[int], sizes: random.Random) -> list[str]:
    found, start = [], 0
    while start < len(tokens):
        end = min(len(tokens), start + sizes.randint(1, 8))
        found.append(stream.feed(tokens[start:end], last=end == len(tokens)))
        start = end
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bundled", [False, True], ids=["bytes", "bundled tokenizer"])
def test_pieces_join_to_the_text_whatever_the_steps(by_bytes, text, bundled):
    tokenizer = ds.Tokenizer.load(BUNDLED) if bundled else by_bytes
    tokens = tokenizer.encode(text)
    for seed in range(10):
        found = pieces(TextStream(tokenizer), tokens, random.Random(seed))
        assert "".join(found) == text
        # No piece ever shows a character that was not complete.
        assert "�" not in "".join(found)


def test_an_unfinished_character_waits(by_bytes):
    stream = TextStream(by_bytes)
    first, *rest = list("😀".encode())
    assert stream.feed([ord("a"), first], last=False) == "a"
    assert [stream.feed([b], last=False) for b in rest] == ["", "", "😀"]
    # Mutant: decoding each step alone gives replacement characters.
    assert by_bytes.decode([first]) + by_bytes.decode(rest) != "😀"


def test_bytes_that_never_become_a_character_come_out_at_the_end(by_bytes):
    stream = TextStream(by_bytes)
    assert stream.feed([ord("a"), 0xF0, 0x9F], last=False) == "a"
    assert stream.feed([], last=True).startswith("�")
    stream = TextStream(by_bytes)
    assert stream.feed([0xF0, 0x9F], last=False) == ""
    assert stream.feed([ord("b")], last=False).endswith("b")


def test_special_tokens_are_not_text(by_bytes):
    stream = TextStream(by_bytes)
    assert stream.feed([*b"ab", 256, *b"c"], last=True) == "abc"


@pytest.mark.parametrize("stops", [("END",), ("EE", "END"), ("ND", "€")])
def test_stop_strings_across_any_step_border(by_bytes, stops):
    text = "some ENough text, E then END and more € behind " + "tail " * 10
    cut = text[: min(text.find(s) for s in stops if s in text)]
    tokens = by_bytes.encode(text)
    for seed in range(20):
        stream = TextStream(by_bytes, stops)
        found = pieces(stream, tokens, random.Random(seed))
        assert "".join(found) == cut and stream.stopped
        assert stream.feed(tokens, last=False) == "", "nothing follows a stop"
    # Mutant: looking for the string in each piece alone misses it in single steps.
    assert not any(s in by_bytes.decode([t]) for s in stops if len(s) > 1 for t in tokens)


def test_what_may_become_a_stop_string_is_held_back_and_released(by_bytes):
    stream = TextStream(by_bytes, ("END",))
    assert stream.feed(list(b"xE"), last=False) == "x"
    assert stream.feed(list(b"N"), last=False) == ""
    assert stream.feed(list(b"O"), last=False) == "ENO"
    assert stream.feed(list(b"EN"), last=False) == ""
    assert stream.feed([], last=True) == "EN" and not stream.stopped
    # The earliest stop wins, also when a longer one ends first.
    both = TextStream(by_bytes, ("bc", "abcd"))
    assert both.feed(list(b"xabcd"), last=True) == "x"


def test_a_stop_string_in_the_last_tokens_is_a_stop(by_bytes):
    stream = TextStream(by_bytes, ("END",))
    assert stream.feed(list(b"aEN"), last=False) == "a"
    assert stream.feed(list(b"D"), last=True) == "" and stream.stopped


# Tokenizer folders and chat templates


@pytest.fixture
def folder(tmp_path, by_bytes):
    (tmp_path / "tokenizer.json").write_text(by_bytes.backend.to_str(), encoding="utf-8")
    return tmp_path


def write(folder, **config) -> ds.Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return ds.Tokenizer.load(folder)


MESSAGES = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
RENDERED = "<s><system>be brief</system>\n<user>hi</user>\n<assistant>"


def test_chat_templates_are_found_where_checkpoints_keep_them(folder):
    in_config = write(folder, chat_template=TEMPLATE, bos_token={"content": "<s>", "lstrip": False})
    assert in_config.chat(MESSAGES) == RENDERED
    named = write(
        folder,
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}],
        bos_token="<s>",
    )
    assert named.chat(MESSAGES) == RENDERED
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json{{ bos_token }}"}))
    assert write(folder, chat_template=TEMPLATE, bos_token="<s>").chat(MESSAGES) == "json<s>"
    (folder / "chat_template.jinja").write_text("jinja{{ bos_token }}")
    assert write(folder, chat_template=TEMPLATE, bos_token="<s>").chat(MESSAGES) == "jinja<s>"


def test_templates_have_what_published_ones_use(by_bytes):
    def render(source: str, **variables) -> str:
        return ds.Tokenizer(backend=by_bytes.backend, chat_template=source).chat(MESSAGES, **variables)

    assert render("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "system"
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render("{{ tools | tojson(indent=1, ensure_ascii=True) }}", tools=["é"]) == '[\n "\\u00e9"\n]'
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    # Lines that hold a block only leave no trace.
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for",
        "{{ nothing.at_all }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_templates_that_fail_or_reach_out_are_one_sentence(by_bytes, source):
    tokenizer = ds.Tokenizer(backend=by_bytes.backend, chat_template=source)
    with pytest.raises(ValueError, match="chat template") as error:
        tokenizer.chat(MESSAGES)
    assert "\n" not in str(error.value)
    if "raise_exception" in source:
        assert "roles must alternate" in str(error.value)


def test_what_a_folder_lacks_is_said(folder, by_bytes):
    with pytest.raises(ds.CheckpointError, match="has no chat template; leave --chat out"):
        ds.Tokenizer.load(folder).chat(MESSAGES)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ds.CheckpointError, match=r"has no tokenizer\.json; pass token ids instead of text"):
        ds.Tokenizer.load(folder)


def test_encoding_adds_nothing(folder):
    tokenizer = write(folder, bos_token="<eos>", add_bos_token=True)
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.encode("<eos>") == [256]
    assert tokenizer.special_tokens == {"bos_token": "<eos>"}
