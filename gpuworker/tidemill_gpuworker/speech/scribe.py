"""Opens windows with what they are told, and turns what they say into segments and words."""

import torch

from tidemill.protocol.outcomes import Word
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.speech.alignment import cost_matrix, split_words, token_times, warp
from tidemill_gpuworker.speech.job import SpeechJob, make_segments
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.transcript import (
    FRAMES_PER_SECOND,
    WindowText,
    read_window,
    split_log,
    window_end,
)
from tidemill_gpuworker.speech.vocabulary import Vocabulary
from tidemill_gpuworker.speech.window import Window

#: Frames of one position of the encoder.
_FRAMES_PER_POSITION = 2


class Scribe:
    """Everything about a window but its tokens."""

    def __init__(self, model: SpeechModel, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._half = model.max_tokens // 2

    def open(self, job: SpeechJob, slot: int) -> Window:
        """Return the job's next window, whose audio is in ``slot``; may find the language."""
        if job.language is None:
            job.language = job.request.language or self._detect(slot)
        opening = self._vocabulary.opening(
            job.language, job.request.task, timestamps=job.has_timestamps
        )
        forced = job.partial[len(opening) :]
        told = job.history[-(self._half - 1) :]
        prompt = (self._vocabulary.previous, *told) if told else ()
        # The decoder must not outgrow its positions.
        room = self._model.max_tokens - len(prompt) - len(opening)
        return Window(
            job=job,
            vocabulary=self._vocabulary,
            prompt=prompt,
            opening=opening,
            max_sampled=min(self._half, room),
            sampled=list(forced),
            num_forced=len(forced),
        )

    def close(self, window: Window, slot: int) -> tuple[tuple[int, ...], str]:
        """Take a window into its job; returns the tokens to publish and their text."""
        job, vocabulary = window.job, self._vocabulary
        sampled = () if window.is_silent and not window.num_forced else tuple(window.sampled)
        said = read_window(sampled, job.seek, job.window_frames, vocabulary)
        texts = self._texts(said)
        words: list[list[Word]] = [[] for _ in texts]
        if job.request.timestamps == "word" and sampled:
            words = self._words(said, job, slot)
        stats = {
            "mean_logprob": window.mean_logprob,
            "no_speech": window.no_speech,
            "temperature": window.temperature,
        }
        end = job.audio.num_frames / FRAMES_PER_SECOND
        segments = make_segments(said, vocabulary, texts, words, stats, end)
        last = window_end(vocabulary, resets=window.is_unsure)
        ids = (*window.opening, *sampled, last)[len(job.partial) :]
        job.advance(said, segments, reset=window.is_unsure)
        return ids, "".join(segment.text for segment in segments)

    def plain_text(self, window: Window) -> str:
        """Return the text of a window's tokens."""
        return self._tokenizer.decode(self._vocabulary.text_ids(tuple(window.sampled)))

    def replay(self, job: SpeechJob, ids: list[int]) -> None:
        """Take in what earlier attempts of a job have published.

        How likely that was is not in the log, and when each word was said is not either; segments
        of these windows have times alone.
        """
        windows, num_whole = split_log(ids, self._vocabulary)
        for window in windows:
            self._note_language(job, window.ids)
            opening = len(
                self._vocabulary.opening(
                    job.language or "en", job.request.task, timestamps=job.has_timestamps
                )
            )
            said = read_window(window.ids[opening:], job.seek, job.window_frames, self._vocabulary)
            end = job.audio.num_frames / FRAMES_PER_SECOND
            texts = self._texts(said)
            words: list[list[Word]] = [[] for _ in texts]
            segments = make_segments(said, self._vocabulary, texts, words, {}, end)
            job.advance(said, segments, reset=window.resets)
        job.partial = tuple(ids[num_whole:])
        if job.partial:
            self._note_language(job, job.partial)

    def _note_language(self, job: SpeechJob, window: tuple[int, ...]) -> None:
        if job.language is None and self._vocabulary.is_multilingual and len(window) > 1:
            job.language = self._vocabulary.language_of(window[1])
        elif job.language is None and not self._vocabulary.is_multilingual:
            job.language = "en"

    def _detect(self, slot: int) -> str:
        if not self._vocabulary.is_multilingual:
            return "en"
        start = torch.tensor([[self._vocabulary.start]])
        logits = self._model.logits(self._model.decode(start, [0], slot).hidden[0, 0])
        return max(self._vocabulary.languages.items(), key=lambda item: float(logits[item[1]]))[0]

    def _texts(self, said: WindowText) -> list[str]:
        return [
            self._tokenizer.decode(self._vocabulary.text_ids(piece.ids)) for piece in said.pieces
        ]

    def _words(self, said: WindowText, job: SpeechJob, slot: int) -> list[list[Word]]:
        per_piece = [self._vocabulary.text_ids(piece.ids) for piece in said.pieces]
        text_ids = [token_id for ids in per_piece for token_id in ids]
        found: list[list[Word]] = [[] for _ in per_piece]
        if not text_ids:
            return found
        times, probabilities = self._align(text_ids, job, slot)
        offset, place = job.seek / FRAMES_PER_SECOND, 0
        bounds = [sum(map(len, per_piece[: i + 1])) for i in range(len(per_piece))]
        for word in split_words(text_ids, self._tokenizer, job.language or "en"):
            after = place + word.num_tokens
            piece = next(i for i, bound in enumerate(bounds) if place < bound)
            found[piece].append(
                Word(
                    text=word.text,
                    start=offset + float(times[place]),
                    end=offset + float(times[after]),
                    probability=min(1.0, sum(probabilities[place:after]) / word.num_tokens),
                )
            )
            place = after
        return found

    def _align(
        self, text_ids: list[int], job: SpeechJob, slot: int
    ) -> tuple[list[float], list[float]]:
        """Return when each token and the end begin, and how likely each token is."""
        opening = self._vocabulary.opening(job.language or "en", job.request.task, timestamps=False)
        ids = [*opening, *text_ids, self._vocabulary.end]
        decoded = self._model.decode(torch.tensor([ids]), [0], slot, self._heads)
        assert decoded.attention is not None, "heads were asked for"
        # A row of attention belongs to the token that it predicts.
        rows = decoded.attention[0, :, len(opening) - 1 : -1].cpu()
        num_positions = max(1, job.window_frames // _FRAMES_PER_POSITION)
        times = token_times(warp(cost_matrix(rows, num_positions))).tolist()
        logits = self._model.logits(decoded.hidden[0, len(opening) - 1 : -2])
        likely = logits[:, : self._vocabulary.end].softmax(dim=-1)
        return times, likely[range(len(text_ids)), text_ids].tolist()

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        if self._vocabulary.alignment_heads:
            return self._vocabulary.alignment_heads
        # As in the reference code: all heads of the upper half.
        config = self._model.config
        layers, heads = int(config.decoder_layers), int(config.decoder_attention_heads)
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
