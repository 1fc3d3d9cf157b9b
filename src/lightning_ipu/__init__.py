"""Lightning's Trainer on poptorch: `Trainer(accelerator="ipu", devices=8)`.

`autoload` adds the names to Lightning; `family` builds the classes for a Lightning package at their first use.
"""
