"""Every wrong implementation that data/mutants.md lists, injected into the library or into the weights."""

# Importing a part registers its mutants; the order is the list's.
import target_mutants_norms  # noqa: F401, I001
import target_mutants_attention  # noqa: F401
import target_mutants_mlp  # noqa: F401
import target_mutants_reading  # noqa: F401
from target_mutants_base import MUTANTS, compile_experts, run_op_by_op

__all__ = ["MUTANTS", "compile_experts", "run_op_by_op"]
