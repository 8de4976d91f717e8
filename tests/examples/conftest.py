"""The training scripts import each other by plain name, as they do when `run.py` is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny"))
