"""Parts of context_matches.py."""
