"""Jobs whose idempotency key is that of a whole request."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

from tidemill._request import Draft, JobSpec


class KeyedSpec(JobSpec):
    """A job that is found by its key only if all of the request's body is the same.

    ``identity`` stands for the body, of which a part may say how the answer is told and nothing
    else.
    """

    def __init__(self, spec: JobSpec, identity: bytes) -> None:
        super().__init__(spec.prompt, **spec.options)
        self._spec, self._identity = spec, identity

    def draft(self, *args: Any, **options: Any) -> Draft:
        """Check the job as it is; raises ``InvalidRequest``."""
        draft = self._spec.draft(*args, **options)
        digest = sha256(draft.body_digest.encode() + self._identity).hexdigest()
        return replace(draft, body_digest=digest)
