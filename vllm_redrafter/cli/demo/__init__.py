"""The demo: a target in vLLM, or mlx-lm, without and with ReDrafter, side by side.

`smollm2.py` tells it with SmolLM2-135M-Instruct and the drafter that comes with the package,
`train_small.py` with a small target and its drafter, both trained here. Whatever is made or fetched
is kept in a cache folder and used again by the next run.
"""
