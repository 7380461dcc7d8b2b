"""A pytest plugin for mutation runs: any failure of hypothesis will do, so none is made smaller."""

from hypothesis import HealthCheck, Phase, settings

# No example is too slow: that would count as a bug found.
settings.register_profile(
    "mutation",
    max_examples=800,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
