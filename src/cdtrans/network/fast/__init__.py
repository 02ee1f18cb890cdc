"""The steps of a transformer block (`operations`), and the GPU kernels that run them (`fused`, `kernels`)."""
