"""Tidemill: a message-queue-driven, asynchronous LLM inference system; this is its Python SDK.

Start one with ``tidemill up``, then::

    from tidemill import Producer

    with Producer() as producer:
        print(producer.generate("The three primary colours are", max_tokens=20).text)
        for chunk in producer.submit("Once upon a time", max_tokens=50).stream():
            print(chunk.text, end="")
        for result in producer.map(["One, two,", "Three, four,"], max_tokens=10):
            print(result.text)

``help(Producer)`` explains the rest; ``AsyncProducer`` is the same for ``asyncio``.  All errors are
``TidemillError``, with what to do about it in ``fix``.
"""

from tidemill._follow import Chunk
from tidemill._reads import JobStatus
from tidemill._request import JobOptions, JobSpec, Prompt, SamplingOptions
from tidemill._terms import TermOptions
from tidemill._version import __version__
from tidemill.async_best_of import AsyncBestOf
from tidemill.async_client import AsyncProducer
from tidemill.async_job import AsyncJob
from tidemill.async_job_batch import AsyncJobBatch
from tidemill.async_stream import AsyncTokenStream
from tidemill.async_watch import AsyncWatch
from tidemill.batch import BatchStatus, CancelCounts
from tidemill.best_of import BestOf
from tidemill.client import Producer
from tidemill.job import Job
from tidemill.job_batch import JobBatch
from tidemill.job_kinds import EmbedSpec, ScoreSpec, TranscribeSpec
from tidemill.job_list import JobPage
from tidemill.outcomes import Embeddings, Ranked, Scores, Transcription
from tidemill.progress import MapProgress
from tidemill.protocol.errors import (
    BatchClosed,
    BlobError,
    BlobNotFound,
    BlobUnavailable,
    BrokerError,
    BrokerUnavailable,
    BrokerUnsupported,
    ConfigError,
    ContextExceeded,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFinished,
    JobNotFound,
    MalformedMessage,
    NoSuchObject,
    Overloaded,
    ProtocolError,
    QueueFull,
    RateLimited,
    ResultExpired,
    StreamGap,
    TidemillError,
    UnknownAdapter,
    UnknownModel,
    UnsupportedVersion,
    WrongState,
)
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import (
    ChatMessage,
    JobEnd,
    ModelCard,
    Usage,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.protocol.outcomes import Outcome, Segment, Word
from tidemill.protocol.sampling import RepetitionDetection, SamplingParams
from tidemill.protocol.states import FinishReason, JobState
from tidemill.protocol.structured import StructuredOutput
from tidemill.result import Choice, Result
from tidemill.status import QueueStatus, Status, WorkerSnapshot
from tidemill.stream import TokenStream
from tidemill.watch import Watch

__all__ = [
    "AsyncBestOf",
    "AsyncJob",
    "AsyncJobBatch",
    "AsyncProducer",
    "AsyncTokenStream",
    "AsyncWatch",
    "BatchClosed",
    "BatchStatus",
    "BestOf",
    "BlobError",
    "BlobNotFound",
    "BlobUnavailable",
    "BrokerError",
    "BrokerUnavailable",
    "BrokerUnsupported",
    "CancelCounts",
    "ChatMessage",
    "Choice",
    "Chunk",
    "ConfigError",
    "ContextExceeded",
    "EmbedSpec",
    "Embeddings",
    "FinishReason",
    "IdempotencyConflict",
    "InvalidRequest",
    "Job",
    "JobBatch",
    "JobCancelled",
    "JobEnd",
    "JobError",
    "JobFailed",
    "JobNotFinished",
    "JobNotFound",
    "JobOptions",
    "JobPage",
    "JobSpec",
    "JobState",
    "JobStatus",
    "MalformedMessage",
    "MapProgress",
    "ModelCard",
    "NoSuchObject",
    "Outcome",
    "Overloaded",
    "Producer",
    "Prompt",
    "ProtocolError",
    "QueueFull",
    "QueueStatus",
    "Ranked",
    "RateLimited",
    "RepetitionDetection",
    "Result",
    "ResultExpired",
    "SamplingOptions",
    "SamplingParams",
    "ScoreSpec",
    "Scores",
    "Segment",
    "Status",
    "StreamGap",
    "StructuredOutput",
    "TermOptions",
    "TidemillError",
    "TokenLogprobs",
    "TokenStream",
    "TranscribeSpec",
    "Transcription",
    "UnknownAdapter",
    "UnknownModel",
    "UnsupportedVersion",
    "Usage",
    "Watch",
    "Word",
    "WorkerInfo",
    "WorkerSnapshot",
    "WorkerStatus",
    "WrongState",
    "__version__",
]
