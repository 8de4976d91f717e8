"""Each wrong implementation of data/mutants.md, on each checkpoint it applies to, fails where the right one passes.

The largest logit difference that a mutant causes must also be the one that an independent float64 forward found for
it: then the mutant is the mistake that was meant, and the rest of the library is right under it too.
"""

import golden
import numpy as np
import pytest
from golden import CHECKPOINTS, TOLERANCE, Cell
from target_mutants import MUTANTS, run_op_by_op

# Agreement with the listed difference: numbers are printed with three or four digits, and both sides carry float32
# noise. The residual of the reference is 5.4e-5 in a logit; two of them and ours make 1e-4.
LISTED_RELATIVE, LISTED_ABSOLUTE = 0.02, 1e-4
# Dividing by 2^-81 and less leaves float32, where the norm then returns 0: the float64 forward went on with 1e24.
OVERFLOWS = "divide by the scale (the suffix says `_inv`)"
OVERFLOW_RELATIVE = 0.5
# A row must move a logit of some checkpoint by this many tolerances: the least is 0.175 (eps), 351 times 5e-4.
SHOWN = 300

FEATURES, CONTROL = "Captured features", "Not wrong, for comparison"
CELLS = [cell for cell in golden.mutant_cells() if cell.section in {section for section, _ in MUTANTS}]
CELLS.sort(key=lambda cell: CHECKPOINTS.index(cell.checkpoint))
BEST = {(c.section, c.row): c.checkpoint for c in sorted(CELLS, key=lambda cell: cell.difference)}


def name_of(cell: Cell) -> str:
    return f"{cell.checkpoint}-{cell.row}"


def test_every_listed_row_is_made_and_shown():
    listed = {(c.section, c.row) for c in golden.mutant_cells() if c.section and c.section != FEATURES}
    assert listed == set(MUTANTS)
    for section, row in listed - {key for key in MUTANTS if key[0] == CONTROL}:
        shown = max(c.difference for c in CELLS if (c.section, c.row) == (section, row))
        assert shown > SHOWN * TOLERANCE["logits"], row


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_right_implementation_passes_op_by_op(monkeypatch, checkpoint):
    found = run_op_by_op(monkeypatch, golden.model(checkpoint), checkpoint)
    assert set(found) == set(TOLERANCE)
    assert golden.failures(found) == {}


def marks(cell: Cell) -> list:
    """Each row runs where it shows most, the others in the slow tier."""
    return [] if BEST[cell.section, cell.row] == cell.checkpoint or cell.section == CONTROL else [pytest.mark.slow]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=name_of(cell), marks=marks(cell)) for cell in CELLS])
def test_mutant_fails(monkeypatch, cell):
    model = golden.copy(golden.model(cell.checkpoint))
    model = MUTANTS[cell.section, cell.row](monkeypatch, model, cell.checkpoint)
    found = run_op_by_op(monkeypatch, model, cell.checkpoint)
    if cell.difference > TOLERANCE["logits"]:
        assert "logits" in golden.failures(found)
    if np.isinf(cell.difference):
        assert np.isinf(found["logits"])
    else:
        relative = OVERFLOW_RELATIVE if cell.row == OVERFLOWS else LISTED_RELATIVE
        assert abs(found["logits"] - cell.difference) <= max(relative * cell.difference, LISTED_ABSOLUTE)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_copies_leave_the_checkpoint_alone(monkeypatch, checkpoint):
    """The mutants write to copies; the shared model must still be right after all of them."""
    assert golden.failures(run_op_by_op(monkeypatch, golden.model(checkpoint), checkpoint)) == {}


def features_of_wrong_layers(checkpoint: str, wrong: str) -> tuple[float, dict[str, float]]:
    """-> the number that data/mutants.md lists for a wrong capture (longest prompt), and what the comparison finds."""
    out, residual = golden.right(checkpoint, 2), golden.expected(checkpoint)["p2_resid"]
    last = len(residual) - 1
    if wrong.startswith("last layer"):
        features = (*out.features[:last], out.hidden)
        listed = float(np.abs(np.asarray(features[last][0]) - residual[last]).max())
    else:
        features = (out.features[0], *out.features[:last])
        listed = min(float(np.abs(np.asarray(features[i][0]) - residual[i]).max()) for i in range(1, last + 1))
    return listed, golden.errors(golden.dataclasses.replace(out, features=features), checkpoint, 2)


@pytest.mark.parametrize("cell", [c for c in golden.mutant_cells() if c.section == FEATURES], ids=name_of)
def test_wrong_captured_feature_fails(cell):
    difference, found = features_of_wrong_layers(cell.checkpoint, cell.row)
    assert set(golden.failures(found)) == {"residual"}
    assert difference == pytest.approx(cell.difference, rel=LISTED_RELATIVE)
