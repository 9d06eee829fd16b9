"""Adapters to vLLM: with plugin.py the only code that imports vLLM's internals."""
