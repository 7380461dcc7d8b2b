"""What the work on batches is done with."""

from dataclasses import dataclass

from tidemill._async_link import AsyncLink
from tidemill.async_client import AsyncProducer
from tidemill.batches.translation import Translator
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.settings import RunnerSettings


@dataclass(frozen=True, slots=True)
class BatchTools:
    """What the runs of one tenant's batches share."""

    link: AsyncLink
    keys: ShardKeys
    blobs: BlobStore
    producer: AsyncProducer
    translator: Translator
    settings: RunnerSettings
