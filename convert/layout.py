"""What a plan says to people and to readers of the result: layout.json, and the table of a dry run."""

import json
import math
import re
from typing import Any

from convert.plan import Leaf, Plan
from convert.sizes import format_bytes
from dspark_jax._words import counted


def array_entries(plan: Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The `arrays` and `skipped` entries of layout.json."""
    arrays = {}
    for leaf in plan.leaves:
        entry: dict[str, Any] = {"format": leaf.format.name, "shape": list(leaf.parameter.shape)}
        if leaf.format.global_scale:
            entry["global_scale"] = leaf.format.global_scale
        entry["parts"] = plan.parts.get(leaf.path, 1)
        entry["source"] = source_pattern(leaf)
        if leaf.stored != leaf.format:
            entry["source_format"] = leaf.stored.name
        elif leaf.widened:
            entry["source_format"] = "bf16"
        elif leaf.format.name == "mxfp8" and leaf.scale_dtype != "U8":
            entry["scale_dtype"] = leaf.scale_dtype
        arrays[leaf.path] = entry
    skipped = [
        {"names": pattern, "count": count, "reason": reason} for (pattern, reason), (count, _) in plan.skipped.items()
    ]
    return arrays, skipped


def layout_json(layout: dict[str, Any]) -> bytes:
    """layout.json with one array and one skipped group on a line."""

    def lines(key: str) -> str:
        value = layout[key]
        if key == "arrays":
            inner = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            return "{\n" + ",\n".join(inner) + "\n }"
        if key == "skipped":
            return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]" if value else "[]"
        return json.dumps(value)

    return ("{\n" + ",\n".join(f" {json.dumps(key)}: {lines(key)}" for key in layout) + "\n}\n").encode()


def source_pattern(leaf: Leaf) -> str:
    """The source tensors of a leaf in one string: alternatives in braces, expert numbers as a range."""
    suffixes = [name.rpartition(".")[2] for name in leaf.tensors[0].values()]
    first = next(iter(leaf.tensors[0].values()))
    module = first.rpartition(".")[0]
    if leaf.stacked:
        module = re.sub(r"\.experts\.\d+\.", f".experts.{{0..{leaf.rows - 1}}}.", module)
    tail = suffixes[0] if len(suffixes) == 1 else "{" + ",".join(sorted(suffixes)) + "}"
    return f"{module}.{tail}"


def describe_plan(plan: Plan) -> str:
    """Tensors and bytes by format, what is skipped, and the size of the result."""
    by_format: dict[str, list[int]] = {}
    for leaf in plan.leaves:
        name = leaf.format.name if leaf.format == leaf.stored else f"{leaf.stored.name} -> {leaf.format.name}"
        count, values, size = by_format.setdefault(name, [0, 0, 0])
        by_format[name] = [
            count + sum(len(t) for t in leaf.tensors),
            values + math.prod(leaf.parameter.shape),
            size + leaf.nbytes(),
        ]
    tensors = plan.used + sum(count for count, _ in plan.skipped.values())
    rows = [("", "tensors", "parameters", "bytes written")]
    rows += [(n, f"{c:,}", f"{v:,}", f"{b:,}") for n, (c, v, b) in by_format.items()]
    rows.append(("total", f"{plan.used:,}", f"{sum(v for _, v, _ in by_format.values()):,}", f"{plan.nbytes:,}"))
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    table = ["  ".join([r[0].ljust(widths[0]), *(r[i].rjust(widths[i]) for i in (1, 2, 3))]) for r in rows]
    lines = [f"source: {counted(tensors, 'tensor')}, {plan.source_bytes:,} bytes", *table]
    for (pattern, reason), (count, size) in plan.skipped.items():
        lines.append(f"skipped: {counted(count, 'tensor')}, {size:,} bytes: {pattern} ({reason})")
    split = f", {len(plan.parts)} of them in parts" if plan.parts else ""
    batches = counted(len(plan.batches), "batch", "batches")
    lines.append(f"{counted(len(plan.leaves), 'array')}{split} in {batches}")
    lines.append(f"expected peak of anonymous memory: {format_bytes(plan.memory)}")
    return "\n".join(lines)
