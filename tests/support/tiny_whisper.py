"""A small random Whisper in a Hugging Face directory."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

WORDS = tuple(f" w{number}" for number in range(40))
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"),
    *("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    *(f"<|{step / 50:.2f}|>" for step in range(1501)),
)
IDS = {text: index for index, text in enumerate((*WORDS, *SPECIAL))}


def save_tiny_whisper(directory: Path, *, seed: int = 5) -> Path:
    """Write a multilingual model of two layers, whose decoder has room for 64 tokens."""
    torch.manual_seed(seed)
    special: dict[str, Any] = {
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|endoftext|>"],
        "pad_token_id": IDS["<|endoftext|>"],
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
    }
    config = transformers.WhisperConfig(
        vocab_size=len(IDS),
        d_model=64,
        num_mel_bins=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_target_positions=64,
        init_std=0.3,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **special,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    transformers.GenerationConfig(
        is_multilingual=True,
        lang_to_id={name: IDS[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=IDS["<|notimestamps|>"],
        alignment_heads=[[0, 1], [1, 2], [1, 3]],
        suppress_tokens=[3],
        begin_suppress_tokens=[4, IDS["<|endoftext|>"]],
        max_initial_timestamp_index=50,
        **special,
    ).save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(directory)
    raw = tokenizers.Tokenizer(models.WordLevel({text: IDS[text] for text in WORDS}, WORDS[0]))
    raw.pre_tokenizer = pre_tokenizers.Split(" w", "merged_with_next")
    raw.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    raw.decoder = tokenizers.decoders.Fuse()
    raw.save(str(directory / "tokenizer.json"))
    return directory
