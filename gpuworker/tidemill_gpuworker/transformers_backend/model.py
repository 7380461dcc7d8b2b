"""A model of `transformers` behind the interface of our own decoders."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.memory.kv_cache import KVCache
from tidemill_gpuworker.transformers_backend.attention import (
    ATTENTION_NAME,
    PagedLayer,
    RunningStep,
    StepSlot,
    register,
    set_layer,
)
from tidemill_gpuworker.transformers_backend.survey import SurveyedLayer
from tidemill_kernels import AttentionBackend


class TransformersModel:
    """Runs the flat batch of a step as one row of tokens; takes ``model`` over.

    Nothing of a row but attention looks at another token, and ours knows the sequences.  ``model``
    may be a part that ``split_model`` left; ``vocab_size`` is how many logits the whole one gives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: tuple[SurveyedLayer, ...],
        *,
        vocab_size: int,
        head_is_split: bool = False,
    ) -> None:
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        #: Whether the other ranks take part in ``logits``.
        self.head_is_split = head_is_split
        self._vocab_size = vocab_size
        self._slot = StepSlot()
        modules = dict(model.named_modules())
        for index, layer in enumerate(layers):
            set_layer(modules[layer.name], PagedLayer(index, layer.window, self._slot))
        self._base = model.base_model
        self._known = _KnownHidden()
        setattr(model, model.base_model_prefix, self._known)
        self._head = model

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Run a step; returns the hidden states [tokens, hidden] that the head takes.

        Mutates the cache.
        """
        self._slot.step = RunningStep(inputs, cache, backend)
        try:
            out = self._base(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
            )
        finally:
            self._slot.step = None
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states.

        The model's own code computes them, with whatever scales or caps its logits.
        """
        if not len(hidden):
            # Not every head computes logits of nothing.
            return hidden.new_empty(0, self._vocab_size, dtype=torch.float32)
        self._known.hidden = hidden
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits
        return logits[0].float()


class _KnownHidden(nn.Module):
    """Stands for a model's decoder where its head is computed: gives the states that are known."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> "_KnownHidden":
        # Some heads (OPT's) ask the decoder inside the base model.
        return self

    def forward(self, *_: Any, **__: Any) -> "_KnownOutput":
        return _KnownOutput(last_hidden_state=self.hidden[None])


class _KnownOutput(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    # A head may pass on what its own base model returns beside the states.
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
