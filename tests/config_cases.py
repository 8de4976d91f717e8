"""Published and golden configs that tests of the parser begin with, and how they change them."""

import copy
import json
from typing import Any

from golden import DATA

INVENTORY = DATA / "inventory" / "configs"
DELETED = "<deleted>"  # a string: an object's address would differ between test processes


def read(*path: str) -> dict[str, Any]:
    return json.loads(DATA.joinpath(*path).read_text())


M3, FLASH, DSPARK = (
    json.loads((INVENTORY / f"{n}.config.json").read_text()) for n in ("m3-mxfp8", "m31-flash", "m31-dspark")
)
QWEN = read("deepspec-qwen3-tiny", "vanilla", "config.json")
RESAVED_SPARSE = {
    "sparse_attention_config": DELETED,
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
NO_WINDOW = {"layer_types": ["full_attention"] * 5, "sliding_window": None}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with "a.b" keys set or, where the value is `DELETED`, removed; unprefixed keys go to the text fields."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        *parents, name = key.split(".")
        if parents[:1] == ["top"]:
            node, parents = result, parents[1:]
        else:
            node = result.get("text_config", result)
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is DELETED:
            del node[name]
        else:
            node[name] = value
    return result
