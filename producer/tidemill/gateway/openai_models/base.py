"""What all bodies share."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from tidemill.protocol.errors import InvalidRequest

_log = logging.getLogger("tidemill.gateway.requests")


#: Of the field ``callback_url``.
CALLBACK = "Gets a signed webhook when a job of the request has ended"


def refuse_unserved(fields: Any, unserved: Mapping[str, str]) -> Any:
    """Return the fields of a body; raises ``InvalidRequest`` for one that asks for the unserved.

    ``unserved`` tells the reason by the name of the field, which is known but has no effect here;
    what asks for nothing, such as false or an empty object, passes.
    """
    if isinstance(fields, dict):
        for name, reason in unserved.items():
            if fields.get(name):
                # As it is: as a complaint of pydantic's it would have no field.
                raise InvalidRequest(f"{name}: it is not supported, {reason}", field=name)
    return fields


class ApiRequest(BaseModel):
    """The body of a request.

    A field that is null counts as left out; unknown ones are ignored, and told in the log at the
    level DEBUG.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _note_unknown(self) -> "ApiRequest":
        if self.model_extra and _log.isEnabledFor(logging.DEBUG):
            names = ", ".join(sorted(self.model_extra))[:400]
            _log.debug("%s: ignored %s", type(self).__name__, names)
        return self


class ApiResponse(BaseModel):
    """The body of an answer; declares it, and need not be built to send it."""

    model_config = ConfigDict(protected_namespaces=())
