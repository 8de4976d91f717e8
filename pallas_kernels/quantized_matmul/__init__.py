"""x W^T with W in MXFP8 or NVFP4, dequantised while it is multiplied."""
