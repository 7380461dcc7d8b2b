"""Prompts that share what they can: a canonical order of chunks and fields, and what it saves.

Tidemill computes a prefix that waiting jobs share once.  What counts as shared is decided by the
prompts: two that hold the same chunks in another order have nothing in common.  These functions
are pure and ask nobody.
"""

from tidemill.rag.chunk_order import Chunk, canonical_order
from tidemill.rag.field_order import OrderedRow, order_fields
from tidemill.rag.prompt_builder import PromptBuilder
from tidemill.rag.savings import Savings, expected_savings

__all__ = [
    "Chunk",
    "OrderedRow",
    "PromptBuilder",
    "Savings",
    "canonical_order",
    "expected_savings",
    "order_fields",
]
