"""Whisper: an encoder of log-mel windows, and a decoder whose windows share their steps.

Weights and encoder are those of transformers.  The decoder is our own, because its windows are at
different positions: each has a slot in caches of fixed size, and slots in use are the first ones,
so that a step reads them without copying.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional

from tidemill_gpuworker.loading.config_fields import read_config
from tidemill_gpuworker.loading.foreign_model import check_finite, load_pretrained, reading
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_task import refuse_own_code
from tidemill_gpuworker.speech.audio import SAMPLE_RATE, Samples
from tidemill_gpuworker.speech.transcript import WINDOW_FRAMES

#: Slots that the caches begin with; they double when these are full.
_FIRST_SLOTS = 2
_HOP_SAMPLES = 160


@dataclass(frozen=True, slots=True)
class Decoded:
    """Hidden states [rows, tokens, width], and attention [rows, heads, tokens, frames] if asked."""

    hidden: torch.Tensor
    attention: torch.Tensor | None = None


class SpeechModel:
    """One loaded Whisper; not thread-safe but for ``features``.

    Raises:
        ModelError: the directory cannot be served; the subclass says why.
    """

    def __init__(self, model_dir: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        refuse_own_code(read_config(model_dir), model_dir / "config.json")
        self.revision = Checkpoint(model_dir, dtype=dtype, device=device).revision()
        self._device, self._dtype = device, dtype
        with reading(model_dir / "preprocessor_config.json"):
            self._extractor = transformers.WhisperFeatureExtractor.from_pretrained(model_dir)
        with reading(model_dir):
            self._set_up(model_dir)
            check_finite(self._trial(), model_dir, dtype)

    def _set_up(self, model_dir: Path) -> None:
        kind = transformers.WhisperForConditionalGeneration
        loaded = load_pretrained(kind, model_dir, self._dtype, ())
        self._model: Any = loaded.to(self._device).eval()
        self.config: Any = self._model.config
        self.max_tokens = int(self.config.max_target_positions)
        self._decoder: Any = self._model.model.decoder
        self._heads = int(self.config.decoder_attention_heads)
        self._num_slots = 0
        self._caches: list[torch.Tensor] = []
        self._grow(_FIRST_SLOTS)

    def _trial(self) -> torch.Tensor:
        """Return the logits of one token that was heard in silence."""
        silence = self.features(np.zeros(0, dtype=np.float32))
        self.encode([silence[:, :WINDOW_FRAMES]], 0)
        with torch.inference_mode():
            start = torch.tensor([[int(self.config.decoder_start_token_id or 0)]])
            logits: torch.Tensor = self._model.proj_out(self.decode(start, [0], 0).hidden)
        return logits

    def features(self, samples: Samples) -> torch.Tensor:
        """Return log-mel features [bins, frames] of the audio and 30 s of silence behind it."""
        silence = np.zeros(WINDOW_FRAMES * _HOP_SAMPLES, dtype=np.float32)
        output = self._extractor(
            np.concatenate((samples, silence)),
            sampling_rate=SAMPLE_RATE,
            truncation=False,
            padding="longest",
            return_tensors="pt",
        )
        features: torch.Tensor = output.input_features[0]
        return features

    @torch.inference_mode()
    def encode(self, windows: Sequence[torch.Tensor], first_slot: int) -> None:
        """Put windows [bins, 3000] through the encoder; their slots follow each other."""
        self._grow(first_slot + len(windows))
        batch = torch.stack(list(windows)).to(self._device, self._dtype)
        states = self._model.model.encoder(batch).last_hidden_state
        where = slice(first_slot, first_slot + len(windows))
        for index, layer in enumerate(self._decoder.layers):
            self._caches[0][index, where] = self._split(layer.encoder_attn.k_proj(states))
            self._caches[1][index, where] = self._split(layer.encoder_attn.v_proj(states))

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Let the window of one slot have another one."""
        for cache in self._caches:
            cache[:, target] = cache[:, source]

    @torch.inference_mode()
    def decode(
        self,
        ids: torch.Tensor,
        starts: Sequence[int],
        first_slot: int,
        heads: Sequence[tuple[int, int]] = (),
    ) -> Decoded:
        """Put tokens [rows, tokens] through the decoder, each row behind its ``starts`` tokens.

        The rows have the slots from ``first_slot`` on.  Returns the hidden states, and the
        attention of the (layer, head) pairs ``heads`` to the audio.
        """
        num_rows, num_tokens = ids.shape
        begin = torch.tensor(starts, device=self._device)[:, None]
        positions = begin + torch.arange(num_tokens, device=self._device)
        x = self._decoder.embed_tokens(ids.to(self._device)) * self._decoder.embed_scale
        x = x + self._decoder.embed_positions.weight[positions]
        keys = torch.arange(max(starts) + num_tokens, device=self._device)
        mask = (keys <= positions[..., None])[:, None]
        rows = torch.arange(first_slot, first_slot + num_rows, device=self._device)[:, None]
        told: list[torch.Tensor] = []
        for index, layer in enumerate(self._decoder.layers):
            x = x + self._attend_self(layer, index, x, rows, positions, mask)
            wanted = [head for at, head in heads if at == index]
            out, attention = self._attend_audio(layer, index, x, rows, wanted)
            told += [] if attention is None else [attention]
            x = x + out
            hidden = layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))
            x = x + layer.fc2(hidden)
        return Decoded(self._decoder.layer_norm(x), torch.cat(told, dim=1) if told else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [..., vocabulary] on the CPU.

        Raises ``ArithmeticError`` if one is no number.
        """
        with torch.inference_mode():
            logits: torch.Tensor = self._model.proj_out(hidden).float().cpu()
        if not logits.isfinite().all():
            raise ArithmeticError("the model gave no finite logits")
        return logits

    def _attend_self(
        self,
        layer: Any,
        index: int,
        x: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        attention, x = layer.self_attn, layer.self_attn_layer_norm(x)
        query = self._split(attention.q_proj(x))
        keys, values = self._caches[2][index], self._caches[3][index]
        # [rows, tokens, heads, size]: the indices of rows and tokens go together.
        keys[rows, :, positions] = self._split(attention.k_proj(x)).transpose(1, 2)
        values[rows, :, positions] = self._split(attention.v_proj(x)).transpose(1, 2)
        where, length = slice(int(rows[0]), int(rows[-1]) + 1), mask.shape[-1]
        out = functional.scaled_dot_product_attention(
            query, keys[where, :, :length], values[where, :, :length], attn_mask=mask
        )
        return self._join(attention.out_proj, out)

    def _attend_audio(
        self, layer: Any, index: int, x: torch.Tensor, rows: torch.Tensor, heads: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attention = layer.encoder_attn
        query = self._split(attention.q_proj(layer.encoder_attn_layer_norm(x)))
        where = slice(int(rows[0]), int(rows[-1]) + 1)
        keys, values = self._caches[0][index, where], self._caches[1][index, where]
        out = functional.scaled_dot_product_attention(query, keys, values)
        weights = None
        if heads:
            scale = query.shape[-1] ** -0.5
            products = query[:, heads] @ keys[:, heads].transpose(-1, -2)
            weights = (products.float() * scale).softmax(dim=-1)
        return self._join(attention.out_proj, out), weights

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self._heads, -1).transpose(1, 2)

    def _join(self, projection: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = projection(x.transpose(1, 2).flatten(2))
        return out

    def _grow(self, num_slots: int) -> None:
        if num_slots <= self._num_slots:
            return
        config, old = self.config, self._caches
        count = max(num_slots, 2 * self._num_slots)
        lengths = [config.max_source_positions] * 2 + [self.max_tokens] * 2
        self._caches = [
            torch.zeros(
                (config.decoder_layers, count, self._heads, length, config.d_model // self._heads),
                dtype=self._dtype,
                device=self._device,
            )
            for length in lengths
        ]
        for before, after in zip(old, self._caches, strict=False):
            after[:, : self._num_slots] = before
        self._num_slots = count
