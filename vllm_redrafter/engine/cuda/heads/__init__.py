"""Draft heads for few rows on a GPU: as few launches as their mathematics allows."""
