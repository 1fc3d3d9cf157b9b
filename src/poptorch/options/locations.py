"""`Options.TensorLocations`: where activations, weights and optimizer state live. Never changes a result."""

from __future__ import annotations

from typing import Self

from poptorch.options.base import OptionsDict


class TensorLocationSettings(OptionsDict):
    """Where tensors of one kind live.

    >>> TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    """

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Smaller tensors stay on the device."""
        assert isinstance(min_elements, int), f"minElementsForOffChip takes an int; found {min_elements!r}"
        return self.createOrSet(min_elements_for_off_chip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Smaller tensors are kept whole on each replica."""
        assert isinstance(min_elements, int), (
            f"minElementsForReplicatedTensorSharding takes an int; found {min_elements!r}"
        )
        return self.createOrSet(min_elements_for_replicated_tensor_sharding=min_elements)

    def useOnChipStorage(self, use: bool | None) -> Self:
        """True: in the device's memory; False: in the host's. None forgets the setting."""
        if use is None:
            self.checkIsFrozen()
            return self.deleteIfExists("on_chip_storage")
        assert isinstance(use, bool), f"useOnChipStorage takes a bool or None; found {use!r}"
        return self.createOrSet(on_chip_storage=use)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Each of R replicas holds 1/R of the tensor."""
        assert isinstance(use, bool), f"useReplicatedTensorSharding takes a bool; found {use!r}"
        return self.createOrSet(replicated_tensor_sharding=use)

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Recorded: an IPU may set tiles apart to load tensors."""
        assert isinstance(use, bool), f"useIOTilesToLoad takes a bool; found {use!r}"
        return self.createOrSet(io_tiles_to_load=use)

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Recorded: an IPU may set tiles apart to store tensors."""
        assert isinstance(use, bool), f"useIOTilesToStore takes a bool; found {use!r}"
        return self.createOrSet(io_tiles_to_store=use)


class TensorLocations(OptionsDict):
    """The location settings of each kind of tensor, read back as `location_weight` and so on."""

    def __init__(self) -> None:
        super().__init__(
            location_activation=TensorLocationSettings(),
            location_weight=TensorLocationSettings(),
            location_optimizer=TensorLocationSettings(),
            location_accumulator=TensorLocationSettings(),
        )

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        return self.set(location_activation=location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        return self.set(location_weight=location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """For the optimizer's state, such as momenta."""
        return self.set(location_optimizer=location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """For the sums of gradients."""
        return self.set(location_accumulator=location)

    def numIOTiles(self, num_tiles: int) -> Self:
        """Recorded: how many of an IPU's tiles only move data."""
        valid = isinstance(num_tiles, int) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0
        assert valid, f"numIOTiles must be an even number between 32 and 192; found {num_tiles!r}"
        return self.createOrSet(num_io_tiles=num_tiles)
