"""GPU kernels behind the operations of a transformer block."""
