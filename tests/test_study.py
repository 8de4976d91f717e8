"""The scripts of examples/acceptance: the study of a toy, its pictures, and the cutting of prompts."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import generation_cases as cases
import jax
import numpy as np
import pytest
import tokenizers

import dspark_jax as ds
from dspark_jax import measurement_programs

FOLDER = Path(__file__).parent.parent / "examples" / "acceptance"


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"acceptance_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        spec.loader.exec_module(module)
    return module


class Unoptimised(measurement_programs.Programs):
    """Orders count; what runs has been compiled without optimising."""

    def order(self, arguments, config):
        self._made[jax.tree.structure(arguments), config] = None

    def __call__(self, *arguments, config):
        assert (jax.tree.structure(arguments), config) in self._made, "ordered before it runs"
        return cases.run(*arguments, config=config)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict:
    """The quick study of a toy, read back from its file."""
    folder = tmp_path_factory.mktemp("study")
    toy = cases.toy(1, vocab_size=512, drafter=dict(block_size=2))
    checkpoint = cases.convert(cases.write_source(folder / "source", toy), folder / "ckpt")
    lines = [json.dumps({"tokens": [1 + i, 2, 3][: 1 + i % 3]}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    module = script("study")
    arguments = [str(checkpoint), "--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "study.json")]
    arguments += ["--quick", "--max-new-tokens", "12", "--windows", "3", "--batch-size", "4", "--temperature", "2"]
    arguments += ["--also", f"the same={checkpoint}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["study.py", *arguments])
        patch.setattr(module, "Programs", Unoptimised)
        module.main()
    return json.loads((folder / "study.json").read_text())


def test_the_study_has_every_setting(study):
    found = [(c["variant"], c["k"], c["draft"], c["verify"], c["top_p"]) for c in study["cells"]]
    runs = (("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match"))
    expected = [("as trained", k, *run, 0.95) for k, run in itertools.product((1, 2), runs)]
    expected += [(v, 2, *runs[0], 0.95) for v in ("causal block", "Markov zeroed", "window 3", "the same")]
    unfiltered = [("as trained", 2, "ancestral", v, 1.0) for v in ("block", "standard")]
    assert found == [*expected, *unfiltered]
    assert set(study["calibration"]) == {"top_p 0.95", "top_p 1"}
    assert all(len(slots) == 2 for slots in study["calibration"].values())
    assert study["command"].startswith("python examples/acceptance/study.py ")
    assert study["settings"]["seeds"] == [0, 5]
    entropies = study["target_entropy_nats"]
    assert list(entropies) == ["top_p 0.95", "top_p 1"]
    assert all(e["sampled"]["mean"] > 0 for e in entropies.values())
    # Sampled at temperature 2, without a filter: any law is flatter there than at temperature 1.
    assert entropies["top_p 1"]["sampled"]["mean"] > entropies["top_p 1"]["unfiltered"]["mean"]


def test_differences_are_those_of_the_cells(study):
    lengths = {
        (c["variant"], c["k"], c["draft"], c["verify"]): c["mean_acceptance_length"] for c in study["cells"][:-2]
    }
    top = lengths["as trained", 2, "ancestral", "block"]
    expected = {
        ("ancestral/block - greedy/match", 2): top - lengths["as trained", 2, "greedy", "match"],
        ("as trained - causal block", 2): top - lengths["causal block", 2, "ancestral", "block"],
        ("as trained - the same", 2): 0.0,  # the same drafter, prompts and seeds
        ("ancestral/block - ancestral/standard", 1): 0.0,  # the rules are one for one draft
    }
    found = {(d["name"], d["k"]): d for d in study["differences"]}
    for key, mean in expected.items():
        assert found[key]["mean"] == pytest.approx(mean, abs=2e-4)
        low, high = found[key]["interval"]
        assert low <= found[key]["mean"] <= high
    assert found["as trained - the same", 2]["interval"] == [0, 0]


def test_the_file_is_small_and_can_be_compared_by_line(study):
    text = script("study").dumps(study)
    assert json.loads(text) == study and len(text) < 30_000
    assert text.count('\n  {"variant"') == len(study["cells"])


def test_tables_of_the_study(study):
    lines = script("tables").lines(study)
    assert lines[0] == "| drafts a step | ancestral, block | ancestral, standard | greedy, match |"
    assert lines[4:6] == ["", "| as trained | causal block | Markov zeroed | window 3 | the same |"]
    top = next(c for c in study["cells"] if (c["k"], c["verify"]) == (2, "block"))
    shown = f"{top['mean_acceptance_length']:.2f} ± {(top['interval'][1] - top['interval'][0]) / 2:.2f}"
    assert lines[3].startswith(f"| 2 | {shown} |") and lines[7].startswith(f"| {shown} |")
    assert len({line.count("|") for line in lines[:4]}) == len({line.count("|") for line in lines[5:]}) == 1


def test_the_readme_quotes_the_committed_study():
    committed = json.loads((FOLDER / "study.json").read_text(encoding="utf-8"))
    readme = (FOLDER.parent.parent / "README.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in script("tables").lines(committed) if line not in readme]
    assert not missing


def test_pictures_of_the_study(study, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the pictures need the extra `examples`")
    (tmp_path / "study.json").write_text(json.dumps(study))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path / "study.json"), "--out", str(tmp_path / "figures")])
    script("plots").main()
    files = sorted((tmp_path / "figures").iterdir())
    assert [f.name for f in files] == ["ablations.png", "calibration.png", "length.png", "positions.png"]
    assert all(5_000 < f.stat().st_size < 200_000 for f in files)


# Prompts


def test_prompts_are_of_held_out_files_and_of_the_right_length(tmp_path, monkeypatch):
    module = script("held_out")
    library = tmp_path / "library"
    library.mkdir()
    names = [f"module_{i}.py" for i in range(60)]
    for i, name in enumerate(names):
        functions = [f"def function_{j}(value):\n" + "    value = value + 1\n" * (4 + j) for j in range(30)]
        (library / name).write_text(f"# file {i}\n" + "\n\n".join(functions))
    held_out = {d.path for d in module.corpus.read_documents(library) if d.held_out}
    out = tmp_path / "prompts.jsonl"
    tokenizer = ds.Tokenizer.load(cases.golden.DATA / "tokenizer")
    arguments = ["--library", str(library), "--out", str(out), "--count", "12"]
    arguments += ["--tokenizer", str(cases.golden.DATA / "tokenizer" / "tokenizer.json")]
    monkeypatch.setattr(sys, "argv", ["held_out.py", *arguments])
    module.main()
    prompts = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(prompts) == 12 and {p["file"] for p in prompts} == held_out
    for p in prompts:
        lines = (library / p["file"]).read_text().splitlines(keepends=True)
        assert "".join(lines[p["line"] - 1 :]).startswith(p["prompt"] + "\n")
        assert 64 <= len(tokenizer.encode(p["prompt"])) <= 256
    first = out.read_bytes()
    module.main()
    assert out.read_bytes() == first


def test_the_committed_prompts_are_of_held_out_files():
    corpus = script("held_out").corpus
    prompts = [json.loads(line) for line in (FOLDER / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(prompts) >= 200
    assert all(corpus._is_held_out(p["file"]) for p in prompts)
    tokenizer = tokenizers.Tokenizer.from_file(str(script("held_out").TOKENIZER))
    assert all(p["prompt"] == p["prompt"].rstrip() for p in prompts)  # no newline without the indentation behind it
    sizes = np.asarray([len(tokenizer.encode(p["prompt"], add_special_tokens=False).ids) for p in prompts])
    assert sizes.min() >= 64 and sizes.max() <= 256
