"""ReDrafter on Apple silicon: MLX, on mlx-lm's own models."""
