"""Attention kernels for block drafting: Pallas Mosaic GPU, Triton and XLA forms of one set of functions."""
