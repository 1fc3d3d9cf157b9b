"""Views of profiles: figures (`analysis`), text, pages for a browser, comparisons, traces for other tools.

Imports only those modules of popengine that don't load torch.
"""
