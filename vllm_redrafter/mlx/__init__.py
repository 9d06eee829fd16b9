"""ReDrafter on Apple silicon, in MLX: trees on mlx-lm's unmodified models."""
