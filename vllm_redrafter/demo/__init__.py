"""The demo: train a small target and its drafter here, then decode without and with ReDrafter.

No network, no GPU, a few minutes on two cores. Everything that is made is kept in a cache folder
and used again by the next run.
"""
