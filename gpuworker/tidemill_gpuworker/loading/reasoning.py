"""Which tokens begin and end a model's reasoning."""

from tidemill.openai.formats import choose_reasoning_format, reasoning_format
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.sampling.thinking import ReasoningMarkers


def reasoning_markers(tokenizer: Tokenizer, vocab_size: int) -> ReasoningMarkers | None:
    """Return the markers that the chat template speaks of, if each is one token of the model.

    Markers of several tokens could hide in others, and are not looked for.
    """
    name = choose_reasoning_format(tokenizer.chat_template)
    if name is None:
        return None
    texts = reasoning_format(name)
    spelled = [
        tokenizer.encode(marker, add_special_tokens=False) for marker in (texts.open, texts.close)
    ]
    if any(len(ids) != 1 or ids[0] >= vocab_size for ids in spelled):
        return None
    [begin], [end] = spelled
    return ReasoningMarkers(begin, end)
