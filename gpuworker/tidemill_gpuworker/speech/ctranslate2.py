"""Turns a Whisper checkpoint of CTranslate2 (faster-whisper) into a Hugging Face directory.

``python -m tidemill_gpuworker.speech.ctranslate2 SOURCE TARGET``; the source has model.bin,
config.json and tokenizer.json.  Weights keep their values, in the dtype they have there.

The container of model.bin is little-endian: u32 version, name of the model's kind, u32 revision,
u32 number of tensors; each tensor has its name, u8 rank, u32 sizes, u8 dtype, u32 bytes and the
bytes.  A name is u16 length, with the NUL that ends it, and its bytes.
"""

import json
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tidemill.protocol.errors import DamagedModel, TidemillError, UnsupportedModel

Tensors = dict[str, NDArray[Any]]

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 4: np.float16}
_HEAD_DIM = 64
#: From 51,865 tokens on a vocabulary holds languages.
_MULTILINGUAL_VOCAB = 51_865
_LAYER_NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}
#: Linear layers of a layer there, and the parts that they become here.
_SELF_ATTENTION = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_CROSS_ATTENTION = {
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
}


def convert(source: Path, target: Path) -> None:
    """Write the model in ``source`` to ``target``.

    Raises ``DamagedModel`` for a file that is cut off, ``UnsupportedModel`` for another model than
    a Whisper in float32 or float16.
    """
    tensors = read_tensors((source / "model.bin").read_bytes())
    settings = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    target.mkdir(parents=True, exist_ok=True)
    state = dict(_rename(tensors))
    config = _config(state)
    config |= {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|endoftext|>"]}
    config |= {"pad_token_id": ids["<|endoftext|>"]}
    config |= {"decoder_start_token_id": ids["<|startoftranscript|>"]}
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation(config, settings, ids))
    _write_json(target / "preprocessor_config.json", {"feature_size": config["num_mel_bins"]})
    shutil.copy(source / "tokenizer.json", target / "tokenizer.json")
    save_file(
        {name: torch.from_numpy(np.array(value)) for name, value in state.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )


def read_tensors(data: bytes) -> Tensors:
    """Read the container; raises ``DamagedModel`` or ``UnsupportedModel``."""
    try:
        return _Reader(data).tensors()
    except (struct.error, ValueError) as error:
        raise DamagedModel(
            f"model.bin is no whole CTranslate2 model: {error}", fix="Fetch it again."
        ) from error


class _Reader:
    """Where we are in the container."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def tensors(self) -> Tensors:
        self._numbers("I")
        kind, _ = self._name(), self._numbers("I")
        if kind != "WhisperSpec":
            raise UnsupportedModel(
                f"model.bin holds a {kind[:40]}, not a Whisper", fix="Give a Whisper model."
            )
        (count,) = self._numbers("I")
        return dict(self._tensor() for _ in range(count))

    def _tensor(self) -> tuple[str, NDArray[Any]]:
        name, (rank,) = self._name(), self._numbers("B")
        shape, (dtype,), (size,) = self._numbers("I" * rank), self._numbers("B"), self._numbers("I")
        # Single integers are settings, such as the number of heads.
        if dtype not in _DTYPES or (rank and dtype in (1, 2)):
            raise UnsupportedModel(
                f"model.bin: {name} is quantised", fix="Give a model in float16 or float32."
            )
        return name, np.frombuffer(self._take(size), _DTYPES[dtype]).reshape(shape)

    def _name(self) -> str:
        (length,) = self._numbers("H")
        return self._take(length).rstrip(b"\0").decode()

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        layout = f"<{kinds}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        piece = self._data[self._position : self._position + size]
        if len(piece) < size:
            raise ValueError(f"it ends at byte {len(self._data)}")
        self._position += size
        return piece


def _rename(tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "model.decoder.embed_tokens.weight", tensors["decoder/embeddings/weight"]
    for conv in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            yield f"model.encoder.{conv}.{part}", tensors[f"encoder/{conv}/{part}"]
    for side in ("encoder", "decoder"):
        positions = tensors[f"{side}/position_encodings/encodings"]
        yield f"model.{side}.embed_positions.weight", positions
        yield from _norm(tensors, f"{side}/layer_norm", f"model.{side}.layer_norm")
        index = 0
        while f"{side}/layer_{index}/ffn/linear_0/weight" in tensors:
            yield from _layer(tensors, f"{side}/layer_{index}", f"model.{side}.layers.{index}")
            index += 1


def _layer(tensors: Tensors, old: str, new: str) -> Iterator[tuple[str, NDArray[Any]]]:
    has_cross = f"{old}/attention/linear_0/weight" in tensors
    for name, renamed in _LAYER_NORMS.items():
        if has_cross or not name.startswith("attention/"):
            yield from _norm(tensors, f"{old}/{name}", f"{new}.{renamed}")
    for name, parts in (_SELF_ATTENTION | (_CROSS_ATTENTION if has_cross else {})).items():
        yield from _split(tensors, f"{old}/{name}", [f"{new}.{part}" for part in parts])


def _norm(tensors: Tensors, old: str, new: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{new}.weight", tensors[f"{old}/gamma"]
    yield f"{new}.bias", tensors[f"{old}/beta"]


def _split(tensors: Tensors, old: str, parts: Sequence[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    weights = np.split(tensors[f"{old}/weight"], len(parts))
    biases = np.split(tensors[f"{old}/bias"], len(parts))
    for name, weight, bias in zip(parts, weights, biases, strict=True):
        yield f"{name}.weight", weight
        # Whisper's keys have no bias; there it is stored as zeros.
        if not name.endswith("k_proj"):
            yield f"{name}.bias", bias


def _config(state: Tensors) -> dict[str, Any]:
    vocab_size, width = state["model.decoder.embed_tokens.weight"].shape
    layers = {
        side: sum(n.startswith(f"model.{side}.layers.") and n.endswith("fc1.bias") for n in state)
        for side in ("encoder", "decoder")
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": str(state["model.decoder.embed_tokens.weight"].dtype),
        "vocab_size": vocab_size,
        "d_model": width,
        "num_mel_bins": state["model.encoder.conv1.weight"].shape[1],
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "encoder_attention_heads": width // _HEAD_DIM,
        "decoder_attention_heads": width // _HEAD_DIM,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_source_positions": state["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": state["model.decoder.embed_positions.weight"].shape[0],
    }


def _generation(
    config: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    is_multilingual = config["vocab_size"] >= _MULTILINGUAL_VOCAB
    generation = {
        "is_multilingual": is_multilingual,
        "alignment_heads": settings["alignment_heads"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
    }
    generation |= {name: v for name, v in config.items() if name.endswith("token_id")}
    if is_multilingual:
        languages = set(settings["lang_ids"])
        generation["lang_to_id"] = {name: i for name, i in ids.items() if i in languages}
        generation["task_to_id"] = {
            task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")
        }
    return generation


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except TidemillError as failure:
        sys.exit(f"error: {failure.one_line()}")
