"""What one engine step costs in time: the model by which scheduler and worker predict.

A step that puts ``t`` tokens through the model, whose prompt tokens attend to ``p`` earlier
positions in sum and whose decoded tokens to ``c``, takes ``base + per_token t + per_pair p +
per_context c`` seconds: weights are read once, each token passes the linear layers, attention of a
prefill is compute-bound and that of a decode bound by reading the KV cache.
"""

from tidemill.protocol.wire_model import Natural, Seconds, WireModel


class StepFeatures(WireModel):
    """What one step did: tokens, attended positions, and the time it took."""

    prefill_tokens: Natural = 0
    decode_tokens: Natural = 0
    #: Sum over prefilled tokens of the positions before them.
    prefill_pairs: Natural = 0
    #: Sum over decoded tokens of the length of their context.
    context_tokens: Natural = 0
    seconds: Seconds = 0.0


class StepCost(WireModel):
    """Coefficients in seconds; the defaults are a roofline guess for 8B weights in bf16 on an H100.

    They were never measured: a worker fits its own, and ``tidemill calibrate`` does for a
    simulation.
    """

    base: Seconds = 6e-3
    per_token: Seconds = 32e-6
    per_pair: Seconds = 1.06e-9
    per_context: Seconds = 0.049e-6

    def predict(self, step: StepFeatures) -> float:
        """Return the seconds that a step with these features takes."""
        return (
            self.base
            + self.per_token * (step.prefill_tokens + step.decode_tokens)
            + self.per_pair * step.prefill_pairs
            + self.per_context * step.context_tokens
        )

    def prefill_seconds(self, uncached: int, length: int) -> float:
        """Return the seconds for the last ``uncached`` tokens of a prompt of ``length`` tokens.

        Without the base, which the step pays anyway.
        """
        return self.per_token * uncached + self.per_pair * uncached * (length - uncached / 2)
