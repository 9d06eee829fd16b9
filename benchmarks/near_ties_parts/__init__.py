"""Parts of near_ties.py."""
