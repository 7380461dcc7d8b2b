"""A pytest plugin for mutation runs: any failure of hypothesis will do, so none is made smaller."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutation", max_examples=800, phases=[Phase.explicit, Phase.generate], database=None
)
