"""Lightning's Trainer on poptorch: `Trainer(accelerator="ipu", devices=8)`.

`autoload` gets the names into Lightning; the classes are built for a Lightning package when they are first asked for.
"""
