"""How jobs of kind transcribe come into the engine for speech."""

import numpy as np

from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import Request, TranscribeRequest
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.kind_work import KindJob
from tidemill_gpuworker.speech.audio import SAMPLE_RATE, decode_audio
from tidemill_gpuworker.speech.job import Audio, SpeechJob
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.scribe import Scribe
from tidemill_gpuworker.speech.stored_audio import AudioSource
from tidemill_gpuworker.speech.transcript import FRAMES_PER_SECOND
from tidemill_gpuworker.speech.vocabulary import Vocabulary


class SpeechWork:
    """Makes speech jobs of claims."""

    def __init__(
        self,
        card: ModelCard,
        model: SpeechModel,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        source: AudioSource,
    ) -> None:
        self._card = card
        self._model = model
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._source = source
        self._scribe = Scribe(model, vocabulary, tokenizer)

    def prepare(self, request: Request) -> Audio:
        """Decode the audio; raises ``InvalidRequest`` if it is none or the language unknown.

        ``BlobError`` if it cannot be read from the blob store.
        """
        assert isinstance(request, TranscribeRequest), "the model serves no other kind"
        self._vocabulary.check_language(request.language, request.task)
        samples = decode_audio(self._source.read(request))
        num_frames = len(samples) * FRAMES_PER_SECOND // SAMPLE_RATE
        return Audio(self._model.features(samples), num_frames)

    def start(self, given: KindJob, generated: Generated) -> SpeechJob:
        """Return the job behind the windows that earlier attempts have published."""
        request = given.request
        assert isinstance(request, TranscribeRequest), "the model serves no other kind"
        job = SpeechJob(
            given.job_id,
            request,
            given.inputs,
            history=self._told(request.prompt),
            priority=request.priority,
            output_ids=list(generated.ids),
            num_resumed_tokens=len(generated.ids),
        )
        self._scribe.replay(job, generated.ids)
        return job

    def smallest(self, seq_id: str) -> SpeechJob:
        """Return a job of a tenth of a second of silence."""
        silence = np.zeros(SAMPLE_RATE // 10, dtype=np.float32)
        request = TranscribeRequest(model=self._card.name, audio=b"-")
        return SpeechJob(seq_id, request, Audio(self._model.features(silence), 10))

    def _told(self, prompt: str) -> list[int]:
        text = prompt.strip()
        return self._tokenizer.encode(f" {text}", add_special_tokens=False) if text else []
