"""Section `evaluate`."""

from pipeline.params.section import Section, param


class EvaluateParams(Section):
    """Section `evaluate`."""

    temperature: float = param("answers are sampled at this temperature", 1.0, gt=0)
    bootstrap: int = param("resamples for the confidence intervals", 2000, ge=100)
