"""MiniMax-M3 / M3.1-Flash and its DSpark speculative drafter in JAX.

Shape letters, the same in every signature and einsum of the library:

    B   batch (requests)              Hq   query heads             E   experts
    T   tokens of one call            Hkv  key/value heads         F   inner size of an MLP
    S   cache slots                   D    head dimension          W   attention window
    K   block or draft length         H    hidden size             V   vocabulary
"""

from dspark_jax._version import __version__

__all__ = ["__version__"]
