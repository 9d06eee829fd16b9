"""One answer, traced: every step's draft on a page."""
