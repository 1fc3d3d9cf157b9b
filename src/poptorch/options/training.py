"""`Options.Training`: how gradients become a weight update."""

from typing import Self

from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.logs import logger
from poptorch.options.option_base import OptionsDict, Setting, expect, recorded


class Training(OptionsDict):
    """How gradients become a weight update."""

    _renamed = {
        "accumulationReductionType": "accumulationAndReplicationReductionType",
        "meanAccumulationAndReplicationReductionStrategy": "mean_accumulation_and_replication_reduction_strategy",
    }

    accumulation_and_replication_reduction_type = Setting(ReductionType.Mean.value)
    gradient_accumulation = Setting(1, positive=True)
    mean_accumulation_and_replication_reduction_strategy = Setting(MeanReductionStrategy.Post.value)

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Micro-batches for each weight update, on each replica."""
        return self.set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Sum the gradients over micro-batches and replicas, or take their mean (default).

        Raises: ValueError, for anything else.
        """
        if not isinstance(reduction_type, ReductionType) or reduction_type is ReductionType.NoReduction:
            raise ValueError(
                "accumulationAndReplicationReductionType takes poptorch.ReductionType.Sum or "
                f"poptorch.ReductionType.Mean; found {reduction_type!r}"
            )
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(self, strategy: MeanReductionStrategy) -> Self:
        """Where the division of a mean happens: while gradients add up (Running) or after (Post, default)."""
        setter = "setMeanAccumulationAndReplicationReductionStrategy"
        expect(setter, strategy, MeanReductionStrategy, ValueError)
        if strategy is MeanReductionStrategy.PostAndLoss:
            logger.warning("MeanReductionStrategy.PostAndLoss is deprecated: use Post, the result is equal")
        return self.set(mean_accumulation_and_replication_reduction_strategy=strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adapt the loss scale to the largest gradients after each weight update."""
        expect("setAutomaticLossScaling", enabled, bool)
        return self._set_popart("automaticLossScalingSettings.enabled", enabled)

    @recorded("there are no tiles to spread convolutions over")
    def setConvolutionDithering(self, enabled: bool) -> Self:
        expect("setConvolutionDithering", enabled, bool)
        self._popart.merge("convolutionOptions", {"enableConvDithering": enabled})
        return self
