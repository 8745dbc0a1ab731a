"""Per-token estimates of the divergence from a reference. Source: joschu.net/blog/kl-approx.html."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Bound on log-ratios before the exponential, so that no ratio overflows."""

ESTIMATORS = ("k1", "k2", "k3")


def divergence(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """Estimates (N,) in nats of KL(model || reference), each from one sampled token.

    k1 is unbiased, has either sign, and has no gradient in expectation. k2 is biased and never negative, and its
    gradient is that of the divergence on policy. k3 is unbiased and never negative.
    """
    if estimator == "k1":
        return logprobs_N - reference_N
    if estimator == "k2":
        return 0.5 * (logprobs_N - reference_N).square()
    log_ratio_N = (reference_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio_N.exp() - log_ratio_N - 1.0
