"""Small random encoders in Hugging Face directories, with tokenizers of a few words."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

MAX_POSITIONS = 64
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "tide", "mill", "water", "wheel", "grain", "stone")

_SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    # Wide enough that rows differ clearly.
    "initializer_range": 0.2,
}


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return one token per word, between [CLS] and [SEP]."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return raw


def save_bert(directory: Path, pooling: Mapping[str, Any] | None = None) -> Path:
    """Write a random BertModel, with a pooling of sentence-transformers if one is given."""
    torch.manual_seed(1)
    transformers.BertModel(transformers.BertConfig(**_SIZES)).save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    if pooling is not None:
        modules = [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def save_cross_encoder(directory: Path, **config: Any) -> Path:
    """Write a random BertForSequenceClassification of one label."""
    torch.manual_seed(2)
    settings = transformers.BertConfig(**_SIZES, **{"num_labels": 1, **config})
    transformers.BertForSequenceClassification(settings).save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def save_decoder(directory: Path) -> Path:
    """Write a random Qwen3 whose directory says that it is for embeddings."""
    torch.manual_seed(3)
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "modules.json").write_text(
        json.dumps(
            [
                {"type": "sentence_transformers.models.Transformer", "path": ""},
                {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            ]
        )
    )
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return directory
