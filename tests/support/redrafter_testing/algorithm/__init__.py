"""The algorithm restated plainly, and trees of given shapes: what results are compared with."""
