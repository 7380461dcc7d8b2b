"""What a GGUF file says of rotary embeddings, which transformers' reader passes over.

llama.cpp keeps the settings of linear and yarn scaling in fields.  Of llama3 and longrope it keeps
what each frequency is divided by, in tensors: the first is a longrope whose two lists are one.
"""

from collections.abc import Callable, Sequence
from typing import Any

#: Contents of a field, or numbers of a tensor; None if the file does not have it.
Lookup = Callable[[str], Any]

_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
#: Of a yarn scaling, by the names of config.json.
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
#: Families that rotate a part of each head, of which transformers' reader keeps the default.
_PARTIAL = ("nemotron", "phi3", "stablelm")


def rotated_share(field: Lookup) -> dict[str, float]:
    """Return which part of each head is rotated, where families differ in it."""
    architecture = field("general.architecture")
    if architecture not in _PARTIAL:
        return {}
    names = ("rope.dimension_count", "embedding_length", "attention.head_count")
    rotated, hidden, heads = (field(f"{architecture}.{name}") for name in names)
    return {} if rotated is None else {"partial_rotary_factor": rotated / (hidden // heads)}


def rope_scaling(field: Lookup, tensor: Lookup) -> dict[str, Any]:
    """Return the rope settings to add to those that transformers reads, as config.json has them."""
    architecture = field("general.architecture")

    def scaling(name: str) -> Any:
        return field(f"{architecture}.rope.scaling.{name}")

    original = scaling("original_context_length")
    short, long = tensor(_SHORT), tensor(_LONG)
    if short is not None and long is not None:
        return _longrope(short, long, original, scaling("attn_factor"))
    # Other families have divisors too, for what their configs say in other ways.
    divisors = tensor(_FREQUENCIES) if architecture == "llama" else None
    if divisors is not None:
        return _longrope(divisors, divisors, field(f"{architecture}.context_length"), 1.0)
    kind = scaling("type")
    if kind not in ("linear", "yarn"):
        return {}
    settings = {"rope_type": kind, "factor": scaling("factor")}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = original
        settings |= {name: scaling(theirs) for name, theirs in _YARN.items()}
    return {name: value for name, value in settings.items() if value is not None}


def _longrope(
    short: Sequence[float], long: Sequence[float], original: int | None, amplitude: float | None
) -> dict[str, Any]:
    settings = {
        "rope_type": "longrope",
        "short_factor": [float(value) for value in short],
        "long_factor": [float(value) for value in long],
        "original_max_position_embeddings": original,
        "attention_factor": amplitude,
    }
    return {name: value for name, value in settings.items() if value is not None}
