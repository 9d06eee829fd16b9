"""Draft heads: what drafting and training need of one (`head.py`), and one module per head."""
