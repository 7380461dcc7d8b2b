"""What may differ from layer to layer of a decoder."""

from dataclasses import dataclass

from tidemill_gpuworker.models.rope import RopeConfig
from tidemill_gpuworker.models.temperature import Temperature


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        window: how many tokens, its own included, a token attends to; 0 for all.
        rope: the rotary embedding; None for none.
        is_sparse: whether the MLP is a mixture of experts.
        chunk: tokens of the chunks within which a token attends; 0 for no chunks.
        temperature: by what queries grow with their position; None for nothing.
        has_unit_norm: whether each head's query and key are brought to one length.
    """

    window: int = 0
    rope: RopeConfig | None = None
    is_sparse: bool = False
    chunk: int = 0
    temperature: Temperature | None = None
    has_unit_norm: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of a mixture of experts."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    #: Whether the weights of the chosen experts are made to add up to 1.
    normalises: bool
    #: Inner size of the expert that every token takes; 0 for none.
    shared_intermediate_size: int = 0
    #: Of the clamped activation of GPT-OSS.
    alpha: float = 0.0
    limit: float = 0.0
