"""Requests whose answers must not depend on speculation, and what is asked of answers."""
