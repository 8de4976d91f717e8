"""The command line: what it prints, where, and with which exit status."""

import json
import re
import shutil
import subprocess
import sys

import generation_cases as cases
import golden
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dspark_jax as ds
from dspark_jax.commands import _common, demo, evaluate, generate, main

# Compiling is nearly all of the time of these tests, and most of it goes with the block size.
SMALL = dict(block_size=2)
TEMPLATE = "<user>{{ messages[0].content }}</user>"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return cases.write_source(tmp_path_factory.mktemp("toy") / "source", cases.toy(1, vocab_size=512, drafter=SMALL))


@pytest.fixture(scope="module")
def checkpoint(source, tmp_path_factory):
    return cases.convert(source, tmp_path_factory.mktemp("toy") / "ckpt")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Neither tokenizer nor drafter."""
    folder = tmp_path_factory.mktemp("bare")
    model = cases.toy(1, vocab_size=512, with_drafter=False)
    return cases.convert(cases.write_source(folder / "source", model, tokenizer=False), folder / "ckpt")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Compiled programs go to a folder of these tests, and the settings of the process come back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "dspark_jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX would go on writing to it: it asks for the setting once a process


@pytest.fixture
def call(capsys):
    """Run a command in this process -> exit status, stdout, stderr."""

    def go(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return go


def fails(result, message: str) -> bool:
    status, out, err = result
    return status == 1 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


# Help and arguments


def test_help_says_what_there_is(capsys):
    for arguments in ([], ["demo"], ["evaluate"], ["generate"], ["info"]):
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: python -m dspark_jax")
        if not arguments:
            assert all(name in text for name in ("demo", "evaluate", "generate", "info"))


def test_wrong_arguments_are_usage_errors(capsys, checkpoint):
    for arguments in (
        [],
        ["serve"],
        ["generate", str(checkpoint)],
        ["generate", str(checkpoint), "--prompt", "a", "--tokens", "1"],
        ["generate", str(checkpoint), "--prompt", "a", "--verify", "typical"],
        ["evaluate", str(checkpoint)],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert "usage:" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    arguments = [sys.executable, "-m", "dspark_jax", "info", "/nowhere"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: /nowhere is not a folder") and done.stderr.count("\n") == 1


# generate


SHORT = ("--max-new-tokens", 6, "--ignore-eos", "--compute-dtype", "float32")


def test_generate_prints_json(call, checkpoint, own_cache):
    status, out, err = call("generate", checkpoint, "--tokens", "1,2,3", *SHORT, "--json", "--seed", 4)
    assert (status, err) == (0, "")
    report = json.loads(out)
    (row,) = report["rows"]
    assert len(row["tokens"]) == 6 and row["finish_reason"] == "length"
    # The library with the same arguments gives the same tokens.
    model = ds.load(checkpoint, compute_dtype="float32")
    config = ds.GenerateConfig(max_new_tokens=6, stop_token_ids=())
    *_, last = ds.stream(model, [[1, 2, 3]], config=config, seeds=[4])
    assert row["tokens"] == np.asarray(last.generation.tokens)[0].tolist()
    assert row["text"] == ds.Tokenizer.load(checkpoint).decode(row["tokens"])
    assert report["stats"]["num_draft_tokens"] > 0
    assert any((own_cache / "xla").iterdir()), "compiled programs are kept"


def test_generate_streams_text(call, checkpoint, tmp_path):
    (tmp_path / "prompt.txt").write_text("for name in ", encoding="utf-8")
    status, out, err = call("generate", checkpoint, "--prompt", "for name in ", *SHORT)
    assert status == 0
    assert "6 tokens, finished by length" in err and "tokens/s" in err and "acceptance length" in err
    again = call("generate", checkpoint, "--prompt-file", tmp_path / "prompt.txt", *SHORT)
    assert again[:2] == (0, out)
    report = json.loads(call("generate", checkpoint, "--prompt", "for name in ", *SHORT, "--json")[1])
    assert out == report["rows"][0]["text"] + "\n"
    # Two prompts come one after the other when they are done, each with its number; the first is the same.
    status, both, _ = call("generate", checkpoint, "--prompt", "for name in ", "--prompt", "import", *SHORT)
    assert status == 0
    assert both.startswith(f"[0] {report['rows'][0]['text']}\n[1] ")


def test_generate_tells_prompts_from_what_follows(call, checkpoint):
    """Prompts are quoted on stderr, and stdout is the model's text alone."""
    status, out, err = call("generate", checkpoint, "--prompt", "for name in a:\n    b", *SHORT)
    assert status == 0 and err.startswith("> for name in a:\n>     b\n--- the model goes on\n")
    assert "> " not in out
    status, out, err = call("generate", checkpoint, "--tokens", "1,2", "--tokens", "3", *SHORT)
    assert status == 0 and err.startswith("> 1 2\n> 3\n") and out.startswith("[0] ")


def test_long_prompts_are_shown_by_their_end():
    assert _common.quoted("a\nb\nc", most=3) == "> a\n> b\n> c"
    assert _common.quoted("a\nb\nc", most=2) == "> ... 1 more line above ...\n> b\n> c"
    assert _common.quoted("a\nb\n\n", most=2) == "> ... 2 more lines above ...\n> \n> "


def test_speed_is_counted_from_when_everything_is_compiled(monkeypatch):
    times = iter([0.0, 10.0, 16.0, 17.0, 18.0])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(times))
    clock = generate._Clock()
    clock.tick(1)  # compiles the prompt's program
    clock.tick(8)  # and the step's
    assert (
        clock.describe()
        == "16.0 s to compile or load the programs and to read the prompt; too short a text to measure the speed"
    )
    clock.tick(4)
    clock.tick(6)
    # Ten tokens in the two seconds since; over everything they would be 19 in 18.
    assert clock.describe().endswith("; then 5.0 tokens/s over 2 steps")
    clock.events = [(10.0, 1), (16.0, 8), (18.0, 4)]
    assert clock.describe().endswith("; then 2.0 tokens/s over 1 step")


def test_generate_reads_files_of_prompts(call, checkpoint, bare, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "for name in "}\n{"tokens": [1, 2, 3], "note": "ids"}\n', encoding="utf-8")
    rows = json.loads(call("generate", checkpoint, "--prompt-file", file, *SHORT, "--json")[1])["rows"]
    alone = [
        json.loads(call("generate", checkpoint, *prompt, *SHORT, "--json", "--seed", seed)[1])["rows"][0]
        for seed, prompt in enumerate([("--prompt", "for name in "), ("--tokens", "1,2,3")])
    ]
    assert [r["tokens"] for r in rows] == [r["tokens"] for r in alone]
    # Mutant: the file taken for a text.
    as_text = call("generate", checkpoint, "--prompt", file.read_text(), *SHORT, "--json")[1]
    assert json.loads(as_text)["rows"][0]["tokens"] not in [r["tokens"] for r in rows]
    assert fails(call("generate", checkpoint, "--prompt-file", file, "--chat"), "has lines of tokens; leave --chat out")
    assert fails(call("generate", bare, "--prompt-file", file), "has no tokenizer.json")
    file.write_text('{"text": "a"}\n')
    assert fails(call("generate", checkpoint, "--prompt-file", file), 'prompts.jsonl:1 must be {"prompt": text}')


def test_generate_stops_at_texts(call, checkpoint):
    text = json.loads(call("generate", checkpoint, "--prompt", "for name in ", *SHORT, "--json")[1])["rows"][0]["text"]
    stop = text[2:4]
    arguments = ("--prompt", "for name in ", *SHORT, "--json", "--stop", stop)
    row = json.loads(call("generate", checkpoint, *arguments)[1])["rows"][0]
    assert row["text"] == text[: text.find(stop)] and row["finish_reason"] == "stop"


def test_generate_without_drafter_and_tokenizer(call, bare):
    status, out, err = call("generate", bare, "--tokens", "1 2 3", *SHORT, "--temperature", 0)
    assert status == 0 and len(out.split()) == 6 and "acceptance" not in err
    report = json.loads(call("generate", bare, "--tokens", "1 2 3", *SHORT, "--temperature", 0, "--json")[1])
    assert out.split() == [str(t) for t in report["rows"][0]["tokens"]]


def test_generate_uses_the_chat_template(call, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "ckpt")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chat = call("generate", folder, "--prompt", "hi", "--chat", *SHORT, "--json")
    plain = call("generate", folder, "--prompt", "<user>hi</user>", *SHORT, "--json")
    assert chat == plain and chat[0] == 0
    (folder / "chat_template.jinja").write_text("{% for")
    assert fails(call("generate", folder, "--prompt", "hi", "--chat", *SHORT), "chat template")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    assert fails(call("generate", folder, "--prompt", "hi", "--chat", *SHORT), "no system role")


def test_generate_errors_are_one_line(call, checkpoint, bare, tmp_path):
    def generate(*arguments, folder=checkpoint):
        return call("generate", folder, *arguments)

    assert fails(generate("--prompt", "a", "--chat"), "has no chat template; leave --chat out")
    assert fails(generate("--tokens", "1,2", "--chat"), "--chat needs text")
    assert fails(generate("--tokens", "1,x"), "--tokens must be integers separated by commas")
    assert fails(generate("--tokens", "1,512"), "prompt 0 holds token 512, outside the vocabulary of 512")
    assert fails(generate("--tokens", ",".join(["1"] * 129)), "prompt 0 has 129 tokens, the target's context holds 128")
    assert fails(generate("--prompt", "a", folder=bare), "has no tokenizer.json; give --tokens instead of text")
    assert fails(generate("--tokens", "1", "--stop", "x", folder=bare), "has no tokenizer.json")
    assert fails(
        generate("--tokens", "1", "--draft", "greedy", folder=bare), "needs a drafter and this checkpoint has none"
    )
    assert fails(generate("--prompt-file", tmp_path / "missing.txt"), "missing.txt")
    assert fails(generate("--prompt", "a", folder=tmp_path), "is not a converted checkpoint")
    assert fails(
        generate("--prompt", "a", "--num-draft-tokens", 0), "num_draft_tokens must be an integer of at least 1"
    )
    assert fails(generate("--prompt", "a", "--num-draft-tokens", 5), "exceeds the drafter's block size 2")
    assert fails(generate("--prompt", "a", "--max-new-tokens", 0), "max_new_tokens must be an integer of at least 1")
    assert fails(generate("--prompt", "a", "--temperature", -1), "temperature is -1.0")
    assert fails(generate("--prompt", "a", "--top-p", 0), "top_p is 0.0")
    assert fails(generate("--prompt", "a", "--seed", -1), "seed -1 is outside")
    assert fails(generate("--prompt", "a", "--confidence-threshold", 2), "confidence_threshold must be in")
    assert fails(generate("--prompt", "a", "--prompt", ""), "prompt 1 is empty")
    assert fails(generate("--prompt", "a", "--stop", ""), "stop_strings must be a list of texts that are not empty")


def test_a_damaged_checkpoint_is_one_line(call, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "ckpt")
    shutil.rmtree(folder / "arrays")
    status, out, err = call("generate", folder, "--tokens", "1", *SHORT)
    assert (status, out) == (1, "") and err.startswith("error: ")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the kernel may run")
def test_a_kernel_that_cannot_run_here_says_what_can(checkpoint):
    model = ds.load(checkpoint, compute_dtype="float32")
    tokens, lengths = ds.pad_prompts([[1, 2, 3]])

    def trace(implementation: str | None):
        config = ds.GenerateConfig(max_new_tokens=4, draft_attention=implementation)
        inputs = (model, tokens, lengths, ds.request_keys([0]), ds.SamplingParams())
        jax.eval_shape(lambda *a: ds.generate(*a, config=config), *inputs)

    remedy = "this call runs on cpu. None takes the best form that serves this call, and 'xla' runs on every device."
    with pytest.raises(NotImplementedError, match=re.escape(remedy)):
        trace("mosaic")
    for remedy in (None, "xla"):
        trace(remedy)


# info


def test_info_shows_geometry_formats_and_bytes(call, checkpoint, bare):
    status, out, err = call("info", checkpoint)
    assert (status, err) == (0, "")
    for text in ("format version 1, weights native", "vocab_size", "512", "drafter", "block_size", "bf16"):
        assert text in out
    assert "target/layers/0/attention/q_proj/weight" not in out
    assert "target/layers/0/attention/q_proj/weight" in call("info", checkpoint, "--arrays")[1]
    assert "drafter: none" in call("info", bare)[1]


def test_info_as_json_counts_parameters(call, checkpoint):
    report = json.loads(call("info", checkpoint, "--json")[1])
    toy = cases.toy(1, vocab_size=512, drafter=SMALL)
    for part, module in (("target", toy.target), ("drafter", toy.drafter)):
        leaves = jax.tree.leaves(module)
        formats = report[part]["formats"]
        assert sum(f["parameters"] for f in formats.values()) == sum(a.size for a in leaves)
        assert sum(f["bytes"] for f in formats.values()) == sum(a.nbytes for a in leaves)
    assert report["weights"] == "native" and report["drafter"]["config"]["block_size"] == 2


def test_info_counts_scales(call, tmp_path):
    folder = cases.convert(golden.DATA / "m3-nvfp4-modelopt-tiny", tmp_path / "ckpt")
    formats = json.loads(call("info", folder, "--json")[1])["target"]["formats"]
    leaves = jax.tree.leaves(golden.model("m3-nvfp4-modelopt-tiny"))
    assert {"mxfp8", "nvfp4", "bf16", "f32"} == set(formats)
    found, real = sum(f["bytes"] for f in formats.values()), sum(a.nbytes for a in leaves)
    # Global scales, four bytes a matrix, are not in the format's bytes per parameter.
    assert 0 <= real - found < 0.005 * real


def test_info_errors(call, tmp_path):
    assert fails(call("info", tmp_path), "is not a converted checkpoint")


# evaluate


def test_evaluate_measures_and_reports(call, checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "for name in "}\n\n{"tokens": [1, 2, 3]}\n', encoding="utf-8")
    report_file = tmp_path / "report.json"
    status, out, err = call(
        *("evaluate", checkpoint, "--prompts", prompts, "--num-draft-tokens", "1-2", "--verify", "block"),
        *("--draft", "ancestral", "--max-new-tokens", 8, "--passes", 2, "--compute-dtype", "float32"),
        *("--output", report_file, "--temperature", 2, "--top-p", 1),
    )
    assert (status, err) == (0, "")
    rows = json.loads(report_file.read_text())["rows"]
    expected = [(k, "ancestral", "block") for k in (1, 2)]
    assert [(r["num_draft_tokens_per_step"], r["draft"], r["verify"]) for r in rows] == expected
    for row in rows:
        histogram, steps = row["acceptance_histogram"], row["num_spec_steps"]
        accepted = sum(j * n for j, n in enumerate(histogram))
        assert sum(histogram) == steps > 0 and row["num_accepted_draft_tokens"] == accepted
        assert row["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert len(row["passes"]) == 2
        assert row["spread"] == pytest.approx(np.std(row["passes"], ddof=1))
        standard, block = (row["expected_acceptance_length"][m] for m in ("standard", "block"))
        assert 1 <= standard <= block + 1e-6 <= row["num_draft_tokens_per_step"] + 1 + 1e-6
        assert row["num_prompts"] == 2
        low, high = row["interval"]
        shown = (
            f"{row['num_draft_tokens_per_step']:>2} ancestral {row['verify']:<10}{row['mean_acceptance_length']:>7.3f} "
            f"{(high - low) / 2:>6.3f}{row['num_spec_steps']:>7}{2:>8}"
        )
        assert shown in out
    assert "2 prompts, 2 passes, 2 rows, 3 programs to compile" in out
    assert "Only 2 prompts" in out and "give 10 prompts or more" in out


def test_one_prompt_has_no_interval():
    row = dict(
        num_draft_tokens_per_step=1,
        draft="ancestral",
        verify="block",
        mean_acceptance_length=1.5,
        interval=[1.5, 1.5],
        num_spec_steps=8,
        num_prompts=1,
        expected_acceptance_length=dict(standard=1.5, block=1.5),
        acceptance_rate_per_position=[0.5],
    )
    assert "1.500      ?      8       1" in evaluate.line(row)
    assert "1.500  0.000      8       2" in evaluate.line(row | {"num_prompts": 2})


def test_evaluate_errors_are_one_line(call, checkpoint, bare, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [1, 2, 3]}\n')

    def evaluate_(*arguments, folder=checkpoint, file=prompts):
        return call("evaluate", folder, "--prompts", file, *arguments)

    assert fails(evaluate_(folder=bare), "has no drafter, so there is nothing to evaluate")
    assert fails(evaluate_("--num-draft-tokens", "5"), "asks for 5, the drafter's block size is 2")
    assert fails(evaluate_("--num-draft-tokens", "0-2"), "must name lengths of at least 1")
    assert fails(evaluate_("--num-draft-tokens", "x"), "must look like 7, 1,3,7 or 1-7")
    assert fails(evaluate_("--verify", "typical"), "--verify is 'typical'; known: block, standard, match")
    assert fails(evaluate_("--draft", "none"), "--draft is 'none'; known: ancestral, greedy")
    assert fails(evaluate_("--passes", 0), "must be at least 1")
    assert fails(evaluate_(file=tmp_path / "missing.jsonl"), "missing.jsonl")
    for line, message in (
        ('{"text": "a"}', 'prompts.jsonl:2 must be {"prompt": text} or {"tokens": [ids]}'),
        ("[1]", "prompts.jsonl:2 must be"),
        ('{"tokens": []}', "prompts.jsonl:2 is an empty prompt"),
        ("{", "prompts.jsonl:2 is not valid JSON"),
    ):
        prompts.write_text(f'{{"tokens": [1]}}\n{line}\n')
        assert fails(evaluate_(), message)
    prompts.write_text("\n")
    assert fails(evaluate_(), "holds no prompt")
    prompts.write_text('{"tokens": [512]}\n')
    status, _, err = evaluate_("--num-draft-tokens", "1")
    assert status == 1 and err == "error: prompt 0 holds token 512, outside the vocabulary of 512\n"
    prompts.write_text('{"tokens": ["a"]}\n')
    assert fails(
        evaluate_("--num-draft-tokens", "1"), "prompts.jsonl:1 must hold token ids, integers from 0, found ['a']"
    )
    prompts.write_text('{"tokens": [1]}\n')
    output = tmp_path / "missing" / "figures.json"
    assert fails(evaluate_("--num-draft-tokens", "1", "--output", output), f"there is no folder {output.parent}")


@pytest.mark.parametrize(
    ("text", "lengths"), [("7", [7]), ("1,3,7", [1, 3, 7]), ("1-3,7", [1, 2, 3, 7]), ("3,1-3", [1, 2, 3])]
)
def test_lists_of_lengths(text, lengths):
    assert evaluate.parse_lengths(text) == lengths


def test_combinations_of_modes_and_rules():
    pairs = [("ancestral", "block"), ("ancestral", "match"), ("greedy", "block"), ("greedy", "match")]
    assert evaluate.runs_of("ancestral,greedy", "block,match") == pairs
    assert evaluate.runs_of(None, "block") == [("ancestral", "block"), ("greedy", "block")]
    assert evaluate.runs_of(None, None) == [("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match")]
    assert evaluate.runs_of("greedy", None) == [("greedy", "match")]


# demo


@pytest.mark.slow
def test_demo_converts_and_generates(call, source, own_cache, monkeypatch):
    monkeypatch.setattr(demo, "BUNDLED", source)
    status, out, _ = call("demo", "--max-new-tokens", 4)
    assert status == 0
    assert "acceptance length" in out and "tokens/s" in out and "speculative / plain" in out
    assert [p.name for p in own_cache.iterdir() if p.name.startswith("demo-")] == [f"demo-{ds.__version__}"]


def test_demo_converts_when_it_must(source, tmp_path, monkeypatch, capsys):
    bundled = shutil.copytree(source, tmp_path / "source")
    monkeypatch.setattr(demo, "BUNDLED", bundled)
    folder = tmp_path / "cache" / "demo"

    def provided() -> str:
        demo._provide(folder, replace=True)
        assert [p.name for p in folder.parent.iterdir()] == ["demo"], "nothing is left beside it"
        assert ds.Layout.read(folder).target is not None
        return capsys.readouterr().out

    assert "$ python -m convert.minimax" in provided()
    assert provided() == f"found in {folder}\n"
    # Half a checkpoint, a damaged array, another bundled checkpoint: converted again.
    (folder / "layout.json").unlink()
    assert "$ python -m convert.minimax" in provided()
    victim = max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(data)
    assert "$ python -m convert.minimax" in provided()
    assert provided() == f"found in {folder}\n"
    config = json.loads((bundled / "config.json").read_text())
    config["text_config"]["rope_theta"] = 7777
    (bundled / "config.json").write_text(json.dumps(config))
    assert "$ python -m convert.minimax" in provided()
    assert ds.Layout.read(folder).target.rope_theta == 7777


def test_demo_does_not_take_away_a_folder_of_others(source, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BUNDLED", source)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="holds something else than the bundled checkpoint"):
        demo._provide(tmp_path, replace=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    demo._provide(tmp_path / "new", replace=False)
    (tmp_path / "new" / "dspark" / "config.json").unlink()
    with pytest.raises(OSError, match="holds something else"):
        demo._provide(tmp_path / "new", replace=False)
    assert (tmp_path / "new" / "arrays").is_dir()


def test_demo_says_what_failed(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BUNDLED", tmp_path)
    status, _, err = call("demo", "--folder", tmp_path / "out", "--max-new-tokens", 4)
    assert status == 1 and err.splitlines()[-1].startswith("error: the bundled checkpoint could not be converted")


@pytest.mark.slow
def test_demo_as_a_user_runs_it(tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "dspark_jax",
        "demo",
        "--max-new-tokens",
        "8",
        "--folder",
        str(tmp_path / "ckpt"),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "speculative / plain" in done.stdout
