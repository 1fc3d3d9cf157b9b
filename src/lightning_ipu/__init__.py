"""Lightning's Trainer on poptorch: `Trainer(accelerator="ipu", devices=8)`.

`autoload` adds the names to Lightning, and `family` builds the classes for a Lightning package at first use.
"""
