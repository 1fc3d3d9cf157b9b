"""Profiles made visible: figures (`analysis`), text, a page in the browser, comparisons, traces for other tools.

Imports only those modules of popengine that don't load torch.
"""
