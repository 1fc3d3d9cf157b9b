"""`Options.TensorLocations`: where activations, weights and optimizer state live. Never changes a result."""

from typing import Self

from poptorch.options.option_base import OptionsDict, Setting, expect, recorded


class TensorLocationSettings(OptionsDict):
    """Where tensors of one kind are kept.

    >>> TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    """

    io_tiles_to_load: Setting[bool] = Setting()
    io_tiles_to_store: Setting[bool] = Setting()
    min_elements_for_off_chip: Setting[int] = Setting()
    min_elements_for_replicated_tensor_sharding: Setting[int] = Setting()
    on_chip_storage: Setting[bool] = Setting()
    replicated_tensor_sharding: Setting[bool] = Setting()

    @recorded("tensors stay where they are computed")
    def minElementsForOffChip(self, min_elements: int) -> Self:
        return self.createOrSet(min_elements_for_off_chip=expect("minElementsForOffChip", min_elements, int))

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """The optimizer's state of smaller parameters is kept whole on each replica."""
        expect("minElementsForReplicatedTensorSharding", min_elements, int)
        return self.createOrSet(min_elements_for_replicated_tensor_sharding=min_elements)

    @recorded("tensors stay where they are computed; a profile says what the moves would take")
    def useOnChipStorage(self, use: bool | None) -> Self:
        """None forgets the setting."""
        if use is None:
            self.checkIsFrozen()
            return self.deleteIfExists("on_chip_storage")
        assert isinstance(use, bool), f"useOnChipStorage takes a bool or None; found {use!r}"
        return self.createOrSet(on_chip_storage=use)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Each of R replicas of all instances keeps 1/R of the optimizer's state (no other kind of tensor is shared
        out): see [scaling out](../guide/scaling.md).
        """
        return self.createOrSet(replicated_tensor_sharding=expect("useReplicatedTensorSharding", use, bool))

    @recorded("there are no tiles")
    def useIOTilesToLoad(self, use: bool = True) -> Self:
        return self.createOrSet(io_tiles_to_load=expect("useIOTilesToLoad", use, bool))

    @recorded("there are no tiles")
    def useIOTilesToStore(self, use: bool = True) -> Self:
        return self.createOrSet(io_tiles_to_store=expect("useIOTilesToStore", use, bool))


class TensorLocations(OptionsDict):
    """The location settings of each kind of tensor, read back as `location_weight` and so on."""

    location_activation = Setting(TensorLocationSettings())
    location_weight = Setting(TensorLocationSettings())
    location_optimizer = Setting(TensorLocationSettings())
    location_accumulator = Setting(TensorLocationSettings())
    num_io_tiles: Setting[int] = Setting()

    @recorded("activations stay where they are computed")
    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        return self.set(location_activation=location)

    @recorded("weights stay where they are used")
    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        return self.set(location_weight=location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Whether the optimizer's state is shared out over replicas."""
        return self.set(location_optimizer=location)

    @recorded("sums of gradients stay where they are computed")
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        return self.set(location_accumulator=location)

    @recorded("there are no tiles; overlapped inputs and outputs ask for it")
    def numIOTiles(self, num_tiles: int) -> Self:
        valid = isinstance(num_tiles, int) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0
        assert valid, f"numIOTiles must be an even number between 32 and 192; found {num_tiles!r}"
        return self.createOrSet(num_io_tiles=num_tiles)
