"""What ``rerank`` refuses before anything is scored."""

from typing import Any, cast

import pytest

from support.twins import Twin
from tidemill.protocol.errors import InvalidRequest


@pytest.mark.parametrize("top_n", [0, -1, True, "2", 1.0])
def test_a_count_of_documents_that_keeps_none_or_drops_the_worst_is_refused(
    producer: Twin, top_n: object
) -> None:
    with pytest.raises(InvalidRequest, match=r"^top_n: ") as caught:
        cast(Any, producer).rerank("query", ["one", "two"], top_n=top_n, timeout=0.1)
    assert caught.value.field == "top_n"
