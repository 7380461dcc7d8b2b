"""What --speculative-config takes and refuses."""

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.speculation.config import SpeculativeConfig, parse_speculative_config


def test_all_settings_are_read() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5,'
        ' "prompt_lookup_min": 2, "disable_by_batch_size": 8}'
    )

    assert parse_speculative_config(text) == SpeculativeConfig(
        num_speculative_tokens=4, prompt_lookup_max=5, prompt_lookup_min=2, disable_by_batch_size=8
    )


@pytest.mark.parametrize("name", ["prompt_lookup_max", "prompt_lookup_min"])
def test_one_length_of_the_lookup_stands_for_both(name: str) -> None:
    config = parse_speculative_config(
        f'{{"method": "ngram", "num_speculative_tokens": 4, "{name}": 3}}'
    )

    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"num_speculative_tokens": 4}', "method None"),
        ('{"method": "eagle", "num_speculative_tokens": 4}', "'eagle'"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "exceeds 32"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}', "'model'"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2,'
            ' "prompt_lookup_min": 3}',
            "prompt_lookup_min exceeds",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": 0}',
            "disable_by_batch_size",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_speculative_config(text)
