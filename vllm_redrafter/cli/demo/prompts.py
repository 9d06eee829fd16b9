# SPDX-License-Identifier: Apache-2.0
"""What the demo asks SmolLM2: eight prompts of different kinds."""

from __future__ import annotations

PROMPTS = {
    "explain": "Explain in simple words why the sky is blue.",
    "list": "List five things to pack for a weekend in the mountains.",
    "rewrite": (
        "Rewrite this message so that it is polite: "
        "Send me the report now. You are late again and I am tired of waiting."
    ),
    "code": "Write a Python function that returns the largest number in a list.",
    "arithmetic": "A box holds 12 eggs. How many eggs are in 4 boxes? Show the calculation.",
    "summarise": (
        "Summarise this text in two sentences: The library in our town opened in 1911 in a former "
        "mill. For decades it lent books to the workers of the factories nearby. When the "
        "factories closed, fewer people came, and in 1985 the council wanted to sell the building. "
        "Readers collected four thousand signatures against the plan. Today the library is open "
        "every day, lends tools and musical instruments as well as books, and teaches children "
        "to read and old people to use computers."
    ),
    "advise": "I cannot fall asleep at night. What should I do?",
    "answer": "What is the capital of France?",
}
"""By kind."""
