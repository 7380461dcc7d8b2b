"""Tiny tokenizers of the two great families, made on the spot."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles

SPECIAL = "<|end|>"
MARKUP = "<tool>"


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges, one special token that ends a text and one that is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ġa", "b"), ("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("ð", "Ł")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return _finish(raw)


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's rules: spaces as ``▁``, unknown characters as bytes, no space at the start."""
    words = ["<unk>", "▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "c", "▁東"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁a", "b")]
    raw = RawTokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(raw)


def _finish(raw: RawTokenizer) -> Tokenizer:
    raw.add_special_tokens([SPECIAL])
    raw.add_tokens([AddedToken(MARKUP, special=False, normalized=False)])
    return Tokenizer(TokenizerFiles(raw.to_str(), special_tokens={"eos_token": SPECIAL}))
