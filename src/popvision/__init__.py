"""Profiles made visible: figures (`analysis`), text, a page in the browser, comparisons, traces for other tools.

Reads `popengine.profile` and nothing else of the engine, so that no torch is loaded.
"""
