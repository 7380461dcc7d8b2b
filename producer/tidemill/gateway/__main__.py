"""``python -m tidemill.gateway``: serves the HTTP interface of the queue."""

import logging
import sys
from collections.abc import Sequence

from tidemill.gateway.config import parse_arguments
from tidemill.gateway.server import serve
from tidemill.protocol.errors import ConfigError, PortInUse, TidemillError
from tidemill.service.config import load_api_keys, load_config
from tidemill.service.log import setup_logging
from tidemill.service.runtime import exit_with_parent

_log = logging.getLogger("tidemill.gateway")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; returns the exit status.

    0 drained, 1 an error that may pass, 2 what another start cannot cure.
    """
    exit_with_parent()
    try:
        service = load_config()
        settings = parse_arguments(arguments, service, load_api_keys())
        setup_logging(service.log_level, "gateway")
        serve(settings)
    except TidemillError as error:
        return _refuse(error.one_line(), 2 if isinstance(error, ConfigError | PortInUse) else 1)
    except Exception as error:
        _log.exception("the gateway ends")
        return _refuse(f"unexpected {type(error).__name__}; see the log above", 1)
    return 0


def _refuse(reason: str, status: int) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
