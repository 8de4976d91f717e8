"""Checkpoint conversion: published safetensors to the Orbax layout that `dspark_jax.load` reads, and back."""
